"""How far two versions differ: 0 (a cosine: 1) for equal ones to the last bit, and values that can be had otherwise."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.stats import norm

from fedasync.publication import action_disagreement, categorical_kl, feature_cosine, gaussian_kl

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 5))
TABLES = SHAPES.flatmap(lambda shape: arrays(np.float64, shape, elements=st.floats(-1e3, 1e3)))
PAIRS = SHAPES.flatmap(
    lambda s: st.tuples(*[arrays(np.float64, s, elements=st.floats(-30, 30, allow_subnormal=False))] * 2)
)


@given(table=TABLES)
def test_equal_versions_do_not_differ_at_all(table: NDArray[np.float64]) -> None:
    std = np.abs(table) + 0.5
    assert action_disagreement(table, table.copy()) == 0.0
    assert categorical_kl(table, table.copy()) == 0.0
    assert gaussian_kl(table, std, table.copy(), std.copy()) == 0.0
    assert feature_cosine(table, table.copy()) == 1.0


@given(pair=PAIRS)
def test_measures_lie_where_they_must(pair: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    new, old = pair
    assert 0 <= action_disagreement(new, old) == action_disagreement(old, new) <= 1
    assert categorical_kl(new, old) >= 0
    assert gaussian_kl(new, np.exp(old / 30), old, np.exp(new / 30)) >= 0
    assert -1 <= feature_cosine(new, old) <= 1
    assert feature_cosine(new, old) == pytest.approx(feature_cosine(3 * old, 0.25 * new))


@given(pair=PAIRS, shift=st.floats(-100, 100))
def test_logits_are_known_up_to_a_constant(pair: tuple[NDArray[np.float64], NDArray[np.float64]], shift: float) -> None:
    new, old = pair
    assert categorical_kl(new + shift, old) == pytest.approx(categorical_kl(new, old), abs=1e-9)


def test_disagreement_is_the_share_of_other_choices() -> None:
    new = [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0], [5.0, 4.0]]
    old = [[0.0, 9.0], [0.0, 1.0], [7.0, 7.0], [1.0, 2.0]]
    assert action_disagreement(new, old) == 2 / 4, "of equal values the first is chosen"


def test_categorical_kl_by_hand() -> None:
    """KL((1/2, 1/2) ‖ (1/4, 3/4)) = ½ ln 2 + ½ ln(2/3), in that direction; the mean over states."""
    new, old = np.log([[0.5, 0.5], [0.2, 0.8]]), np.log([[0.25, 0.75], [0.2, 0.8]])
    expected = (log(2) + log(2 / 3)) / 2
    assert categorical_kl(new, old) == pytest.approx(expected / 2)
    assert categorical_kl(old, new) == pytest.approx((0.25 * log(0.5) + 0.75 * log(1.5)) / 2)


def test_gaussian_kl_is_the_integral_and_a_mean_over_dimensions() -> None:
    x = np.linspace(-30, 30, 200_001)
    new, old = norm(0.3, 0.7), norm(-0.5, 1.9)
    density = new.pdf(x)
    inside = density > 0
    integral = np.trapezoid(density[inside] * (new.logpdf(x) - old.logpdf(x))[inside], x[inside])
    assert gaussian_kl([[0.3]], [[0.7]], [[-0.5]], [[1.9]]) == pytest.approx(integral, rel=1e-6)
    both = gaussian_kl([[0.3, 4.0]], [[0.7, 1.0]], [[-0.5, 4.0]], [[1.9, 1.0]])
    assert both == pytest.approx(integral / 2, rel=1e-6), "a second dimension without difference halves it"
    assert gaussian_kl([[1.0]], [[1.0]], [[0.0]], [[1.0]]) == pytest.approx(0.5)


def test_cosine_per_state_then_the_mean() -> None:
    new = [[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [-3.0, 0.0]]
    old = [[5.0, 0.0], [0.0, 1.0], [1.0, 0.0], [3.0, 0.0]]
    assert feature_cosine(new, old) == pytest.approx((1 + 0 + 0.5**0.5 - 1) / 4)


def test_features_of_any_size_and_of_none() -> None:
    assert feature_cosine([[1e-300, 0.0]], [[1e300, 0.0]]) == 1.0
    assert feature_cosine([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]) == 0.5
    maps = np.ones((3, 2, 4, 4))
    assert feature_cosine(maps, 2 * maps) == pytest.approx(1.0), "of each state all its features together"


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (lambda: action_disagreement([[1.0, 2.0]], [[1.0]]), r"must have one shape .* got \[1, 2\] and \[1, 1\]"),
        (lambda: action_disagreement([1.0], [1.0]), r"got \[1\] and \[1\]"),
        (lambda: feature_cosine(np.ones((0, 2)), np.ones((0, 2))), r"N ≥ 1, got \[0, 2\]"),
        (lambda: categorical_kl([[np.nan]], [[1.0]]), "logits must be finite"),
        (lambda: gaussian_kl([[1.0]], [[0.0]], [[1.0]], [[1.0]]), "standard deviations must be > 0, got 0"),
        (lambda: gaussian_kl([[1.0]], [[1.0, 1.0]], [[1.0]], [[1.0, 1.0]]), r"the shape of the means \[1, 1\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(measure: Callable[[], float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure()
