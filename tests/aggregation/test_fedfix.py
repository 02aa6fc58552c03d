"""FedFix: each client counts p_i a step on average, however rarely it arrives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedasync.aggregation.fedfix import IntervalWeighted
from fedasync.aggregation.update import Input, Inputs


def arrived(value: float, duration_s: float, worker: int = 0) -> Input:
    return Input(torch.tensor([value], dtype=torch.float64), 1, 0, worker, duration_s)


@pytest.mark.parametrize(
    ("duration_s", "intervals"), [(0.0, 1), (0.3, 1), (0.5, 1), (0.500001, 2), (1.0, 2), (1.2, 3), (50.0, 100)]
)
def test_a_contribution_counts_the_intervals_that_it_took(duration_s: float, intervals: int) -> None:
    assert IntervalWeighted(0.5).intervals(arrived(1.0, duration_s)) == intervals


@given(st.integers(1, 10_000), st.floats(1e-3, 1e3))
def test_a_whole_number_of_intervals_is_not_rounded_up(k: int, interval_s: float) -> None:
    rule = IntervalWeighted(interval_s)
    assert rule.intervals(arrived(1.0, k * interval_s)) == k
    assert rule.intervals(arrived(1.0, sum([interval_s] * min(k, 50)))) == min(k, 50)


def test_a_step_by_hand() -> None:
    """N = 4, η = 1/2, Δt = 1: w ← w + (1/2)·(1·8 + 3·(−4))/4."""
    w = torch.tensor([1.0], dtype=torch.float64)
    entering = [arrived(8.0, 0.9, 0), arrived(-4.0, 2.5, 1)]
    IntervalWeighted(1.0, 0.5).apply(w, None, Inputs(entering, clients=4))
    assert w.tolist() == [1.0 + 0.5 * (8 - 12) / 4]


def test_fast_and_slow_clients_weigh_alike_over_a_common_period() -> None:
    """Of 12 steps a client of t intervals takes part in 12/t, with weight t/N."""
    rule, totals = IntervalWeighted(2.0), {}
    for t in (1, 2, 3, 4):
        w = torch.zeros(1, dtype=torch.float64)
        for _ in range(12 // t):
            rule.apply(w, None, Inputs([arrived(1.0, 2.0 * t)], clients=4))
        totals[t] = float(w)
    assert totals == dict.fromkeys((1, 2, 3, 4), 3.0)
