"""Whose memory is whose: nobody's is overwritten, and an arrival takes none but what it brings along."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fedasync.aggregation import update
from fedasync.aggregation.check import alone
from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.model import Contribution, Form, Model
from fedasync.aggregation.server import OverwrittenError
from fedasync.aggregation.server_step import ServerStep
from fedasync.core import Constant, Sliding, Tumbling

from .scalars import Runtime, brings, model

PLAIN = Constant()
P = 10

RULES: dict[str, tuple[Any, Sliding | Tumbling]] = {
    "fedavg": (SampleWeightedMean(), Tumbling(3)),
    "fedasync": (Mixing(0.5, PLAIN), Tumbling(1)),
    "fedbuff": (DeltaMean(1.0, PLAIN), Tumbling(3)),
    "server_step": (ServerStep(), Tumbling(3)),
    "fedfa": (WindowMean(4), Sliding(3)),
    "fedfa_from_the_start": (WindowMean(4), Sliding(3, "average_what_is_there")),
}

every_rule = pytest.mark.parametrize("rule", RULES)


def address(values: Tensor) -> int:
    return values.untyped_storage().data_ptr()


class Client:
    """Hands over values in every kind of memory that a workload might use, and goes on referring to some of it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.matrix = torch.empty(64, P)
        self.rows = 0
        self.kept: list[tuple[Tensor, Tensor]] = []
        """What was handed over as the rule wants it, and a copy of it."""

    def hand_over(self, kind: str, form: Form, x: Tensor, base: Model) -> Tensor:
        if kind == "row of a matrix":
            self.rows += 1
            row = self.matrix[self.rows % 64]
            return row.copy_(x)
        if kind == "numpy":
            return torch.from_numpy(x.numpy().copy())
        if kind == "parameter":
            return torch.nn.Parameter(x.clone())
        if kind == "strided":
            return torch.stack([x, x], dim=1)[:, 0]
        if kind == "inference":
            with torch.inference_mode():
                return x + 0
        if kind == "expanded":
            return x[:1].expand(P)
        if kind == "the base":
            return base.values
        if kind == "a view of the base":
            return base.values.view(-1, 1).view(-1)
        if kind == "the base, detached":
            return base.values.detach()
        if kind == "the published version":
            return self.runtime.server.model.values
        if kind == "kept":
            mine = x.clone()
            if form == self.runtime.server.update.wants:
                self.kept.append((mine, x))
            return mine
        return x.clone()


KINDS = [
    "fresh",
    "row of a matrix",
    "numpy",
    "parameter",
    "strided",
    "inference",
    "expanded",
    "the base",
    "a view of the base",
    "the base, detached",
    "the published version",
    "kept",
]


class Reference:
    """The same rules on copies, in float64, with a memory of their own for everything."""

    def __init__(self, rule: Any, buffer: Sliding | Tumbling) -> None:
        self.rule, self.buffer = rule, buffer
        self.w = torch.zeros(P, dtype=torch.float64)
        self.waiting: list[Tensor] = []

    def bring(self, x: Tensor, base: Tensor) -> None:
        self.waiting.append(x - base if self.rule.wants == "delta" else x)
        if isinstance(self.buffer, Sliding):
            self.waiting = self.waiting[-self.buffer.size :]
            if len(self.waiting) == self.buffer.size or self.buffer.warm_up == "average_what_is_there":
                self.w = torch.stack(self.waiting).mean(dim=0)
            return
        if len(self.waiting) == self.buffer.size:
            xs, self.waiting = torch.stack(self.waiting), []
            if isinstance(self.rule, Mixing):
                self.w = 0.5 * self.w + 0.5 * xs[0]
            else:
                self.w = self.w + xs.mean(dim=0) if self.rule.wants == "delta" else xs.mean(dim=0)


