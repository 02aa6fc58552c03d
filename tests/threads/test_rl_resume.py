"""Threads about reinforcement learning that resumes: prompts lost, trained twice, or staleness out of its bound.

The number in a test's name is that of the public thread; docs/threads.md has the table.
"""

from __future__ import annotations

import json
from collections import Counter, deque

import pytest

from fedasync.core import Coordinator, EventLog, StepReady, Strategy
from fedasync.core.log import CONSUMED, REJECTED
from fedasync.simulation.cluster import Faults, simulate_cluster
from fedasync.simulation.cluster.faults import TrainerCrash
from fedasync.strategies.rollouts import areal, nemo_rl, prime_rl, synchronous_rl, trl

from ..simulation.cluster.ideal import cluster, prompts

PROMPTS, BATCH = 8, 2


class Loop:
    """A trainer and its rollouts by hand: a cursor into the data, prompts to be asked again, leases in flight."""

    def __init__(self, strategy: Strategy, delivers: list[int]) -> None:
        self.strategy = strategy
        self.log = EventLog()
        self.coordinator = Coordinator(strategy, self.log)
        self.cursor, self.now = 0, 0.0
        self.again: deque[int] = deque()
        self.in_flight: list[int] = []
        self.delivers = deque(delivers)
        """Which of those in flight delivers next: its place."""

    def step(self) -> bool:
        """Ask for what may be asked, and let one group arrive; False when nothing is left to happen."""
        while self.coordinator.admits and (self.again or self.cursor < PROMPTS):
            self.cursor += not self.again
            prompt = self.again.popleft() if self.again else self.cursor - 1
            lease = self.coordinator.request(prompt, self.now)
            assert lease is not None
            self.in_flight.append(lease.id)
        if self.coordinator.step is not None:
            self.coordinator.commit(self.now)
            return True
        if not self.in_flight:
            return False
        self.now += 1.0
        lease_id = self.in_flight.pop(self.delivers[0] % len(self.in_flight))
        self.delivers.rotate(-1)
        self.coordinator.deliver(lease_id, self.now)
        return True

    def saved(self) -> str:
        return json.dumps([self.coordinator.snapshot(), self.cursor, list(self.again), self.in_flight, self.now])

    def resume(self, checkpoint: str, *, keeps_rollouts: bool) -> None:
        """From the checkpoint; what is in flight goes on, or is asked again because it died with the trainer."""
        state, self.cursor, again, self.in_flight, self.now = json.loads(checkpoint)
        self.again = deque(again)
        self.coordinator = Coordinator.restore(self.strategy, state, self.log)
        if not keeps_rollouts:
            for lease in self.coordinator.leases:
                self.coordinator.fail(lease.id, "the run crashed", self.now)
                self.again.append(lease.worker)
            self.in_flight.clear()

    def trained(self) -> list[int]:
        return [prompt for _, kind, _, prompt, *_ in self.log.rows() if kind == CONSUMED]


SYSTEMS = [
    areal(batch=BATCH, eta=0),
    areal(batch=BATCH, eta=1),
    areal(batch=BATCH, eta=2, limit=3),
    nemo_rl(batch=BATCH, sampler="in_order", max_trajectory_age_steps=2),
    nemo_rl(batch=BATCH, sampler="weight_fifo", max_trajectory_age_steps=2),
]


@pytest.mark.parametrize("keeps_rollouts", [True, False])
@pytest.mark.parametrize("strategy", SYSTEMS, ids=lambda s: f"{s.name}-{s.admission.eta}-{s.buffer.order}")
@pytest.mark.parametrize("delivers", [[0], [5], [3, 0, 7, 1, 2]])
def test_openrlhf_1322_eight_prompts_are_trained_once_each_wherever_the_run_is_killed(
    strategy: Strategy, delivers: list[int], keeps_rollouts: bool
) -> None:
    """A checkpoint had the cursor of the data loader only: finished rollouts that waited were lost on resuming.

    Killed after every single event, so with groups in flight, in the buffer, and in a step.
    """
    whole = Loop(strategy, delivers)
    events = 1
    while whole.step():
        events += 1
    assert sorted(whole.trained()) == list(range(PROMPTS))
    waited = 0
    for killed_after in range(events):
        loop = Loop(strategy, delivers)
        for _ in range(killed_after):
            loop.step()
        waited += loop.coordinator.waiting
        loop.resume(loop.saved(), keeps_rollouts=keeps_rollouts)
        while loop.step():
            pass
        assert sorted(loop.trained()) == list(range(PROMPTS))
        assert loop.coordinator.version == PROMPTS // BATCH
        assert loop.coordinator.ledger.imbalance == 0
    assert waited > 0, "nothing waited in a buffer at any of the kills"


