"""A model of divergence: equal versions do not differ, and the formulas of its page."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.publication import ModelledDivergence, VisitCounts

ALL = ModelledDivergence(
    kl_per_version=0.5,
    kl_power=2.0,
    distance_per_version=0.1,
    disagreement_rate=0.2,
    feature_rate=0.3,
    episodes_per_s=2.0,
    pairs=4,
    visits_per_version=3.0,
    dimension=5,
    information_per_version=10.0,
)
COMPARED = ["disagreement", "distance", "feature_cosine", "kl"]


def test_the_formulas() -> None:
    found = ALL.measure(ALL.names, version=9, published=5, time_s=3.7)
    assert found == pytest.approx(
        {
            "kl": 0.5 * 4**2,
            "distance": 0.1 * 2,
            "disagreement": 1 - exp(-0.8),
            "feature_cosine": exp(-1.2),
            "episodes": 7.0,
            "visit_doublings": 3 * 3 + 1 * 3,  # 27 visits of 4 pairs: 7, 7, 7, 6
            "log_det": 5 * log(1 + 90 / 5),
            "min_eigenvalue": 18.0,
        }
    )


@given(version=st.integers(0, 1000), spread=st.floats(0, 1), luck=st.floats(0, 1, exclude_max=True))
def test_equal_versions_do_not_differ(version: int, spread: float, luck: float) -> None:
    model = ModelledDivergence(1.0, 1.0, 1.0, 0.5, 1.0, 1.0)
    still = model.measure(COMPARED, version, version, 0.0)
    assert still == {"kl": 0.0, "distance": 0.0, "disagreement": 0.0, "feature_cosine": 1.0}
    moved = ModelledDivergence(1.0, 1.0, 1.0, 0.5, 1.0, 1.0, spread=spread).measure(
        COMPARED, version + 3, version, 0.0, lambda *_: luck
    )
    assert 0 <= moved["disagreement"] <= 1
    assert moved["feature_cosine"] <= 1
    assert (1 - spread) * 3 - 1e-9 <= moved["kl"] <= (1 + spread) * 3 + 1e-9


@given(pairs=st.integers(1, 9), per_version=st.integers(0, 5), version=st.integers(0, 80))
def test_even_visits_double_as_counted(pairs: int, per_version: int, version: int) -> None:
    counts = VisitCounts()
    counts.visit(visit % pairs for visit in range(per_version * version))
    model = ModelledDivergence(pairs=pairs, visits_per_version=per_version)
    assert model.measure(["visit_doublings"], version, 0, 0.0) == counts.measures()


def test_blocks_are_alike() -> None:
    found = ALL.measure(["log_det_0", "log_det_7"], 2, 0, 0.0)
    assert found == {"log_det_0": 5 * log(5), "log_det_7": 5 * log(5)}


def test_what_is_not_modelled_is_named_with_what_would_do() -> None:
    model = ModelledDivergence(kl_per_version=1.0)
    assert model.refusal({"kl"}) is None
    assert model.refusal({"kl", "feature_cosine", "log_det_1"}) == (
        "divergence models kl, not feature_cosine, log_det_1; dimension, feature_rate would do"
    )
    with pytest.raises(ValueError, match="divergence models nothing, not episodes; episodes_per_s would do"):
        ModelledDivergence().measure({"episodes"}, 1, 0, 0.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelledDivergence(kl_per_version=-1.0), "kl_per_version must be a finite number ≥ 0, got -1.0"),
        (lambda: ModelledDivergence(kl_power=0.0), "kl_power must be a finite number > 0, got 0.0"),
        (lambda: ModelledDivergence(pairs=0), "pairs must be an integer ≥ 1, got 0"),
        (lambda: ModelledDivergence(spread=1.5), "spread must be a finite number ≥ 0 and ≤ 1, got 1.5"),
        (
            lambda: ModelledDivergence(kl_per_version=1.0, spread=0.5).measure(["kl"], 1, 0, 0.0),
            "a spread of 0.5 needs a draw",
        ),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