@every_rule
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_memory_clients_use_versions_stay_and_the_model_is_right(rule: str, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "BLOCK", 4)
        start = Model.from_tensors({"w": torch.zeros(P)})
        runtime = Runtime(*RULES[rule], start, concurrency=4)
        client, reference = Client(runtime), Reference(*RULES[rule])
        random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        in_flight: list[tuple[int, bytes]] = []
        published: list[tuple[Tensor, bytes]] = []
        for _ in range(data.draw(st.integers(5, 25))):
            while len(in_flight) < 4:
                lease = runtime.start()
                in_flight.append((lease, runtime.server.base(lease).values.numpy().tobytes()))
            lease, _ = in_flight.pop(data.draw(st.integers(0, 3)))
            base = runtime.server.base(lease)
            origin = base.values.double()
            form: Form = data.draw(st.sampled_from(["parameters", "delta"]))
            kind = data.draw(st.sampled_from(KINDS))
            handed = client.hand_over(kind, form, torch.randn(P, generator=random), base)
            seen = handed.detach().double() + (origin if form == "delta" else 0)
            contribution = [Contribution(handed, form, 1)]
            del handed, base
            runtime.bring(lease, contribution.pop())
            reference.bring(seen, origin)
            now = runtime.server.model.values
            torch.testing.assert_close(now.double(), reference.w, rtol=1e-4, atol=1e-4, msg=kind)
            if not published or published[-1][0] is not now:
                published.append((now, now.numpy().tobytes()))
            assert all(runtime.server.base(i).values.numpy().tobytes() == before for i, before in in_flight), kind
            assert all(version.numpy().tobytes() == before for version, before in published), kind
            assert all(torch.equal(mine, before) for mine, before in client.kept), "the client still refers to it"


def steadily(rule: str, length: int, arrivals: int, watch: Callable[[Runtime], Any]) -> None:
    """Arrivals in whole models from clients that let go of them; ``watch`` sees the runtime around each."""
    runtime = Runtime(*RULES[rule], Model.from_tensors({"w": torch.zeros(length)}))
    leases = [runtime.start() for _ in range(4)]
    for i in range(arrivals):
        values = [torch.full((length,), float(i))]
        with watch(runtime) if i >= 4 * 3 else contextlib.nullcontext():
            runtime.bring(leases.pop(0), Contribution(values.pop(), "parameters", 1))
            leases.append(runtime.start())


class NoFresh(TorchDispatchMode):
    """Fails at any operation that returns ``length`` elements or more in memory that it was not given."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.operations = length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors, _ = tree_flatten((args, kwargs))
        known = {address(t) for t in tensors if isinstance(t, Tensor)}
        for made in tree_flatten(result)[0]:
            if isinstance(made, Tensor) and address(made) not in known:
                assert made.numel() < self.length, f"{func} takes memory for {made.numel()} elements"
        self.operations += 1
        return result


@pytest.mark.parametrize("block", [4, 64])
@every_rule
def test_an_arrival_takes_no_memory_of_a_models_size(rule: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "BLOCK", block)
    steadily(rule, 10, 100, lambda _: NoFresh(10))


def test_the_watch_over_memory_sees_what_is_taken() -> None:
    with NoFresh(10) as watch, pytest.raises(AssertionError, match="memory for 10 elements"):
        torch.zeros(10).clone()
    assert watch.operations == 0


@every_rule
def test_versions_and_contributions_live_in_a_bounded_number_of_places(rule: str) -> None:
    """K in the window or buffer, one version for each lease in flight and the current one, and what comes in."""
    most = 0

    @contextlib.contextmanager
    def watch(runtime: Runtime) -> Iterator[None]:
        nonlocal most
        yield
        server = runtime.server
        now = {address(server.model.values), *(address(server.base(i).values) for i in list(server._bases))}
        now |= {address(kept.input.values) for kept in server._kept.values()}
        most = max(most, len(now))
        assert len(server._held) == len(now), "nothing else is alive"

    steadily(rule, 1000, 1000, watch)
    assert most <= 3 + 4 + 1


def test_a_window_that_slides_passes_the_same_memory_around() -> None:
    """What leaves the window becomes the version; the version that nobody holds goes back to the clients' allocator."""
    runtime = Runtime(WindowMean(), Sliding(2), Model.from_tensors({"w": torch.zeros(100)}))
    places = []
    for i in range(6):
        values = [torch.full((100,), float(i))]
        places.append(values[0].data_ptr())
        runtime.bring(runtime.start(), Contribution(values.pop(), "parameters", 1))
        if i >= 2:
            assert runtime.server.model.values.data_ptr() == places[i - 2]


