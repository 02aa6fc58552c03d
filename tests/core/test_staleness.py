"""Staleness weights: s(0) = 1, never increasing, hinge continuous, polynomial with a = 0 constant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import Constant, Hinge, Polynomial, Staleness

exponents = st.floats(0, 10)
weights = st.one_of(
    st.just(Constant()),
    st.builds(Polynomial, exponents),
    st.builds(Hinge, st.floats(0, 100), st.floats(0, 50)),
)


@given(s=weights, tau=st.integers(0, 10_000))
def test_a_fresh_contribution_counts_in_full_and_an_older_one_never_for_more(s: Staleness, tau: int) -> None:
    assert s(0) == 1.0
    assert 0 <= s(tau + 1) <= s(tau) <= 1


@given(a=st.floats(0, 100), b=st.integers(0, 50))
def test_the_hinge_is_continuous_at_b(a: float, b: int) -> None:
    assert Hinge(a, b)(b) == 1.0
    assert Hinge(a, b)(b + 1) == pytest.approx(1 / (a + 1), rel=1e-12)


@given(tau=st.integers(0, 10_000))
def test_a_polynomial_with_exponent_0_is_constant(tau: int) -> None:
    assert Polynomial(0.0)(tau) == Constant()(tau) == 1.0


def test_published_values_are_met() -> None:
    assert Polynomial(0.5)(3) == 0.5
    assert Hinge(10, 2)(3) == 1 / 11
    assert Hinge(10, 4)(4) == 1.0
    assert Polynomial(0.5)(0) == 1.0


@pytest.mark.parametrize("s", [Constant(), Polynomial(0.5), Hinge(10, 4)], ids=lambda s: s.kind)
def test_a_negative_staleness_raises(s: Staleness) -> None:
    with pytest.raises(ValueError, match="staleness is an integer ≥ 0, got -1"):
        s(-1)


@pytest.mark.parametrize("a", [-0.1, float("nan"), float("inf")])
def test_exponents_and_slopes_out_of_range_are_refused(a: float) -> None:
    for wrong in (lambda: Polynomial(a), lambda: Hinge(a, 4), lambda: Hinge(10, a)):
        with pytest.raises(ValueError, match="must be ≥ 0 and finite"):
            wrong()
