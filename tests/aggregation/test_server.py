"""The server's arrays: which versions live, for whom, and that nobody's base is ever written."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.model import Contribution, Layout, Model
from fedasync.aggregation.server import Server
from fedasync.core import Arrival, Constant, Lease, Sliding, Step, Tumbling

from .scalars import Runtime, brings, model

PLAIN = Constant()


def step(version: int, *lease_ids: int, base: int = 0) -> Step:
    return Step(version, tuple(Arrival(Lease(i, i, base, 0.0), 0.0, version) for i in lease_ids))


def test_a_lease_keeps_the_version_that_it_started_from() -> None:
    runtime = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(0.0))
    old = runtime.start()
    for x in (1.0, 2.0, 3.0):
        runtime.bring(runtime.start(), brings(x))
    assert float(runtime.server.base(old).values) == 0.0
    assert float(runtime.server.base(runtime.start()).values) == 3.0


def test_old_versions_live_while_a_lease_refers_to_them_and_no_longer() -> None:
    runtime = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(0.0))
    held = runtime.start()
    dropped = runtime.start()
    first = weakref.ref(runtime.server.base(held).values)
    runtime.bring(runtime.start(), brings(1.0))
    middle = runtime.start()
    second = weakref.ref(runtime.server.base(middle).values)
    runtime.bring(runtime.start(), brings(2.0))
    runtime.server.forget(middle)
    runtime.bring(held, brings(3.0))
    gc.collect()
    assert second() is None
    assert first() is not None, "another lease still refers to it"
    runtime.server.forget(dropped)
    gc.collect()
    assert first() is None


def test_a_window_keeps_its_models_and_lets_go_of_what_leaves_it() -> None:
    runtime = Runtime(WindowMean(), Sliding(2), model(0.0))
    kept = []
    for x in (1.0, 2.0, 3.0, 4.0):
        contribution = brings(x)
        kept.append(weakref.ref(contribution.values))
        runtime.bring(runtime.start(), contribution)
        del contribution
    gc.collect()
    assert [ref() is not None for ref in kept] == [False, False, True, True]


def test_an_unpublished_version_is_written_in_place_and_a_published_one_never() -> None:
    server = Server(DeltaMean(1.0, PLAIN), model(0.0))
    for lease_id in range(3):
        server.lease(lease_id, 0)
    published = server.base(0)
    for lease_id in range(3):
        server.receive(lease_id, brings(1.0, form="delta"))
    server.apply(step(0, 0))
    place = server.model.values.data_ptr()
    assert place != published.values.data_ptr()
    server.apply(step(1, 1))
    assert server.model.values.data_ptr() == place
    assert float(published.values) == 0.0
    server.publish()
    server.apply(step(2, 2))
    assert server.model.values.data_ptr() != place
    assert float(server.model.values) == 3.0


def test_appfl_439_what_a_client_sends_is_turned_into_what_the_rule_wants() -> None:
    """Deltas for a rule that averages models must not replace the model by a mean of deltas, and the reverse."""
    mixing = Runtime(Mixing(1.0, PLAIN), Tumbling(1), model(10.0))
    assert mixing.bring(mixing.start(), brings(-2.0, form="delta")) == 8.0
    assert mixing.bring(mixing.start(), brings(5.0)) == 5.0
    buff = Runtime(DeltaMean(1.0, PLAIN), Tumbling(1), model(10.0))
    assert buff.bring(buff.start(), brings(8.0)) == 8.0
    assert buff.bring(buff.start(), brings(-3.0, form="delta")) == 5.0
    window = Runtime(WindowMean(), Sliding(2), model(10.0))
    window.bring(window.start(), brings(-2.0, form="delta"))
    assert window.bring(window.start(), brings(4.0)) == 6.0


def test_deltas_are_taken_from_the_leases_base_not_from_the_current_model() -> None:
    runtime = Runtime(DeltaMean(1.0, PLAIN), Tumbling(1), model(0.0))
    slow = runtime.start()
    runtime.bring(runtime.start(), brings(100.0))
    assert runtime.bring(slow, brings(1.0)) == 101.0


@pytest.mark.parametrize("update", [Mixing(0.6), DeltaMean()], ids=lambda u: type(u).__name__)
def test_fedmodule_7_the_first_update_moves_the_model(update: Any) -> None:
    runtime = Runtime(update, Tumbling(1), model(0.0))
    assert runtime.bring(runtime.start(), brings(1.0)) > 0.5


def test_a_rules_state_goes_from_step_to_step() -> None:
    class Counting(Mixing):
        def init(self, values: Any) -> Any:
            return 0

        def apply(self, values: Any, state: Any, inputs: Any) -> Any:
            values += state
            return state + 1

    runtime = Runtime(Counting(), Tumbling(1), model(0.0))
    assert [runtime.bring(runtime.start(), brings(0.0)) for _ in range(4)] == [0, 1, 3, 6]


def test_inputs_tell_staleness_worker_and_samples() -> None:
    seen: list[tuple[int, int, int]] = []

    class Seeing(Mixing):
        def apply(self, values: Any, state: Any, inputs: Any) -> Any:
            seen.extend((x.staleness, x.worker, x.samples) for x in inputs.entering)

    runtime = Runtime(Seeing(), Tumbling(1), model(0.0))
    slow = runtime.start(worker=7)
    runtime.bring(runtime.start(worker=3), replace(brings(0.0), samples=11))
    runtime.bring(slow, replace(brings(0.0), samples=5))
    assert seen == [(0, 3, 11), (1, 7, 5)]


class TestLayout:
    TENSORS = {  # noqa: RUF012
        "a": torch.arange(6.0).reshape(2, 3),
        "steps": torch.tensor([4, 5]),
        "b": torch.tensor(7.0),
        "flag": torch.tensor(True),
    }

    def test_named_tensors_come_back_with_shapes_and_values(self) -> None:
        flat = Model.from_tensors(self.TENSORS)
        assert flat.layout.parameters == 7
        assert flat.layout.carried == 3
        assert flat.values.tolist() == [0, 1, 2, 3, 4, 5, 7]
        back = flat.tensors()
        assert {name: tuple(t.shape) for name, t in back.items()} == {"a": (2, 3), "steps": (2,), "b": (), "flag": ()}
        assert back["steps"].tolist() == [4, 5]
        assert back["a"].tolist() == self.TENSORS["a"].tolist()

    def test_views_share_memory(self) -> None:
        flat = Model.from_tensors(self.TENSORS)
        flat.tensors()["a"][0, 0] = 99.0
        assert float(flat.values[0]) == 99.0

    def test_the_models_own_tensors_are_not_touched(self) -> None:
        source = {"w": torch.zeros(2)}
        Model.from_tensors(source).values.fill_(1.0)
        assert source["w"].tolist() == [0.0, 0.0]

    def test_a_model_without_floats_or_with_two_kinds_of_them_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one floating-point tensor"):
            Model.from_tensors({"n": torch.tensor([1])})
        with pytest.raises(ValueError, match="share one dtype, got"):
            Model.from_tensors({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)})

    def test_integer_entries_without_their_vector_are_named(self) -> None:
        layout = Layout.of(self.TENSORS)
        with pytest.raises(ValueError, match="'steps' holds integers"):
            layout.views(torch.zeros(7))


def test_a_contribution_that_is_the_base_itself_does_not_spoil_the_base() -> None:
    """A client that did no step may well hand back what it was given."""
    runtime = Runtime(DeltaMean(1.0, PLAIN), Tumbling(1), model(5.0))
    slow, idle = runtime.start(), runtime.start()
    base = runtime.server.base(idle)
    assert runtime.bring(idle, Contribution(base.values, "parameters", 1)) == 5.0
    assert float(runtime.server.base(slow).values) == 5.0


@pytest.mark.parametrize("update", [Mixing(1.0, PLAIN), DeltaMean(1.0, PLAIN)], ids=lambda u: type(u).__name__)
def test_a_model_of_a_graph_or_of_inference_mode_is_data_like_any_other(update: Any) -> None:
    with torch.inference_mode():
        inference = model(1.0)
    for start in (inference, replace(model(1.0), values=torch.ones(1, dtype=torch.float64, requires_grad=True))):
        runtime = Runtime(update, Tumbling(1), start)
        assert runtime.bring(runtime.start(), brings(3.0)) == 3.0
        assert not runtime.server.model.values.requires_grad