def test_what_somebody_still_refers_to_is_not_recycled() -> None:
    runtime = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(0.0))
    mine = torch.tensor([3.0], dtype=torch.float64)
    view = torch.tensor([1.0, 2.0], dtype=torch.float64)
    runtime.bring(runtime.start(), Contribution(mine, "parameters", 1))
    assert runtime.server.model.values.data_ptr() != mine.data_ptr()
    for _ in range(3):  # a workload that remembers its results and hands them over again
        assert runtime.bring(runtime.start(), Contribution(mine, "parameters", 1)) == 3.0
        assert runtime.bring(runtime.start(), brings(5.0)) == 5.0
    assert mine.item() == 3.0
    runtime = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(0.0, 0.0))
    part = view[1:]
    place, values = view.data_ptr(), [view]
    del view
    runtime.bring(runtime.start(), Contribution(values.pop(), "parameters", 1))
    assert runtime.server.model.values.data_ptr() != place, "a view keeps the whole"
    assert part.item() == 2.0


def test_a_rule_that_works_in_place_is_given_a_copy() -> None:
    class InPlace:
        wants: Form = "parameters"

        def init(self, values: Tensor) -> None:
            return None

        def apply(self, values: Tensor, state: None, inputs: Any) -> None:
            values.zero_()
            for x in inputs.entering:
                values += x.values

    runtime = Runtime(InPlace(), Tumbling(2), model(7.0))
    slow = runtime.start()
    for first, second in ((1.0, 2.0), (3.0, 4.0)):
        runtime.bring(runtime.start(), brings(first))
        assert runtime.bring(runtime.start(), brings(second)) == first + second
    assert float(runtime.server.base(slow).values) == 7.0


class TestOverwritten:
    """A workload that goes on using what it handed over would spoil versions: it is told so."""

    def repeatedly(self, runtime: Runtime, hand_over: Callable[[Tensor], Tensor]) -> None:
        """A workload with one vector, in which it always trains."""
        own = torch.zeros(1, dtype=torch.float64)
        for i in range(8):
            runtime.bring(runtime.start(), Contribution(hand_over(own.fill_(float(i))), "parameters", 1))

    @pytest.mark.parametrize("rule", ["fedfa", "fedbuff", "fedavg"])
    def test_a_contribution_written_later(self, rule: str) -> None:
        runtime = Runtime(*RULES[rule], model(0.0))
        with pytest.raises(OverwrittenError, match="the contribution of lease 0 was written after it was handed over"):
            self.repeatedly(runtime, lambda own: own)

    def test_memory_that_became_a_version_written_later(self) -> None:
        runtime = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(0.0))
        with pytest.raises(OverwrittenError, match="the current version was written by others"):
            self.repeatedly(runtime, Tensor.detach)

    def test_the_current_version(self) -> None:
        runtime = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(0.0))
        lease = runtime.start()
        runtime.server.base(lease).values.add_(1.0)
        with pytest.raises(OverwrittenError, match="only read the models"):
            runtime.server.receive(lease, brings(1.0))

    def test_what_is_used_at_once_may_be_written_afterwards(self) -> None:
        runtime = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(0.0))
        own = torch.zeros(1, dtype=torch.float64)
        for i in range(4):
            assert runtime.bring(runtime.start(), Contribution(own.fill_(float(i)), "parameters", 1)) == i


class TestAlone:
    """Which memory is taken over as it is, and which is copied."""

    def test_the_result_of_a_computation_is(self) -> None:
        x = torch.ones(4)
        for values in (x, x + 1, x.clone(), torch.cat([x, x]), torch.stack([x, x]).mean(0), (x * 2).detach()):
            assert alone(values, ())

    @pytest.mark.parametrize(
        "values",
        [
            torch.ones(8)[:4],
            torch.ones(2, 2).view(-1),
            torch.ones(8)[::2],
            torch.ones(1).expand(4),
            torch.nn.Parameter(torch.ones(4)),
            torch.nn.Parameter(torch.ones(4)) * 2,
            torch.from_numpy(np.ones(4)),
            torch.from_numpy(np.ones(8)[2:6]),
            torch.frombuffer(bytearray(16), dtype=torch.float32),
            torch.ones(4).share_memory_(),
            torch.ones(8).detach()[2:6].detach(),
        ],
    )
    def test_what_may_be_somebody_elses_is_not(self, values: Tensor) -> None:
        assert not alone(values, ())

    def test_what_was_shown_to_numpy_or_made_in_inference_mode_is_not(self) -> None:
        shown = torch.ones(4)
        shown.numpy()
        assert not alone(shown, ())
        with torch.inference_mode():
            assert not alone(torch.ones(4), ())

    def test_what_is_held_already_is_not(self) -> None:
        values = torch.ones(4)
        assert not alone(values.detach(), {address(values)})
