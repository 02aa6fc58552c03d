"""FedFix: each client counts p_i a step on average, however rarely it arrives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedasync.aggregation.fedfix import IntervalWeighted
from fedasync.aggregation.update import Input, Inputs


def arrived(value: float, admitted_s: float, worker: int = 0) -> Input:
    return Input(torch.tensor([value], dtype=torch.float64), 1, 0, worker, admitted_s)


@pytest.mark.parametrize(
    ("admitted_s", "now", "steps"),
    [(0.0, 0.5, 1), (0.0, 1.0, 2), (0.5, 1.0, 1), (0.7, 1.0, 1), (0.4, 1.0, 2), (3.0, 3.0, 1), (0.0, 25.0, 50)],
)
def test_a_contribution_counts_the_steps_since_it_was_asked_for(admitted_s: float, now: float, steps: int) -> None:
    """At Δt = 1/2: those after the lease was given out, this one included; also where it began between two steps."""
    assert IntervalWeighted(0.5).steps_since(arrived(1.0, admitted_s), now) == steps


@given(st.integers(1, 10_000), st.integers(0, 1000), st.floats(1e-3, 1e3))
def test_rounding_adds_no_step(k: int, first: int, interval_s: float) -> None:
    rule = IntervalWeighted(interval_s)
    admitted_s = first * interval_s
    assert rule.steps_since(arrived(1.0, admitted_s), (first + k) * interval_s) == k
    assert rule.steps_since(arrived(1.0, sum([interval_s] * 50)), (50 + k) * interval_s) == k


def test_a_step_by_hand() -> None:
    """N = 4, η = 1/2, Δt = 1, at 3 s: w ← w + (1/2)·(1·8 + 3·(−4))/4."""
    w = torch.tensor([1.0], dtype=torch.float64)
    entering = [arrived(8.0, 2.0, 0), arrived(-4.0, 0.0, 1)]
    IntervalWeighted(1.0, 0.5).apply(w, None, Inputs(entering, time_s=3.0, clients=4))
    assert w.tolist() == [1.0 + 0.5 * (8 - 12) / 4]


def test_fast_and_slow_clients_weigh_alike_over_a_common_period() -> None:
    """Of 12 steps a client of t intervals takes part in 12/t, with weight t/N."""
    rule, totals = IntervalWeighted(2.0), {}
    for t in (1, 2, 3, 4):
        w = torch.zeros(1, dtype=torch.float64)
        for i in range(12 // t):
            rule.apply(w, None, Inputs([arrived(1.0, 2.0 * t * i)], time_s=2.0 * t * (i + 1), clients=4))
        totals[t] = float(w)
    assert totals == dict.fromkeys((1, 2, 3, 4), 3.0)
