"""A run that goes on from a snapshot goes on as if nothing had happened, to the bit, whatever the strategy."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.model import Contribution, Model
from fedasync.aggregation.norms import Norms
from fedasync.aggregation.server import OverwrittenError, Server
from fedasync.aggregation.server_optimizers import Amsgrad, Sgd
from fedasync.aggregation.state_codec import Pool, StateError, Stored, kinds_in, kinds_of, plain, restored
from fedasync.aggregation.update import Inputs, Update
from fedasync.core import Cancelled, Coordinator, EventLog, EveryN, Failed, Published, Rejected, Strategy
from fedasync.strategies import FEDERATED, STRATEGIES

from .scalars import Runtime, brings, model

CLIENTS = 6
SECONDS = (1.0, 0.375, 2.25, 0.625, 1.5, 3.125)
KNOBS: dict[str, dict[str, Any]] = {
    "fedat": {"tiers": 2, "cohort": 2},
    "safa": {"concurrency": 5, "quota": 2, "lag": 1},
    "fedfix": {"concurrency": 4, "interval_s": 1.0},
    "fedcompass": {"concurrency": 4, "least_steps": 1, "most_steps": 4},
    "fedasync": {"concurrency": 4},
    "fedfa": {"concurrency": 4, "window": 3},
    "sliding_delta": {"concurrency": 4, "window": 3},
    "delta_step": {"concurrency": 4, "window": 4},
    "ringmaster": {"concurrency": 4, "delay_threshold": 2},
    "dc_asgd": {"concurrency": 4},
}


def strategies() -> dict[str, Strategy]:
    """Every row of the table, and some with more state than its defaults have."""
    found = {}
    for row in FEDERATED:
        by_default = {"cohort": 4} if "cohort" in row.__kwdefaults__ or _is_round(row) else {}
        found[row.__name__] = row(**KNOBS.get(row.__name__) or by_default or {"concurrency": 4, "buffer_size": 2})
    fedbuff = STRATEGIES["fedbuff"]
    found["fedbuff momentum"] = fedbuff(concurrency=4, buffer_size=2, server_optimizer=Sgd(0.5, 0.9))
    found["fedbuff amsgrad"] = fedbuff(concurrency=4, buffer_size=2, server_optimizer=Amsgrad())
    found["dc_asgd adaptive"] = STRATEGIES["dc_asgd"](concurrency=4, adaptive=True)
    found["clipped, published rarely"] = replace(found["fedasync"], clip_norm=0.5, publication=EveryN(3))
    found["aborting"] = replace(found["fedbuff"], publication=EveryN(2, "abort"), lease_timeout_s=3.0)
    found["stopping the stale"] = replace(found["fedasync"], max_staleness=2, stop_stale=True)
    return found


def _is_round(row: Callable[..., Strategy]) -> bool:
    return "concurrency" not in row.__annotations__


class Play:
    """A small runtime: clients of fixed speeds; some results get lost, some are not fit for use."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        start = {"w": torch.arange(4, dtype=torch.float32) / 8, "norm.count": torch.tensor([3])}
        start["norm.var"] = torch.ones(2)
        self.server = Server(strategy.update, Model.from_tensors(start, {"norm.var"}), clients=CLIENTS, seed=7)
        if strategy.clip_norm:
            self.server._norms = Norms(strategy.clip_norm)
        self.log = EventLog()
        self.coordinator = Coordinator(strategy, self.log, SECONDS)
        self.idle = list(range(CLIENTS))
        self.ends: list[tuple[float, int, int]] = []
        self.now = 0.0
        self.versions: list[bytes] = []

    def turn(self) -> None:
        """Leases for who may start; then the next end of one, or the next timer, and what follows."""
        for client in self.idle[:]:
            if self.coordinator.may_start(client) and (lease := self.coordinator.request(client, self.now)):
                self.idle.remove(client)
                self.server.lease(lease.id, client)
                share = 1 if lease.steps is None else lease.steps / 4
                heappush(self.ends, (self.now + SECONDS[client] * share, lease.id, client))
        end_s, timer_s = self.ends[0][0] if self.ends else float("inf"), self.coordinator.next_timer()
        if timer_s is not None and timer_s < end_s:
            self.now = max(self.now, timer_s)
            self.follow(self.coordinator.on_timer(self.now))
            return
        self.now, lease_id, client = heappop(self.ends)
        self.idle.append(client)
        if lease_id % 11 == 5:
            self.follow(self.coordinator.fail(lease_id, "lost", self.now))
            return
        defect = None
        if self.coordinator.is_in_flight(lease_id):
            defect = self.server.receive(lease_id, self.work(lease_id, client))
        self.follow(self.coordinator.deliver(lease_id, self.now, defect and defect.reason))

    def work(self, lease_id: int, client: int) -> Contribution:
        base, control = self.server.base(lease_id), self.server.control(lease_id)
        values = base.values * 0.75 + (client - lease_id % 3) / 16
        if control is not None:
            values -= control / 4
        if lease_id % 13 == 7:
            values[0] = float("nan")
        assert base.integers is not None
        return Contribution(values, "parameters", 1 + client, base.integers + client, step_size_sum=0.25)

    def follow(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, (Cancelled, Failed)):
                self.server.forget(event.lease.id)
            elif isinstance(event, Rejected) and not event.ignored:
                self.server.forget(event.lease_id)
            elif isinstance(event, Published):
                self.server.publish()
        if self.coordinator.step is not None:
            self.server.apply(self.coordinator.step)
            self.versions.append(
                self.server.model.values.numpy().tobytes() + bytes(str(self.server.model.integers), "ascii")
            )
            self.follow(self.coordinator.commit(self.now))

    def goes_on_elsewhere(self) -> None:
        """Server and coordinator are written out, and others made of what was written."""
        state, tensors = self.server.snapshot()
        text, content = json.dumps([state, self.coordinator.snapshot()], allow_nan=False), save(tensors)
        state, of_coordinator = json.loads(text)
        self.server = Server.restore(self.strategy.update, state, load(content))
        self.coordinator = Coordinator.restore(self.strategy, of_coordinator, self.log, SECONDS)

    def outcome(self) -> Any:
        return self.versions, list(self.log.rows()), self.log.reasons


