"""Draws with several indices: uniform, independent of who else is drawn, and equal to the laws' own quantiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.simulation.cluster.draws import quantiles, whole_tokens
from fedasync.simulation.laws import (
    Constant,
    Exponential,
    HalfNormal,
    Law,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Values,
    Zipf,
)
from fedasync.simulation.traces import Trace
from fedasync.streams import Draws

SIDE = 100


@given(seed=st.integers(0, 2**64), a=st.integers(0, 2**40), b=st.integers(0, 2**40), c=st.integers(0, 2**20))
def test_a_draw_depends_on_its_indices_alone(seed: int, a: int, b: int, c: int) -> None:
    together = Draws(seed, "x").uniform(np.array([[a], [b]]), 3, np.arange(c, c + 4))
    assert together.shape == (2, 4)
    assert together[1, 2] == Draws(seed, "x").uniform(b, 3, c + 2)[0]
    assert ((together > 0) & (together < 1)).all()


@pytest.mark.parametrize("shape", [(SIDE * SIDE,), (SIDE, SIDE), (10, 10, 10, 10)])
def test_draws_are_uniform_along_every_index(shape: tuple[int, ...]) -> None:
    """χ² with 15 degrees of freedom (mean 15, s.d. 5.5), and means along each index within 4.5 standard errors."""
    indices = np.meshgrid(*map(np.arange, shape), indexing="ij")
    u = Draws(0, "x").uniform(*indices)
    counts = np.bincount((u.ravel() * 16).astype(int), minlength=16)
    expected = u.size / 16
    assert ((counts - expected) ** 2 / expected).sum() < 45
    for axis in range(len(shape)):
        means = np.moveaxis(u, axis, 0).reshape(shape[axis], -1)
        assert np.abs(means.mean(axis=1) - 0.5).max() < 4.5 / np.sqrt(12 * means.shape[1])


def test_indices_names_and_seeds_make_different_draws() -> None:
    draws = Draws(0, "x")
    found = {
        *draws.bits(np.arange(100), 0).tolist(),
        *draws.bits(0, np.arange(1, 101)).tolist(),
        *Draws(1, "x").bits(np.arange(100), 0).tolist(),
        *Draws(0, "y").bits(np.arange(100), 0).tolist(),
    }
    assert len(found) == 400


LAWS = [
    Constant(3.0),
    Uniform(1.0, 4.0),
    Exponential(2.0),
    ShiftedExponential(1.0, 2.0),
    Lognormal(2.0, 0.8),
    Lognormal(2.0, 0.0),
    HalfNormal(1.0),
    Pareto(1.0, 1.5, cap=30.0),
    Zipf(1.2, 16, 180),
    Values((5.0, 1.0, 3.0)),
    Trace("servegen_r1_output"),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_quantiles_of_an_array_are_those_of_the_law(law: Law) -> None:
    u = Draws(0, "u").uniform(np.arange(40)[:, None], np.arange(5))
    found = quantiles(law)(u)
    assert found.shape == u.shape
    np.testing.assert_allclose(found.ravel(), [law.quantile(each) for each in u.ravel().tolist()], rtol=1e-12)


def test_lengths_become_whole_tokens_within_limits() -> None:
    assert whole_tokens(np.array([0.2, 1.6, 2.4, 1e6]), 100).tolist() == [1, 2, 2, 100]
    assert whole_tokens(np.array([0.2, 2**31 - 1]), least=0).tolist() == [0, 2**31 - 1]
    with pytest.raises(ValueError, match=r"^prompts: 2.15e\+09 tokens were drawn"):
        whole_tokens(np.array([1.0, 2**31]))
