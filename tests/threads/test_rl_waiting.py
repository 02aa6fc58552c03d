"""Threads about reinforcement learning that waits for ever: for data, for a sync, for one answer, for nobody.

The number in a test's name is that of the public thread; docs/threads.md has the table.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import Cancelled, Coordinator, EveryN, EveryVersion, StepReady, Strategy, Tumbling
from fedasync.core.admission import StalenessBudget
from fedasync.rl.partial_groups import PartialGroups
from fedasync.runs.measures import event_table
from fedasync.simulation.cluster import AllowShort, Cluster, Faults, Refill, RequireFull
from fedasync.simulation.cluster.agents import Tool, Turns
from fedasync.simulation.cluster.faults import RewardStuck, ServerDown, SyncFails
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Uniform, Values
from fedasync.strategies.rollouts import areal, nemo_rl, prime_rl, synchronous_rl, trl, verl

from ..simulation.cluster.ideal import cluster, play, prompts

EVERY = {
    "synchronous_rl": synchronous_rl(batch=4),
    "areal": areal(batch=4, eta=1),
    "verl": verl(mini_batch=4),
    "prime_rl": prime_rl(batch=4),
    "nemo_rl": nemo_rl(batch=4),
    "trl": trl(batch=4, max_staleness=2),
}


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize(
    "strategy", [*EVERY.values(), areal(batch=4, eta=8), verl(mini_batch=4, trigger_parameter_sync_step=9)]
)
def test_prime_rl_2219_a_run_shorter_than_its_lag_ends(strategy: Strategy, versions: int) -> None:
    """With no more steps than the trainer may be ahead weights were never sent, and both sides waited."""
    assert play(strategy, cluster(), prompts(0.5), versions=versions).coordinator.version == versions


@pytest.mark.parametrize("load_s", [17.0, 30.0])
@pytest.mark.parametrize("order", ["all_at_once", "one_by_one"])
def test_torchforge_557_a_bound_of_0_and_a_slow_sync_is_a_synchronous_run(load_s: float, order: str) -> None:
    """Everything older than the new version was evicted while its weights were on their way: no batch ever again."""
    of = cluster(weights=Weights(transfer=False, load_s=load_s, order=order))
    bounded = areal(batch=4, eta=0, max_staleness=0)
    simulation = play(bounded, of, prompts(0.5), versions=6)
    assert simulation.ended == "versions"
    assert not simulation.coordinator.ledger.rejected
    ages = event_table(simulation.log).filter(event_table(simulation.log)["kind"] == "consumed")["staleness"]
    assert set(ages) == {0}


@pytest.mark.parametrize("batch", [1, 4])
def test_trl_5650_a_bound_of_0_leaves_a_batch_in_flight(batch: int) -> None:
    """In flight were bound × batch, so none: here (bound + 1) × batch (#5656)."""
    for bound in (0, 1, 4):
        assert trl(batch=batch, max_staleness=bound).admission.most_in_flight == (bound + 1) * batch
    simulation = play(trl(batch=batch, max_staleness=0), cluster(), prompts(0.5), versions=5)
    assert simulation.ended == "versions"


STUCK = Turns(Constant(1.0), Constant(500.0), (Tool("never", Constant(1.0), timeout_s=1e7, stuck_probability=0.004),))
"""Now and then a tool does not answer for four months."""


def test_nemo_rl_3238_one_stuck_answer_of_a_group_costs_a_time_out_and_not_the_run() -> None:
    """The step was never ready, and after a restart the same batch was drawn and stuck again."""
    asked = prompts(answers=8, answer_tokens=None, turns=STUCK)
    for strategy in (synchronous_rl(batch=4), nemo_rl(batch=4, sampler="in_order")):
        stuck = play(strategy, cluster(slots=1000), asked, versions=30)
        assert stuck.now > 1e7, "no tool was stuck"
        patient = replace(strategy, lease_timeout_s=20.0)
        simulation = play(patient, cluster(slots=1000), asked, versions=30)
        assert simulation.ended == "versions"
        timeouts = simulation.coordinator.ledger.failed["timeout"]
        assert timeouts > 0
        assert simulation.now <= 30 * 3.1 + 20 * timeouts


def test_nemo_rl_3488_when_the_producers_are_dead_the_run_says_so_and_ends() -> None:
    """All had died, and the trainer polled an empty buffer for 3.7 hours on 64 nodes."""
    faults = Faults(servers_down=(ServerDown(0, 10.0), ServerDown(1, 11.0)))
    simulation = play(areal(batch=4, eta=2), cluster(servers=2), prompts(0.5), faults=faults, versions=10_000)
    assert simulation.ended.startswith("stalled: version")
    assert "2 of 2 servers are down" in simulation.ended
    assert simulation.now < 25
    down_for_a_day = Faults(servers_down=(ServerDown(0, 10.0, 86_400.0),), stalled_after_s=600.0)
    simulation = play(areal(batch=4, eta=2), cluster(), prompts(0.5), faults=down_for_a_day, versions=10_000)
    assert simulation.ended.startswith("stalled: version")
    assert simulation.now <= 700


@pytest.mark.parametrize("name", EVERY)
def test_nemo_rl_2899_at_the_end_of_an_epoch_comes_the_next_one_or_a_clear_end(name: str) -> None:
    """The data ended after one epoch, and the trainer waited for ever (#2917)."""
    strategy = EVERY[name]
    for epochs in (1, 3):
        simulation = play(strategy, cluster(train_s=0.1), prompts(0.2, count=22, epochs=epochs), versions=99)
        assert simulation.ended.startswith("data exhausted: version")
        ledger = simulation.coordinator.ledger
        assert ledger.consumed + ledger.buffered + ledger.rejected["stale"] == 22 * epochs
        assert ledger.rejected["stale"] == 0 or EVERY[name].max_staleness is not None
    assert play(strategy, cluster(), prompts(0.2, count=22), versions=40).ended == "versions"


@pytest.mark.parametrize("name", EVERY)
def test_nemo_rl_3938_a_prompt_that_is_too_long_leaves_no_hole(name: str) -> None:
    """It failed at each try and held its place in the batch for ever: here the next prompt takes it."""
    asked = prompts(0.5, prompt_tokens=Values((10.0, 10.0, 999.0)), most_prompt_tokens=100)
    simulation = play(EVERY[name], cluster(), asked, versions=5)
    assert simulation.ended == "versions"
    failed = simulation.coordinator.ledger.failed
    assert set(failed) == {"prompt too long"}
    events = event_table(simulation.log)
    refused = events.filter(events["kind"] == "failed")["worker"]
    assert refused.to_list() == list(range(2, 3 * len(refused), 3)), "once each"


def test_skyrl_1173_replies_that_never_come_cost_their_slots_until_a_time_out() -> None:
    """125 of 128 groups were there, and a few workers never came back, for 29 hours."""
    faults = Faults(lost_reply_probability=0.02)
    stuck = play(areal(batch=128, eta=0), cluster(slots=128), prompts(0.5), faults=faults, versions=20)
    assert stuck.ended.startswith("stalled: version 0; the next step lacks")
    patient = areal(batch=128, eta=0, lease_timeout_s=30.0)
    assert play(patient, cluster(slots=128), prompts(0.5), faults=faults, versions=20).ended == "versions"
    shows = replace(faults, answer_timeout_s=30.0)
    assert (
        play(areal(batch=128, eta=0), cluster(slots=128), prompts(0.5), faults=shows, versions=20).ended == "versions"
    )


@given(ends=st.lists(st.sampled_from(["deliver", "defect", "fail", "abort"]), min_size=1, max_size=60))
def test_skyrl_1733_a_cancelled_group_gives_back_its_slot(ends: list[str]) -> None:
    """Cancelling at the end of an epoch left the counters as they were, or killed the process (#1691).

    Always: admitted = in flight + accepted + rejected + failed + cancelled, and as many slots as at the start are free.
    """
    strategy = areal(batch=4, eta=1, limit=6, publication=EveryVersion("abort"))
    coordinator = Coordinator(strategy)
    for end in ends:
        while coordinator.request(0, 0.0) is not None:
            pass
        if not coordinator.leases:
            assert coordinator.step is not None, coordinator.explain()
        if end == "abort" and coordinator.step is not None:
            coordinator.commit(0.0)
            assert coordinator.in_flight == 0
        elif coordinator.leases:
            first = coordinator.leases[0].id
            if end == "fail":
                coordinator.fail(first, "cancelled at the end of the epoch", 0.0)
            else:
                coordinator.deliver(first, 0.0, "no number" if end == "defect" else None)
        ledger = coordinator.ledger
        assert ledger.imbalance == 0
        room = min(6 - ledger.in_flight, (coordinator.version + 2) * 4 - ledger.accepted - ledger.in_flight)
        assert coordinator.slots == room


def test_verl_3895_a_run_that_stands_still_says_who_waits_for_whom() -> None:
    """An example hung after its start, at 0 % GPU, without a word."""
    faults = Faults(reward_stuck=(RewardStuck(0.5),))
    simulation = play(areal(batch=4, eta=0), cluster(), prompts(0.0, count=99), faults=faults)
    told = simulation.explain()
    assert simulation.ended == f"stalled: {told}"
    for part in (
        "version 0",
        "the next step lacks 4 contributions, 0 wait",
        "4 in flight at workers",
        "no lease is given out: the staleness budget is spent",
        "0 answers are being generated",
        "4 answers wait for their reward",
    ):
        assert part in told


def test_miles_1673_an_empty_source_with_nothing_under_way_is_an_end() -> None:
    """The source was exhausted and nothing pending, and the trainer waited on an empty queue."""
    simulation = play(areal(batch=4, eta=2), cluster(), prompts(0.5, count=8, epochs=1), versions=99)
    assert simulation.ended.startswith("data exhausted: version 2; the next step lacks 4 contributions, 0 wait")
    assert "nobody works" in simulation.ended


@pytest.mark.parametrize("policy", [RequireFull(), AllowShort(1), Refill()], ids=lambda policy: policy.kind)
def test_trl_7176_one_generation_that_fails_costs_one_generation(policy: PartialGroups) -> None:
    """It killed the worker; what was in flight went on, stale, and a group given out by half was left behind."""
    faults = Faults(answer_failure_probability=0.1)
    of: Cluster = cluster(partial_groups=policy)
    simulation = play(areal(batch=8, eta=1), of, prompts(0.5, answers=4), faults=faults, versions=30)
    assert simulation.ended == "versions"
    assert simulation.coordinator.ledger.imbalance == 0
    running = {entry.answer // 4 for server in simulation.rollouts.servers for entry in server.ends}
    assert running <= {lease.id for lease in simulation.coordinator.leases}, "somebody works for a lease that has ended"


def test_trl_6913_a_sync_that_fails_takes_a_bounded_time_and_the_servers_go_on() -> None:
    """The error of the HTTP call was not looked at, and the trainer waited for ever (#6796)."""
    faults = Faults(sync_fails=SyncFails(1.0, timeout_s=5.0, retry_s=1.0, most_retries=3))
    simulation = play(synchronous_rl(batch=4), cluster(train_s=1.0), prompts(0.0), faults=faults, versions=10)
    assert simulation.now == pytest.approx(10 * 2 + 9 * (4 * 5 + 3 * 1))
    assert sum("given up" in incident.what for incident in simulation.incidents) == 9


def test_areal_588_a_rejected_group_is_replaced() -> None:
    """A call for a batch waited for ever once the filter had rejected a single trajectory (#567)."""
    coordinator = Coordinator(areal(batch=8, eta=0))
    leases = [coordinator.request(prompt, 0.0) for prompt in range(8)]
    assert coordinator.request(8, 0.0) is None
    for lease in leases:
        assert lease is not None
        coordinator.deliver(lease.id, 1.0, "all answers are right" if lease.id % 2 else None)
    more = [coordinator.request(prompt, 1.0) for prompt in range(8, 13)]
    assert [lease is not None for lease in more] == [True] * 4 + [False]
    events = [event for lease in more if lease is not None for event in coordinator.deliver(lease.id, 2.0)]
    assert any(isinstance(event, StepReady) for event in events)


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_areal_101_a_batch_larger_than_what_may_be_in_flight_fills_all_the_same(limit: int) -> None:
    """One rollout at a time and batches of eight: the trainer waited for data for ever."""
    simulation = play(areal(batch=8, eta=0, limit=limit), cluster(), prompts(0.0), versions=3)
    assert simulation.now == pytest.approx(3 * (np.ceil(8 / limit) + 1))


def test_areal_137_with_as_many_in_flight_as_a_batch_the_slowest_of_all_is_waited_for() -> None:
    """No step for an hour or two: 32 in flight, batches of 32 groups of 8, and the longest answer of 256 decides.

    No fault, but the price of a limit equal to the batch: room for η more batches makes the first step
    quicker, and what the run does meanwhile is told.
    """
    first_s = []
    for limit in (32, 64):
        asked = prompts(1.2, answers=8)
        simulation = play(areal(batch=32, eta=1, limit=limit), cluster(slots=1024), asked, versions=1, seed=3)
        first_s.append(simulation.now)
    assert first_s[0] > 1.3 * first_s[1]
    early = play(areal(batch=32, eta=1, limit=32), cluster(slots=1024), prompts(1.2, answers=8), time_s=2.0, seed=3)
    assert "the next step lacks" in early.explain()
    assert "answers are being generated" in early.explain()


def test_areal_716_with_tools_the_limit_is_of_episodes_and_servers_need_more_of_them() -> None:
    """Episodes count while their tools are at work, so a limit fitted to the servers leaves these idle."""
    agents = prompts(answer_tokens=None, turns=Turns(Constant(4.0), Constant(200.0), (Tool("t", Uniform(2.0, 4.0)),)))
    busy = [
        play(areal(batch=8, eta=None, limit=limit), cluster(slots=8, train_s=0.1), agents, versions=60)
        for limit in (8, 160)
    ]
    shares = [simulation.trainer.use.shares()["servers"]["decoding"] for simulation in busy]
    assert busy[0].now > 4 * busy[1].now
    assert shares[1] > 0.95
    assert max(len(server.ends) for server in busy[1].rollouts.servers) <= 8, (
        "sequences that run have a limit of their own"
    )


def test_areal_1481_there_is_one_way_in_and_it_is_the_gate() -> None:
    """Sessions from outside passed by the gate: with η = 0 old trajectories were trained, or dropped without a word."""
    coordinator = Coordinator(Strategy("gated", StalenessBudget(0, 4), Tumbling(4), None, EveryN(1)))
    given = [coordinator.request(worker, 0.0) for worker in range(100)]
    assert sum(lease is not None for lease in given) == 4
    with pytest.raises(ValueError, match="lease 4 was never given out"):
        coordinator.deliver(4, 1.0)
    for lease in given[:4]:
        assert lease is not None
        coordinator.deliver(lease.id, 1.0)
    assert not any(isinstance(event, Cancelled) for event in coordinator.commit(2.0))
    assert coordinator.ledger.as_dict()["rejected"] == {}
