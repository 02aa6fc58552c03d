"""SCAFFOLD: option II by hand, and c = mean of all c_i whatever happens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation.scaffold import ControlVariates, Variates
from fedasync.aggregation.step_sizes import UnknownStepSizesError
from fedasync.aggregation.update import Input, Inputs

CLIENTS = 4


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def brought(worker: int, delta: Tensor, control: Tensor | None, size: float | None = 0.5) -> Input:
    return Input(delta, 1, 0, worker, step_size_sum=size, control=control)


def mean_of_clients(state: Variates, zero: Tensor) -> Tensor:
    return sum(state.clients.values(), torch.zeros_like(zero)) / CLIENTS


def test_two_rounds_by_hand() -> None:
    """η_l·Q = 1/2, η = 2, N = 4: c_i ← c_i − c − 2·Δ_i, c ← c + (1/4)·Σ δc_i, w ← w + 2·mean(Δ)."""
    rule, w = ControlVariates(2.0), vector(10.0)
    state = rule.init(w)
    assert all(rule.control(state, worker).tolist() == [0.0] for worker in range(CLIENTS))
    told = [rule.control(state, worker) for worker in (0, 1)]
    first = [brought(0, vector(-1.0), told[0]), brought(1, vector(3.0), told[1])]
    state = rule.apply(w, state, Inputs(first, clients=CLIENTS))
    assert w.tolist() == [12.0]
    assert {worker: c.tolist() for worker, c in state.clients.items()} == {0: [2.0], 1: [-6.0]}
    assert state.server.tolist() == [-1.0]
    assert [rule.control(state, worker).tolist() for worker in range(3)] == [[-3.0], [5.0], [-1.0]]
    told = [rule.control(state, worker) for worker in (1, 2)]
    second = [brought(1, vector(1.0), told[0]), brought(2, vector(-2.0), told[1])]
    state = rule.apply(w, state, Inputs(second, clients=CLIENTS))
    assert w.tolist() == [11.0]
    assert {worker: c.tolist() for worker, c in state.clients.items()} == {0: [2.0], 1: [-7.0], 2: [5.0]}
    assert state.server.tolist() == [0.0]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_c_stays_the_mean_of_all_c_i(data: st.DataObject, seed: int) -> None:
    """Whoever takes part, with whatever step sizes, once or twice in a round."""
    random = torch.Generator().manual_seed(seed)
    rule, w = ControlVariates(), torch.randn(3, generator=random, dtype=torch.float64)
    state = rule.init(w)
    for _ in range(6):
        workers = data.draw(st.lists(st.integers(0, CLIENTS - 1), min_size=1, max_size=5))
        entering = [
            brought(
                worker,
                torch.randn(3, generator=random, dtype=torch.float64),
                rule.control(state, worker),
                data.draw(st.floats(0.1, 2.0)),
            )
            for worker in workers
        ]
        state = rule.apply(w, state, Inputs(entering, clients=CLIENTS))
        torch.testing.assert_close(state.server, mean_of_clients(state, w), rtol=1e-9, atol=1e-9)


def test_what_a_client_is_told_does_not_change_with_the_server() -> None:
    rule, w = ControlVariates(), vector(0.0)
    state = rule.init(w)
    told = rule.control(state, 3)
    rule.apply(w, state, Inputs([brought(0, vector(1.0), rule.control(state, 0))], clients=CLIENTS))
    assert told.tolist() == [0.0]
    assert rule.control(state, 3).tolist() == [-0.5]


def test_contributions_without_step_sizes_are_refused() -> None:
    rule, w = ControlVariates(), vector(0.0)
    with pytest.raises(UnknownStepSizesError, match="scaffold needs the sizes of client 2's local steps"):
        rule.apply(w, rule.init(w), Inputs([brought(2, vector(1.0), None, None)], clients=CLIENTS))
    assert w.tolist() == [0.0]
