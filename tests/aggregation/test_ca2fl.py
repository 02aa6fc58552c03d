"""CA2FL: the paper's loop over arrivals, and h̄ = mean of the cache after every step."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation.ca2fl import CachedCalibration
from fedasync.aggregation.update import Input, Inputs

N = 5


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_buffers_by_hand() -> None:
    """N = 5, K = 2, η = 1/2: the first buffer is FedBuff's, the second is calibrated by what the first left."""
    rule, w = CachedCalibration(0.5), vector(1.0)
    state = rule.init(w)
    state = rule.apply(w, state, Inputs([Input(vector(4.0), 1, 0, 0), Input(vector(-2.0), 1, 0, 1)], clients=N))
    assert w.tolist() == [1.5]
    assert state.mean.tolist() == [0.4]
    state = rule.apply(w, state, Inputs([Input(vector(6.0), 1, 1, 0), Input(vector(2.0), 1, 0, 2)], clients=N))
    torch.testing.assert_close(w, vector(1.5 + 0.5 * (0.4 + ((6 - 4) + (2 - 0)) / 2)), rtol=1e-15, atol=0)
    torch.testing.assert_close(state.mean, vector((6 - 2 + 2) / N), rtol=1e-14, atol=0)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), eta=st.floats(0.1, 2.0))
def test_a_buffer_is_the_papers_loop_over_arrivals(data: st.DataObject, seed: int, eta: float) -> None:
    """acc += Δ_i − h_i; h_i ← Δ_i; then w ← w + η·(h̄ + acc/K) with the h̄ of before; a client may come twice."""
    random = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(3, generator=random, dtype=torch.float64)

    rule, w = CachedCalibration(eta), draw()
    expected, cache = w.clone(), torch.zeros(N, 3, dtype=torch.float64)
    state = rule.init(w)
    for _ in range(6):
        workers = data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=6))
        entering = [Input(draw(), 1, 0, worker) for worker in workers]
        before, acc = cache.mean(dim=0), torch.zeros(3, dtype=torch.float64)
        for x in entering:
            acc = acc + x.values - cache[x.worker]
            cache[x.worker] = x.values
        expected = expected + eta * (before + acc / len(entering))
        state = rule.apply(w, state, Inputs(entering, clients=N))
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state.mean, cache.mean(dim=0), rtol=1e-12, atol=1e-12)
        assert all(torch.equal(h, cache[worker]) for worker, h in state.cache.items())


def test_when_everybody_takes_part_the_cache_cancels() -> None:
    """K = N, each once: w ← w + η·mean(Δ), whatever is cached."""
    random = torch.Generator().manual_seed(1)
    rule, w = CachedCalibration(0.7), torch.zeros(3, dtype=torch.float64)
    state = rule.init(w)
    expected = w.clone()
    for _ in range(5):
        deltas = torch.randn(N, 3, generator=random, dtype=torch.float64)
        state = rule.apply(w, state, Inputs([Input(deltas[i], 1, 0, i) for i in range(N)], clients=N))
        expected += 0.7 * deltas.mean(dim=0)
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)


def test_the_cache_is_its_own_memory() -> None:
    rule, w, delta = CachedCalibration(), vector(0.0), vector(1.0)
    state = rule.apply(w, rule.init(w), Inputs([Input(delta, 1, 0, 0)], clients=N))
    delta.fill_(99.0)
    assert state.cache[0].tolist() == [1.0]