TURNS = 90


@cache
def undisturbed(name: str) -> Any:
    play = Play(strategies()[name])
    for _ in range(TURNS):
        play.turn()
    assert len(play.versions) >= 3
    return play.outcome()


@pytest.mark.parametrize("name", list(strategies()))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moments=st.sets(st.integers(0, TURNS - 1), min_size=1, max_size=3))
def test_a_run_goes_on_from_a_snapshot_to_the_bit(name: str, moments: set[int]) -> None:
    play = Play(strategies()[name])
    for turn in range(TURNS):
        if turn in moments:
            play.goes_on_elsewhere()
        play.turn()
    assert play.outcome() == undisturbed(name)


@pytest.mark.parametrize("name", list(strategies()))
def test_a_run_goes_on_from_a_snapshot_at_every_turn(name: str) -> None:
    play = Play(strategies()[name])
    for _ in range(TURNS):
        play.goes_on_elsewhere()
        play.turn()
    assert play.outcome() == undisturbed(name)


def test_a_version_that_many_leases_share_is_stored_once() -> None:
    play = Play(strategies()["fedasync"])
    play.turn()
    state, tensors = play.server.snapshot()
    assert len(state["bases"]) == 3
    assert len(state["versions"]) == 2
    assert sum(t.numel() for t in tensors.values() if t.is_floating_point()) == 6 * len(state["versions"])


def test_memory_is_reused_after_a_restart_as_before() -> None:
    """A restored server holds each version and contribution once, and no longer than one that was never restored."""
    play = Play(strategies()["fedasync"])
    for turn in range(TURNS):
        if turn == 40:
            play.goes_on_elsewhere()
        play.turn()
    alive = {id(base) for base in play.server._bases.values()} | {id(play.server.model)}
    assert len(play.server._held) == len(alive) + len(play.server._kept)


def test_a_contribution_that_was_written_is_told_and_not_kept() -> None:
    runtime = Runtime(SampleWeightedMean(), STRATEGIES["fedbuff"](concurrency=4, buffer_size=3).buffer, model(1.0))
    first = brings(2.0)
    runtime.server.lease(0, 0)
    assert runtime.server.receive(0, first) is None
    first.values.add_(1.0)
    with pytest.raises(OverwrittenError, match="the contribution of lease 0"):
        runtime.server.snapshot()


