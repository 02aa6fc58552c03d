"""The relative distance of two versions: numpy's, 0 for equal ones, finite whatever the weights."""

from __future__ import annotations

from sys import float_info

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fedasync.aggregation.distance import relative_distance
from fedasync.aggregation.update import BLOCK

PAIRS = st.integers(1, 9).flatmap(lambda n: st.tuples(*[arrays(np.float64, n, elements=st.floats(-1e3, 1e3))] * 2))


@given(pair=PAIRS)
def test_it_is_the_norm_of_the_move_over_the_norm(pair: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    now, before = pair
    norm = np.linalg.norm(before)
    if norm > 1e-100:
        expected = float(np.linalg.norm(now - before) / norm)
        assert relative_distance(torch.tensor(now), torch.tensor(before)) == pytest.approx(
            expected, rel=1e-9, abs=1e-100
        )
    assert relative_distance(torch.tensor(before), torch.tensor(before.copy())) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_long_vectors_of_any_dtype_are_only_read(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(3 * BLOCK + 5, generator=generator).to(dtype)
    now = (before + 0.1).to(dtype)
    kept = now.clone(), before.clone()
    wide_now, wide_before = now.double(), before.double()
    expected = float((wide_now - wide_before).norm() / wide_before.norm())
    assert relative_distance(now, before) == pytest.approx(expected, rel=1e-12)
    assert torch.equal(now, kept[0])
    assert torch.equal(before, kept[1])


def test_from_nothing_every_move_is_as_far_as_can_be() -> None:
    zero = torch.zeros(3)
    assert relative_distance(torch.tensor([0.0, 1e-30, 0.0]), zero) == float_info.max
    assert relative_distance(zero, zero.clone()) == 0.0
    assert relative_distance(zero, torch.ones(3)) == 1.0


def test_weights_whose_squares_overflow_their_own_type() -> None:
    assert relative_distance(torch.full((4,), 2e30), torch.full((4,), 1e30)) == pytest.approx(1.0)
