"""FedStaleWeight: weights in proportion to each client's mean staleness over its last deliveries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedasync.aggregation.fedstaleweight import StalenessProportional
from fedasync.aggregation.update import Input, Inputs


def brought(worker: int, tau: int, value: float = 0.0) -> Input:
    return Input(torch.tensor([value], dtype=torch.float64), 1, tau, worker)


def test_a_sequence_by_hand() -> None:
    rule, w = StalenessProportional(2.0, memory=2), torch.zeros(1, dtype=torch.float64)
    state = rule.init(w)
    state = rule.apply(w, state, Inputs([brought(0, 0, 1.0), brought(1, 0, 3.0)]))
    assert w.tolist() == [2.0 * 2.0]  # nobody is late: equal weights
    state = rule.apply(w, state, Inputs([brought(0, 2, 1.0), brought(1, 6, 3.0)]))  # means 1 and 3
    assert w.tolist() == [4.0 + 2.0 * (1 / 4 * 1 + 3 / 4 * 3)]
    state = rule.apply(w, state, Inputs([brought(0, 4, 8.0), brought(1, 0, 4.0)]))  # means 3 and 3: the oldest is gone
    assert w.tolist() == [4.0 + 5.0 + 2.0 * 6.0]


def test_a_full_memory_forgets_the_oldest_not_the_newest() -> None:
    rule = StalenessProportional(memory=3)
    recent = rule.init(torch.zeros(1))
    for tau in (9, 1, 2, 3):
        rule.weights(recent, Inputs([brought(0, tau)]))
    assert list(recent[0]) == [1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=12))
def test_weights_sum_to_1_and_none_is_negative(arrivals: list[tuple[int, int]]) -> None:
    rule = StalenessProportional()
    weights = rule.weights({}, Inputs([brought(worker, tau) for worker, tau in arrivals]))
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)
    assert min(weights) >= 0


def test_of_two_clients_the_one_that_is_mostly_later_weighs_more() -> None:
    rule = StalenessProportional()
    fast, slow = rule.weights({}, Inputs([brought(0, 1), brought(1, 3)]))
    assert (fast, slow) == (1 / 4, 3 / 4)
