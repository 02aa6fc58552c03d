"""Lane counts, and that the operations taken for exact are: an element's result is the same wherever it lies."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedasync.workloads.lanes import EXACT, OBSERVED_LANES, lane_count, most_lanes, observe

quanta = st.sampled_from([1, 2, 4, 8, 16, 32])


@given(lanes=st.integers(1, 5000), quantum=quanta)
def test_few_lanes_are_computed_in_vain(lanes: int, quantum: int) -> None:
    count = lane_count(lanes, quantum)
    assert count % quantum == 0
    assert max(2, lanes) <= count < max(2.01, lanes * 1.125 + quantum)
    assert lane_count(count, quantum) == count
    assert count <= lane_count(lanes + 1, quantum)


@given(limit=st.integers(0, 5000), quantum=quanta)
def test_the_most_lanes_use_the_room(limit: int, quantum: int) -> None:
    most = most_lanes(limit, quantum)
    assert lane_count(most, quantum) == most
    assert most <= limit or most == lane_count(1, quantum)
    assert lane_count(most + 1, quantum) > limit


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in "abs ceil cos erf exp expm1 floor neg reciprocal relu round rsqrt sign sin sqrt tanh".split()  # noqa: SIM905
    },
    "log": lambda x: x.abs().log(),
    "log1p": lambda x: x.abs().log1p(),
    "leaky_relu": torch.nn.functional.leaky_relu,
    "add": lambda x: torch.add(x, x.exp(), alpha=-0.3),
    "sub": lambda x: torch.sub(x, x.exp(), alpha=-0.3),
    "rsub": lambda x: torch.rsub(x, x.exp(), alpha=-0.3),
    "mul": lambda x: x * x.exp(),
    "div": lambda x: x / x.exp(),
    "addcmul": lambda x: torch.addcmul(x, x.exp(), x, value=0.3),
    "lerp": lambda x: torch.lerp(x, x.exp(), 0.3),
    "tanh_backward": lambda x: torch.ops.aten.tanh_backward(x.exp(), x.tanh()),
    "threshold_backward": lambda x: torch.ops.aten.threshold_backward(x.exp(), x, 0),
    "leaky_relu_backward": lambda x: torch.ops.aten.leaky_relu_backward(x.exp(), x, 0.1, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_taken_for_exact_are(name: str, dtype: torch.dtype) -> None:
    assert name in EXACT
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=dtype)
    whole = ELEMENTWISE[name](x)
    for length in range(1, 70):
        pieces = torch.cat([ELEMENTWISE[name](piece) for piece in x.split(length)])
        assert pieces.numpy().tobytes() == whole.numpy().tobytes()


@given(size=st.integers(1, 100))
def test_others_leave_nothing_over(size: int) -> None:
    x = torch.zeros(OBSERVED_LANES, size)
    quantum = observe(lambda: torch.sigmoid(x)).quantum
    assert size * quantum % 32 == 0
    assert observe(lambda: torch.relu(x)).quantum == 1


def test_an_observation_counts_memory_and_finds_chance() -> None:
    x = torch.zeros(OBSERVED_LANES, 10)
    seen = observe(lambda: torch.exp(x.view(-1) + 1))
    assert (seen.lane_bytes, seen.operations, seen.random) == (80, 3, None)
    assert observe(lambda: torch.nn.functional.dropout(x, 0.5)).random is not None


def products(x: int, y: int, z: int) -> Callable[[], Tensor]:
    return lambda: torch.bmm(torch.zeros(OBSERVED_LANES, x, y), torch.zeros(OBSERVED_LANES, y, z))


def test_matrices_off_a_boundary_are_seen() -> None:
    assert not observe(products(10, 32, 10)).aligned
    assert observe(products(5, 31, 4)).aligned  # left
    assert observe(products(4, 31, 5)).aligned  # right
    assert observe(products(5, 32, 5)).aligned  # product
    interleaved = torch.zeros(8, OBSERVED_LANES, 32).transpose(0, 1)
    assert observe(lambda: torch.bmm(interleaved, torch.zeros(OBSERVED_LANES, 32, 8))).aligned


def test_columns_of_several_lanes_are_seen() -> None:
    assert not observe(lambda: torch.zeros(OBSERVED_LANES, 8, 5).sum(1)).aligned
    assert not observe(lambda: torch.zeros(8, OBSERVED_LANES * 64).sum(0)).aligned
    assert observe(lambda: torch.zeros(8, OBSERVED_LANES * 7).sum(0)).aligned