def test_who_writes_a_version_after_a_restart_is_told() -> None:
    play = Play(strategies()["fedasync"])
    play.turn()
    play.goes_on_elsewhere()
    play.server.model.values.add_(1.0)
    with pytest.raises(OverwrittenError):
        play.server.snapshot()


# -- the codec ---------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any = None


@dataclass(frozen=True, slots=True)
class Sealed:
    numbers: tuple[float, ...]
    inner: Pair | None = None


@dataclass
class Own:
    """A user's state, with a kind that its first state does not hold yet."""

    seen: dict[int, Sealed] = field(default_factory=dict)


class Counting:
    wants = "parameters"

    def init(self, values: Tensor) -> Own:
        return Own()

    def apply(self, values: Tensor, state: Own, inputs: Inputs) -> Own:
        state.seen[len(state.seen)] = Sealed((inputs.time_s, float("inf")), Pair(values.clone(), inputs.version))
        return state


def there_and_back(value: Any, kinds: dict[str, type]) -> Any:
    pool = Pool()
    text = json.dumps(plain(value, pool, kinds), allow_nan=False)
    return restored(json.loads(text), Stored(load(save(pool.tensors))), kinds)


numbers = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
hashable = st.recursive(numbers, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
states = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3, 9]))
        | st.builds(Counter, st.lists(st.integers(0, 3)))
        | st.builds(Pair, inner, inner)
        | st.builds(Sealed, st.tuples(inner), st.none() | st.builds(Pair, inner, inner))
        | st.builds(Own, st.dictionaries(st.integers(), inner, max_size=2))
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)
KINDS = kinds_of(Counting(), kinds_in(Own()))


@given(states)
def test_nested_containers_come_back_as_they_were(value: Any) -> None:
    found = there_and_back(value, KINDS)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, (set, frozenset)) or "{" in repr(value)


def test_annotations_lead_to_the_kinds_of_later_states() -> None:
    assert set(KINDS.values()) == {Own, Sealed, Pair}


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_tensors_come_back_with_what_they_share(dtype: torch.dtype) -> None:
    flat = torch.arange(12).to(dtype)
    found = there_and_back(
        {"flat": flat, "turned": flat.view(3, 4).T, "again": flat, "empty": flat[:0], "none": torch.empty(0, 2)}, {}
    )
    assert found["again"] is found["flat"]
    assert torch.equal(found["turned"], flat.view(3, 4).T)
    assert found["turned"].stride() == (1, 4)
    found["flat"][4] = 0
    assert found["turned"][0, 1] == 0
    assert (found["empty"].shape, found["none"].shape) == ((0,), (0, 2))
    assert found["flat"].dtype == dtype


def test_what_cannot_be_restored_is_refused_when_it_is_kept() -> None:
    with pytest.raises(StateError, match=r"a random\.Random cannot be kept"):
        plain([__import__("random").Random(1)], Pool(), {})
    with pytest.raises(StateError, match="an init whose state holds one"):
        plain(Pair(1), Pool(), {})
    extra = Own()
    extra.more = 1  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="attributes that are no fields: more"):
        plain(extra, Pool(), KINDS)


def test_data_of_another_rule_is_refused() -> None:
    found = plain(Pair(1), Pool(), KINDS)
    with pytest.raises(StateError, match="the rule's state has no"):
        restored(found, Stored({}), {})
    with pytest.raises(StateError, match="tensor '0' is missing"):
        restored(plain(torch.ones(2), Pool(), {}), Stored({}), {})


def test_a_users_own_state_is_restored_without_its_init_running_again() -> None:
    update: Update = Counting()  # type: ignore[assignment]
    server = Server(update, model(1.0))
    server._state.seen[4] = Sealed((1.5,), Pair(torch.ones(3), 2))
    state, tensors = server.snapshot()
    again = Server.restore(update, json.loads(json.dumps(state)), load(save(tensors)))._state
    assert type(again) is Own
    assert again.seen[4].inner.right == 2
    assert torch.equal(again.seen[4].inner.left, torch.ones(3))
