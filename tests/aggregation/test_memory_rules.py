"""MIFA and AREA: what every client brought last, whoever comes often."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation.area import MeanOfLast
from fedasync.aggregation.mifa import LatestMean
from fedasync.aggregation.update import Input, Inputs

N = 4


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def buffers(data: st.DataObject, seed: int, count: int = 7) -> list[list[Input]]:
    """Buffers of 1 to 5 contributions, of clients that may come twice."""
    random = torch.Generator().manual_seed(seed)
    return [
        [
            Input(torch.randn(3, generator=random, dtype=torch.float64), 1, 0, worker)
            for worker in data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=5))
        ]
        for _ in range(count)
    ]


def test_mifa_by_hand() -> None:
    """Nothing moves before all four have delivered; then each step is η times the mean of the latest."""
    rule, w = LatestMean(0.5), vector(1.0)
    state = rule.init(w)
    for worker, delta in enumerate((8.0, 4.0, -4.0)):
        state = rule.apply(w, state, Inputs([Input(vector(delta), 1, 0, worker)], clients=N))
        assert w.tolist() == [1.0]
    state = rule.apply(w, state, Inputs([Input(vector(0.0), 1, 0, 3)], clients=N))
    assert w.tolist() == [2.0]
    rule.apply(w, state, Inputs([Input(vector(-8.0), 1, 0, 0)], clients=N))
    assert w.tolist() == [1.0]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), wait=st.booleans())
def test_mifa_steps_along_the_mean_of_its_table(data: st.DataObject, seed: int, wait: bool) -> None:
    rule, w = LatestMean(0.7, wait), torch.zeros(3, dtype=torch.float64)
    state, expected = rule.init(w), torch.zeros(3, dtype=torch.float64)
    table: dict[int, Tensor] = {}
    for entering in buffers(data, seed):
        table.update({x.worker: x.values.clone() for x in entering})
        state = rule.apply(w, state, Inputs(entering, clients=N))
        if len(table) == N or not wait:
            expected = expected + 0.7 * torch.stack(list(table.values())).sum(dim=0) / N
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)


def test_with_everybody_in_every_round_mifa_is_fedavg_of_equal_clients() -> None:
    random = torch.Generator().manual_seed(2)
    rule, w = LatestMean(), torch.zeros(3, dtype=torch.float64)
    state, expected = rule.init(w), w.clone()
    for _ in range(4):
        deltas = torch.randn(N, 3, generator=random, dtype=torch.float64)
        state = rule.apply(w, state, Inputs([Input(deltas[i], 1, 0, i) for i in range(N)], clients=N))
        expected += deltas.mean(dim=0)
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)


def test_area_by_hand() -> None:
    """w_0 = 8 stands for those who have not uploaded."""
    rule, w = MeanOfLast(), vector(8.0)
    state = rule.init(w)
    for worker, x, expected in ((0, 4.0, 7.0), (1, 0.0, 5.0), (0, 0.0, 4.0), (2, 8.0, 4.0), (3, 0.0, 2.0)):
        state = rule.apply(w, state, Inputs([Input(vector(x), 1, 0, worker)], clients=N))
        assert w.tolist() == [expected]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_areas_model_is_the_mean_of_what_was_uploaded_last(data: st.DataObject, seed: int) -> None:
    rule, w = MeanOfLast(), vector(1.0, -2.0, 3.0)
    last = w.repeat(N, 1)
    state = rule.init(w)
    for entering in buffers(data, seed):
        for x in entering:
            last[x.worker] = x.values
        state = rule.apply(w, state, Inputs(entering, clients=N))
        torch.testing.assert_close(w, last.mean(dim=0), rtol=1e-12, atol=1e-12)


def test_what_is_remembered_is_its_own_memory() -> None:
    x = vector(4.0)
    for rule in (LatestMean(), MeanOfLast()):
        w = vector(0.0)
        state = rule.apply(w, rule.init(w), Inputs([Input(x, 1, 0, 0)], clients=N))
        x.fill_(99.0)
        assert state[0][0].tolist() == [4.0]
        x.fill_(4.0)
