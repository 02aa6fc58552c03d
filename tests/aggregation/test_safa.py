"""SAFA's cache: who is drafted, who is left over, who lags too far, who has never come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedasync.aggregation.safa import CacheMean
from fedasync.aggregation.update import Input, Inputs


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def step(
    version: int, entering: list[tuple[int, float, int]], undrafted: list[tuple[int, float, int]] | None = None
) -> Inputs:
    """(client, model, τ) each; four clients in all."""
    drafted, others = (
        [Input(vector(x), 1, tau, worker) for worker, x, tau in group] for group in (entering, undrafted or [])
    )
    return Inputs(drafted, undrafted=others, version=version, clients=4)


def test_the_mean_is_over_all_clients_and_the_undrafted_enter_afterwards() -> None:
    rule, w = CacheMean(lag=9), vector(8.0)
    state = rule.init(w)
    state = rule.apply(w, state, step(0, [(0, 0.0, 0)], [(1, 100.0, 0)]))
    assert w.tolist() == [(0 + 8 + 8 + 8) / 4]
    state = rule.apply(w, state, step(1, [(2, 4.0, 1)]))
    assert w.tolist() == [(0 + 100 + 4 + 8) / 4]
    state = rule.apply(w, state, step(2, [(1, 0.0, 0), (3, 12.0, 2)]))
    assert w.tolist() == [(0 + 0 + 4 + 12) / 4]


def test_an_entry_that_lags_too_far_becomes_the_model_of_before_the_step() -> None:
    """Lag 1: client 0's entry, of base 0, is deprecated at version 2, and counts from then on with that model."""
    rule, w = CacheMean(lag=1), vector(0.0)
    state = rule.init(w)
    state = rule.apply(w, state, step(0, [(i, 4.0, 0) for i in range(4)]))
    assert w.tolist() == [4.0]
    state = rule.apply(w, state, step(1, [(i, 8.0, 0) for i in (1, 2, 3)]))
    assert w.tolist() == [(4 + 3 * 8) / 4]
    state = rule.apply(w, state, step(2, [(i, 8.0, 0) for i in (1, 2, 3)]))
    assert w.tolist() == [(7 + 3 * 8) / 4]
    assert state.entries[0].base_version == 2
    assert state.entries[0].values.tolist() == [7.0]


def test_who_has_never_come_does_not_hold_the_model_at_the_start_for_ever() -> None:
    """Its entry is w_0, which is deprecated like any other."""
    rule, w = CacheMean(lag=2), vector(100.0)
    state = rule.init(w)
    for version in range(60):
        state = rule.apply(w, state, step(version, [(i, 0.0, 0) for i in (0, 1, 2)]))
        if version <= 2:
            assert w.tolist() == [25.0]
        assert float(w) <= 25.0
    assert float(w) < 1e-4


def test_samples_weigh_and_who_has_never_come_counts_with_their_mean() -> None:
    rule, w = CacheMean(lag=5), vector(10.0)
    entering = [Input(vector(0.0), 1, 0, 0), Input(vector(4.0), 5, 0, 1)]
    rule.apply(w, rule.init(w), Inputs(entering, version=0, clients=3))
    assert float(w) == pytest.approx((1 * 0 + 5 * 4 + 3 * 10) / 9)


def test_what_is_cached_is_its_own_memory() -> None:
    rule, w, x = CacheMean(lag=5), vector(0.0), vector(4.0)
    state = rule.apply(w, rule.init(w), Inputs([Input(x, 1, 0, 0)], version=0, clients=1))
    x.fill_(99.0)
    w.fill_(7.0)
    assert state.entries[0].values.tolist() == [4.0]
    assert state.start.tolist() == [0.0]