@pytest.mark.parametrize("keeps_rollouts", [True, False])
def test_verl_4199_what_is_in_flight_at_a_crash_is_asked_again(keeps_rollouts: bool) -> None:
    """A warning said that samples in flight are lost on resuming. Here at every quarter of a second of a whole run."""
    for quarter in range(28):
        crash = TrainerCrash(0.25 * quarter, 1.0, keeps_rollouts)
        run = simulate_cluster(
            areal(batch=BATCH, eta=1),
            cluster(slots=4, train_s=0.6),
            prompts(0.8, answers=2, count=PROMPTS, epochs=1),
            faults=Faults(trainer_crashes=(crash,)),
            versions=99,
            seed=1,
        )
        trained = run.events.filter(run.events["kind"] == "consumed")["worker"]
        assert sorted(trained) == list(range(PROMPTS))
        assert run.summary["rollouts"]["conservation"]["prompts"]["trained"] == PROMPTS
        assert run.summary["ended"].startswith("data exhausted: version 4")


@pytest.mark.parametrize(
    "strategy", [prime_rl(batch=4, max_off_policy_steps=1), trl(batch=4, max_staleness=1, queue=8)]
)
def test_trl_7274_a_dropped_prompt_is_settled_and_nothing_behind_it_is_trained_again(strategy: Strategy) -> None:
    """One group dropped as stale held the saved position, and all groups after it were trained once more (#7294)."""
    crashes = tuple(TrainerCrash(at_s, 0.5) for at_s in (6.0, 12.0, 18.0))
    run = simulate_cluster(
        strategy,
        cluster(slots=16, train_s=0.3),
        prompts(1.5, count=120, epochs=1),
        faults=Faults(trainer_crashes=crashes),
        versions=99,
        seed=2,
    )
    trained = Counter(run.events.filter(run.events["kind"] == "consumed")["worker"].to_list())
    dropped = run.summary["ledger"]["rejected"].get("stale", 0) + run.summary["ledger"]["cancelled"].get("stale", 0)
    assert dropped > 0
    assert max(trained.values()) == 1
    places = run.summary["rollouts"]["conservation"]["prompts"]
    assert len(trained) + dropped + places["buffered"] == 120
    assert places["dropped"] == {"stale": dropped}


def test_nemo_rl_3599_restarts_lose_no_prompt_and_least_of_all_the_long_ones() -> None:
    """675 of 736 skipped prompts were lost at restarts, a third of the data, and in flight are the long ones."""
    crashes = tuple(TrainerCrash(at_s, 0.2) for at_s in (3.0, 6.0, 9.0, 12.0, 15.0, 18.0))
    asked = prompts(1.0, count=64, epochs=1)
    run = simulate_cluster(
        areal(batch=4, eta=2),
        cluster(slots=8, train_s=0.5),
        asked,
        faults=Faults(trainer_crashes=crashes),
        versions=99,
        seed=4,
    )
    lost = run.summary["ledger"]["failed"]["the run crashed"]
    assert lost >= 12
    assert run.summary["rollouts"]["conservation"]["prompts"]["trained"] == 64
    assert run.summary["rollouts"]["starvation"]["prompts"] == 0
    assert run.summary["rollouts"]["reissues"]["groups"] == lost


def test_areal_1388_after_a_crash_staleness_stays_within_its_limit() -> None:
    """The version went on and the counter of accepted groups began at 0: the gate let versions × batch too many in."""
    ages = []
    for crashes in ((), (TrainerCrash(20.5, 1.0), TrainerCrash(40.5, 1.0, keeps_rollouts=True))):
        run = simulate_cluster(
            areal(batch=4, eta=2, max_staleness=4),
            cluster(slots=64, train_s=2.0),
            prompts(0.5),
            faults=Faults(trainer_crashes=crashes),
            versions=40,
        )
        ages.append(run.summary["staleness"])
    assert ages[1]["max"] <= ages[0]["max"] + 1
    assert ages[1]["mean"] == pytest.approx(ages[0]["mean"], abs=0.15)
    assert ages[1]["mean"] <= 2


def test_areal_1388_the_gate_is_as_wide_after_a_restore_as_before() -> None:
    """Version 5 of batches of 16: 80 accepted by then, and room for 48 less what is in flight."""
    strategy = areal(batch=16, eta=2, limit=1000)
    coordinator = Coordinator(strategy)
    for _ in range(5 * 16):
        lease = coordinator.request(0, 0.0)
        assert lease is not None
        if any(isinstance(event, StepReady) for event in coordinator.deliver(lease.id, 0.0)):
            coordinator.commit(0.0)
    for _ in range(7):
        coordinator.request(0, 0.0)
    restored = Coordinator.restore(strategy, json.loads(json.dumps(coordinator.snapshot())))
    assert (coordinator.version, coordinator.slots, restored.slots) == (5, 41, 41)


def test_nemo_rl_3410_what_is_incomplete_at_a_restart_is_kept_and_filled() -> None:
    """An option gave the whole batch up for one group that lacked: here three of four wait, and one is asked again."""
    loop = Loop(synchronous_rl(batch=4), [0])
    for _ in range(3):
        loop.step()
    assert (loop.coordinator.waiting, loop.coordinator.in_flight) == (3, 1)
    loop.resume(loop.saved(), keeps_rollouts=False)
    assert (loop.coordinator.waiting, list(loop.again)) == (3, [3])
    while loop.step():
        pass
    assert sorted(loop.trained()) == list(range(PROMPTS))
    assert not any(kind == REJECTED for _, kind, *_ in loop.log.rows())
