"""Rows for a cluster: each goes on and ends whatever is slow, with bound 0 and for one version, and says what it is."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import (
    Coordinator,
    Event,
    EventLog,
    EveryN,
    EveryVersion,
    Lease,
    StalenessBudget,
    Step,
    Strategy,
    SyncBudget,
    Tumbling,
)
from fedasync.core.log import CONSUMED
from fedasync.simulation import Exponential, Population, simulate
from fedasync.strategies import ROLLOUTS, STRATEGIES
from fedasync.strategies.rollouts import (
    PolicyStep,
    areal,
    nemo_rl,
    one_step_overlap,
    pipeline_rl,
    prime_rl,
    skyrl,
    streaming,
    synchronous_rl,
    trl,
    verl,
    verl_bounded,
)
from fedasync.studies.errors import StudyError, parse
from fedasync.workloads import Quadratic

B = 3
SAMPLERS = ("windowed", "windowed_freshest", "ready_first", "weight_fifo", "in_order")
USUAL: dict[str, Strategy] = {
    "synchronous_rl": synchronous_rl(batch=B),
    "one_step_overlap": one_step_overlap(batch=B),
    "areal": areal(batch=B, eta=2),
    "areal, by answers": areal(batch=B, eta=2, limit_samples=7, answers=3),
    "areal, bound by waiting": areal(batch=B, eta=2, max_staleness=2, at_bound="wait"),
    "areal, bound by dropping": areal(batch=B, eta=2, max_staleness=2, stop_stale=True),
    "areal without a gate": areal(batch=B, eta=None, limit=5),
    "areal, every second version": areal(batch=B, publication=EveryN(2, "interrupt")),
    "streaming": streaming(batch=B),
    "verl": verl(mini_batch=B),
    "verl in batches": verl(mini_batch=1, require_batches=B, trigger_parameter_sync_step=1, staleness_threshold=1.0),
    "verl_bounded": verl_bounded(batch=B),
    "verl_bounded, waiting": verl_bounded(batch=B, max_off_policy_strategy="wait", max_off_policy_threshold=1),
    "prime_rl": prime_rl(batch=B),
    **{f"nemo_rl, {sampler}": nemo_rl(batch=B, sampler=sampler) for sampler in SAMPLERS},  # type: ignore[arg-type]
    "trl": trl(batch=B),
    "trl, every third version": trl(batch=B, max_staleness=1, weight_sync_steps=3, queue=4),
    "skyrl": skyrl(batch=B),
    "pipeline_rl": pipeline_rl(batch=B, answers=4, max_lag=9),
    "pipeline_rl without a gate": pipeline_rl(batch=B, answers=4, limit=6),
}
BOUND_0: dict[str, Strategy] = {
    "areal": areal(batch=B, eta=0),
    "areal, dropping": areal(batch=B, eta=1, max_staleness=0),
    "areal, stopping": areal(batch=B, eta=1, max_staleness=0, stop_stale=True),
    "areal, waiting": areal(batch=B, eta=0, max_staleness=0, at_bound="wait"),
    "streaming": streaming(batch=B, trigger_parameter_sync_step=1),
    "verl": verl(mini_batch=B, staleness_threshold=0.0),
    "verl_bounded": verl_bounded(batch=B, max_off_policy_threshold=0),
    "verl_bounded, waiting": verl_bounded(batch=B, eta=0, max_off_policy_threshold=0, max_off_policy_strategy="wait"),
    "prime_rl": prime_rl(batch=B, max_off_policy_steps=0),
    "prime_rl without a lag": prime_rl(batch=B, max_off_policy_steps=0, target_lag=0),
    **{
        f"nemo_rl, {sampler}": nemo_rl(batch=B, sampler=sampler, max_trajectory_age_steps=0)  # type: ignore[arg-type]
        for sampler in SAMPLERS
    },
    "trl": trl(batch=B, max_staleness=0),
    "trl, every third version": trl(batch=B, max_staleness=0, weight_sync_steps=3),
    "skyrl": skyrl(batch=B, max_staleness_steps=0),
    "pipeline_rl": pipeline_rl(batch=B, answers=4, max_lag=0),
}
EVERY = {**USUAL, **{f"{name}, bound 0": strategy for name, strategy in BOUND_0.items()}}


def consumed(log: EventLog) -> list[tuple[Any, ...]]:
    return [row for row in log.rows() if row[1] == CONSUMED]


class Cluster:
    """A runtime without a clock: whoever is drawn is done next."""

    def __init__(self, strategy: Strategy, seed: int, failing: float = 0.1) -> None:
        self.log = EventLog()
        self.coordinator = Coordinator(strategy, self.log)
        self.chance, self.failing = Random(seed), failing
        self.turn = 0
        self.steps: list[Step] = []

    def until(self, versions: int, commits: float = 0.3) -> Cluster:
        """Generate and train to so many versions; at any moment somebody works, a step is out, or a lease starts."""
        while self.coordinator.version < versions:
            self.turn += 1
            assert self.turn < 500 * versions, self.coordinator.explain()
            self.ask()
            flying, step = self.coordinator.leases, self.coordinator.step
            assert flying or step is not None, self.coordinator.explain()
            if step is not None and (not flying or self.chance.random() < commits):
                self.commit()
            else:
                self.finish(self.chance.choice(flying))
            assert self.coordinator.ledger.imbalance == 0
        return self

    def ask(self) -> None:
        while self.coordinator.request(self.turn, float(self.turn)) is not None:
            assert self.coordinator.in_flight <= self.coordinator.strategy.admission.most_in_flight

    def commit(self) -> None:
        step = self.coordinator.step
        assert step is not None
        self.steps.append(step)
        self.coordinator.commit(float(self.turn))

    def finish(self, lease: Lease) -> list[Event]:
        if self.chance.random() < self.failing:
            return self.coordinator.fail(lease.id, "lost", float(self.turn))
        return self.coordinator.deliver(lease.id, float(self.turn))


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), versions=st.sampled_from([1, 2, 9]), commits=st.sampled_from([0.02, 0.3, 1.0]))
def test_a_row_goes_on_to_its_last_version(name: str, seed: int, versions: int, commits: float) -> None:
    """Bound 0 (TRL #5650, torchforge #557: a slow trainer beside it), and runs of 1 and 2 versions (prime-rl #2219)."""
    cluster = Cluster(EVERY[name], seed).until(versions, commits)
    bound = EVERY[name].max_staleness
    ages = [row[6] for row in consumed(cluster.log)]
    assert len(ages) == B * versions
    assert bound is None or max(ages) <= bound


@pytest.mark.parametrize("name", EVERY)
def test_a_row_restored_at_any_event_goes_on_alike(name: str) -> None:
    straight, broken = Cluster(EVERY[name], 7), Cluster(EVERY[name], 7)
    straight.until(4)
    while broken.coordinator.version < 4:
        state = json.loads(json.dumps(broken.coordinator.snapshot()))
        broken.coordinator = Coordinator.restore(EVERY[name], state, broken.log)
        before = broken.coordinator.version, broken.turn
        broken.turn += 1
        broken.ask()
        flying, step = broken.coordinator.leases, broken.coordinator.step
        if step is not None and (not flying or broken.chance.random() < 0.3):
            broken.commit()
        else:
            broken.finish(broken.chance.choice(flying))
        assert before < (broken.coordinator.version, broken.turn)
    assert list(straight.log.rows()) == list(broken.log.rows())


@pytest.mark.parametrize("name", ["areal", "verl_bounded, waiting", "trl", "nemo_rl, in_order"])
def test_the_bound_holds_while_a_producer_that_has_stopped_is_drained(name: str) -> None:
    """Nobody starts any more, and what waits pays out (Trinity-RFT #382): the bound holds for it too."""
    cluster = Cluster(USUAL[name], 3, failing=0.0).until(5)
    coordinator = cluster.coordinator
    while coordinator.leases or coordinator.step is not None:
        if coordinator.step is not None:
            coordinator.commit(float(cluster.turn))
        else:
            coordinator.deliver(coordinator.leases[-1].id, float(cluster.turn))
    assert coordinator.ledger.imbalance == 0
    assert coordinator.waiting < B or USUAL[name].at_bound == "wait"
    bound = USUAL[name].max_staleness
    assert bound is None or max(row[6] for row in consumed(cluster.log)) <= bound


# -- what each row is ------------------------------------------------------------------------------------------------


def test_every_row_is_in_the_table_under_its_name_and_learns_nothing() -> None:
    assert {name.partition(",")[0].partition(" ")[0] for name in USUAL} == {row.__name__ for row in ROLLOUTS}
    for name, made in USUAL.items():
        assert made.name == name.partition(",")[0].partition(" ")[0]
        assert STRATEGIES[made.name].__name__ == made.name
        assert isinstance(made.update, PolicyStep)
        assert pickle.loads(pickle.dumps(made)) == made
        assert made.identity == repr(made)


def test_gates_are_in_versions_and_groups() -> None:
    assert areal(batch=512, eta=8).admission == StalenessBudget(8, 512)
    assert areal(batch=4).update == PolicyStep("decoupled_ppo")
    assert (
        skyrl(batch=4, max_staleness_steps=0).admission.slots(Coordinator(skyrl(batch=4, max_staleness_steps=0))) == 4
    )
    assert one_step_overlap(batch=4).admission.most_in_flight == 4
    assert synchronous_rl(batch=4, objective="grpo").update == PolicyStep("grpo")


@pytest.mark.parametrize(
    ("s", "k", "m", "b", "groups"),
    [(0.1, 4, 1, 32, 140), (0.5, 4, 2, 16, 192), (1.0, 1, 1, 64, 128), (0.0, 4, 1, 8, 32)],
)
def test_verl_starts_its_rollout_num_before_the_first_publication(
    s: float, k: int, m: int, b: int, groups: int
) -> None:
    """⌊(1 + s)·k·m·b⌋."""
    made = verl(mini_batch=b, require_batches=m, trigger_parameter_sync_step=k, staleness_threshold=s)
    assert Coordinator(made).slots == groups
    assert made.buffer == Tumbling(m * b)
    assert made.publication == (EveryVersion("interrupt") if k == 1 else EveryN(k, "interrupt"))


def test_streaming_is_verl_without_extra_and_its_age_is_the_step_since_the_publication() -> None:
    made = streaming(batch=B, trigger_parameter_sync_step=4)
    assert made.admission == SyncBudget(0, B, 4)
    rows = consumed(Cluster(made, 1, failing=0.0).until(12).log)
    assert [row[6] for row in rows] == [version % 4 for version in range(12) for _ in range(B)]


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_trls_bound_in_publications_is_exactly_the_one_in_versions(bound: int, n: int) -> None:
    made = trl(batch=4, max_staleness=bound, weight_sync_steps=n)
    assert made.max_staleness is not None
    for version in range(60):
        for base in range(0, version + 1, n):
            publications = version // n - base // n
            assert (publications <= bound) is (version - base <= made.max_staleness)
    assert Coordinator(made).slots == (bound + 1) * 4 > 0


def test_trls_queue_stops_generation_when_it_is_full() -> None:
    """20 groups of queue and 10 in flight beside a batch of 5; whoever generates without end has no more."""
    coordinator = Coordinator(trl(batch=5, max_staleness=1, queue=20))
    while (lease := coordinator.request(0, 0.0)) is not None:
        coordinator.deliver(lease.id, 0.0)
    assert (coordinator.waiting, coordinator.step is not None) == (20 + 10, True)


@pytest.mark.parametrize(("max_lag", "groups"), [(0, 8), (1, 9), (4, 9), (5, 10), (400, 108)])
def test_pipeline_rls_lag_is_in_answers(max_lag: int, groups: int) -> None:
    coordinator = Coordinator(pipeline_rl(batch=8, answers=4, max_lag=max_lag))
    assert coordinator.slots == groups
    for _ in range(3):
        lease = coordinator.request(0, 0.0)
        while lease is not None and coordinator.step is None:
            coordinator.deliver(lease.id, 0.0)
            lease = coordinator.request(0, 0.0) or next(iter(coordinator.leases), None)
        coordinator.commit(0.0)
        assert coordinator.slots + coordinator.in_flight + coordinator.waiting == groups


def test_prime_rl_sweeps_its_queue_and_cancels_in_flight() -> None:
    coordinator = Coordinator(prime_rl(batch=1, target_lag=2, max_off_policy_steps=0))
    leases = [coordinator.request(worker, 0.0) for worker in range(3)]
    for lease in leases[:2]:
        assert lease is not None
        coordinator.deliver(lease.id, 0.0)
    coordinator.commit(0.0)
    assert coordinator.ledger.rejected == {"stale": 1}
    assert coordinator.ledger.cancelled == {"stale": 1}


def test_nemo_rls_samplers_are_orders_and_bounds() -> None:
    found = {sampler: nemo_rl(batch=B, sampler=sampler) for sampler in SAMPLERS}  # type: ignore[arg-type]
    assert {name: (made.buffer, made.max_staleness) for name, made in found.items()} == {
        "windowed": (Tumbling(B, "arrival"), 1),
        "windowed_freshest": (Tumbling(B, "freshest_first"), 1),
        "ready_first": (Tumbling(B, "arrival"), None),
        "weight_fifo": (Tumbling(B, "oldest_first"), None),
        "in_order": (Tumbling(B, "dispatch"), None),
    }
    assert {name: made.admission.most_in_flight // B - 1 for name, made in found.items()} == {
        "windowed": 2, "windowed_freshest": 2, "ready_first": 1, "weight_fifo": 1, "in_order": 1
    }  # fmt: skip


def test_in_flight_work_is_interrupted_unless_it_is_drained() -> None:
    ways = {name: made.publication.in_flight for name, made in USUAL.items()}
    drained = ("synchronous_rl", "one_step_overlap", "streaming", *(f"nemo_rl, {sampler}" for sampler in SAMPLERS))
    assert {name for name, way in ways.items() if way == "continue"} == set(drained)
    for quiet in (
        areal(batch=B, interrupt=False),
        verl(mini_batch=B, partial_rollout=False),
        trl(batch=B, interrupt=False),
    ):
        assert quiet.publication.in_flight == "continue"
    assert nemo_rl(batch=B, interrupt=True).publication.in_flight == "interrupt"


# -- knobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "table", "expected"),
    [
        (areal, {"batch": 4, "eta": 2, "objective": "ppo"}, areal(batch=4, eta=2, objective="ppo")),
        (
            areal,
            {"batch": 4, "max_staleness": 4, "at_bound": "wait", "limit_samples": 64, "answers": 16},
            areal(batch=4, max_staleness=4, at_bound="wait", limit_samples=64, answers=16),
        ),
        (
            areal,
            {"batch": 4, "publication": {"kind": "fixed", "n": 2, "in_flight": "abort"}},
            areal(batch=4, publication=EveryN(2, "abort")),
        ),
        (nemo_rl, {"batch": 4, "sampler": "in_order"}, nemo_rl(batch=4, sampler="in_order")),
        (verl, {"mini_batch": 4, "lease_timeout_s": 9.0}, verl(mini_batch=4, lease_timeout_s=9.0)),
    ],
)
def test_a_study_sets_every_kind_of_knob(row: Callable[..., Strategy], table: Any, expected: Strategy) -> None:
    assert parse(row, table, "here") == expected


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: areal(batch=0), "batch must be an integer ≥ 1, got 0"),
        (lambda: areal(batch=2, eta=None), "a limit or a limit_samples would do"),
        (lambda: areal(batch=2, limit_samples=8, answers=16), "limit_samples ≥ 16 would do"),
        (lambda: areal(batch=2, objective=""), "objective must be a name such as 'ppo'"),
        (lambda: pipeline_rl(batch=2, answers=4), "a limit or a limit_samples would do"),
        (lambda: pipeline_rl(batch=2, answers=0, max_lag=1), "answers must be an integer ≥ 1"),
        (lambda: trl(batch=2, max_staleness=-1), "max_staleness must be an integer ≥ 0"),
        (lambda: trl(batch=2, weight_sync_steps=0), "weight_sync_steps must be an integer ≥ 1"),
        (lambda: verl(mini_batch=2, staleness_threshold=-0.5), "extra must be a finite number ≥ 0"),
        (lambda: nemo_rl(batch=2, sampler="random"), "sampler must be 'windowed' or"),  # type: ignore[arg-type]
        (
            lambda: verl_bounded(batch=2, eta=3, max_off_policy_threshold=2, max_off_policy_strategy="wait"),
            "max_staleness ≥ 3 would do",
        ),
    ],
)
def test_a_wrong_knob_is_refused_in_one_line(make: Callable[[], Strategy], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_a_misspelt_choice_of_a_study_is_refused_with_its_place() -> None:
    with pytest.raises(StudyError, match=r"strategy.*at_bound"):
        parse(areal, {"batch": 4, "at_bound": "hold"}, "file.toml: strategy")


# -- in the simulation of clients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, made in EVERY.items() if made.publication.in_flight == "continue"])
def test_clients_can_play_a_cluster_for_the_times_alone(name: str) -> None:
    run = simulate(EVERY[name], Population(40, Exponential(1.0)), versions=6, server_step_s=0.5)
    assert run.summary["versions"] == 6
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])


def test_clients_cannot_take_a_version_in_the_middle() -> None:
    with pytest.raises(ValueError, match="continue or abort would do"):
        simulate(areal(batch=2), Population(40, Exponential(1.0)), versions=2)


def test_a_policys_step_learns_nothing_from_clients() -> None:
    with pytest.raises(ValueError, match="learns nothing here; timing only") as refused:
        simulate(synchronous_rl(batch=2), Population(6, Exponential(1.0)), Quadratic(6), versions=2)
    assert "\n" not in str(refused.value)


def test_the_steps_handed_out_are_those_of_the_log() -> None:
    """With their members in order, and their staleness."""
    cluster = Cluster(USUAL["areal"], 5).until(6)
    handed_out = [(arrival.lease.id, step.staleness(arrival)) for step in cluster.steps for arrival in step.entering]
    assert handed_out == [(row[2], row[6]) for row in consumed(cluster.log)]
