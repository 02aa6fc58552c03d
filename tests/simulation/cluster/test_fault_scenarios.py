"""Every fault × every system: each run ends or recovers, none hangs, and the run says which and why.

What is right where one may doubt:

* A server that dies takes the tokens of its answers with it; who waits for it decides (``partial_groups``). While all
  servers are down prompts wait for the first to come back; if none does, the run ends as stalled.
* A reply that is lost and whose loss never shows holds its group, and that group its place in the budget, for ever: the
  run goes on while there is room beside them, and ends as stalled when there is none. Nothing guesses a time-out.
* Weights that cannot be brought to the servers are given up after the last retry, and training goes on: servers are
  behind what the coordinator thinks that they run, which the rollouts show (``first_version`` < ``base_version``).
* A data set that ends in the middle of a batch leaves that batch untrained: the run ends, with what waits.
* A trainer that comes back makes the step that it was in again. Weights on their way arrive meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core.publication import InFlight
from fedasync.simulation.cluster import AllowShort, Faults, Refill, RequireFull, Reward, simulate_cluster
from fedasync.simulation.cluster.faults import (
    RewardStuck,
    ServerDown,
    SlowServer,
    SlowSync,
    SyncFails,
    TrainerCrash,
)
from fedasync.simulation.laws import Constant, Exponential, Values

from .faulty import BATCH, SYSTEMS, VERSIONS, WAYS, pairs, scenario, small, system

POLICIES = (RequireFull(), AllowShort(1), Refill())
ORDERS = ("all_at_once", "one_by_one")


@dataclass(frozen=True)
class Case:
    """Faults, and what must be in the words that end the run; ``incident`` in those of an incident."""

    faults: Faults = Faults()
    ended: str = "versions"
    incident: str | None = None
    cluster: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)


CASES = {
    "a server down for a while": Case(Faults(servers_down=(ServerDown(0, 0.8, 2.0),)), incident="server 0 died with"),
    "a server down for good": Case(Faults(servers_down=(ServerDown(1, 0.8),)), incident="server 1 died with"),
    "all servers down for a while": Case(
        Faults(servers_down=(ServerDown(0, 0.8, 2.0), ServerDown(1, 1.1, 3.0))), incident="server 1 is back"
    ),
    "all servers down for good": Case(
        Faults(servers_down=(ServerDown(0, 0.8), ServerDown(1, 1.1))), ended="2 of 2 servers are down"
    ),
    "all servers down from the start": Case(
        Faults(servers_down=(ServerDown(0, 0.0), ServerDown(1, 0.0))), ended="2 of 2 servers are down"
    ),
    "a slow server": Case(Faults(slow_servers=(SlowServer(0, 0.5, 10.0),)), incident="server 0 is 10 times as slow"),
    "a slow server for a while": Case(Faults(slow_servers=(SlowServer(0, 0.5, 10.0, 3.0),))),
    "lost replies that show": Case(
        Faults(lost_reply_probability=0.2, answer_timeout_s=0.5), incident="the reply of answer"
    ),
    "lost replies that never show": Case(Faults(lost_reply_probability=0.4), ended="stalled: version"),
    "answers that fail": Case(Faults(answer_failure_probability=0.2)),
    "answers that always fail": Case(Faults(answer_failure_probability=1.0), ended="nothing accepted: the last"),
    "replies that are always lost": Case(
        Faults(lost_reply_probability=1.0, answer_timeout_s=0.1), ended="nothing accepted: the last"
    ),
    "a sync that fails now and then": Case(
        Faults(sync_fails=SyncFails(0.5, timeout_s=1.0, retry_s=0.2, most_retries=50)), incident="failed, attempt 1"
    ),
    "a sync that always fails": Case(
        Faults(sync_fails=SyncFails(1.0, timeout_s=0.4, most_retries=1)), incident="failed, attempt 2: given up"
    ),
    "a slow sync": Case(Faults(slow_syncs=(SlowSync(1, 3, 20.0),))),
    "a reward service that is stuck for a while": Case(
        Faults(reward_stuck=(RewardStuck(0.5, 4.0),)), incident="the reward service is stuck"
    ),
    "a reward service that is stuck for good": Case(
        Faults(reward_stuck=(RewardStuck(0.5),)), ended="answers wait for their reward"
    ),
    "a slow reward service that is stuck": Case(
        Faults(reward_stuck=(RewardStuck(0.5, 2.0), RewardStuck(4.0, 1.0))),
        cluster={"reward": Reward(Exponential(0.1), workers=1)},
    ),
    "prompts that are too long": Case(
        prompts={"prompt_tokens": Values((90.0, 200.0, 300.0)), "most_prompt_tokens": 100}
    ),
    "no prompt that is short enough": Case(
        prompts={"prompt_tokens": Constant(200.0), "most_prompt_tokens": 100}, ended="nothing accepted: the last"
    ),
    "data that end": Case(prompts={"count": 10, "epochs": 1}, ended="data exhausted: version"),
    "data that end within a batch of the second epoch": Case(
        prompts={"count": 9, "epochs": 2}, ended="data exhausted: version"
    ),
    "data without end, gone through again and again": Case(prompts={"count": 7}),
    "no progress for too long": Case(
        Faults(servers_down=(ServerDown(0, 0.1, 90.0), ServerDown(1, 0.1, 90.0)), stalled_after_s=20.0),
        ended="stalled: version",
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_scenario_ends_or_recovers_and_says_why(case: Case, name: str) -> None:
    told = set()
    ways = WAYS[:1] if case.ended.startswith("nothing accepted") else WAYS  # those runs are long
    for number, (order, way) in enumerate((order, way) for order in ORDERS for way in ways):
        of = small(**{"partial_groups": POLICIES[number % 3], **case.cluster, "weights": {"order": order}})
        simulation = scenario(system(name, way), of, pairs(**case.prompts), case.faults)
        assert case.ended in simulation.ended
        if case.ended == "versions":
            assert simulation.coordinator.version == VERSIONS
        told.update(incident.what for incident in simulation.incidents)
    assert case.incident is None or any(case.incident in what for what in told)


@pytest.mark.parametrize("keeps_rollouts", [True, False])
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_trainer_that_crashes_at_any_moment_comes_back_and_makes_the_same_versions(
    name: str, keeps_rollouts: bool
) -> None:
    """At time 0, while it waits, in a step, while servers drain, in a sync, in the last step; twice in a row."""
    for number, at_s in enumerate((0.0, 0.3, 1.1, 1.9, 2.2, 3.1, 3.7)):
        way: InFlight = WAYS[number % 3]
        crashes = (TrainerCrash(at_s, 0.7, keeps_rollouts), TrainerCrash(at_s + 0.7, 0.4, not keeps_rollouts))
        for order in ORDERS:
            of = small(weights={"order": order})
            simulation = scenario(system(name, way), of, faults=Faults(trainer_crashes=crashes))
            assert simulation.ended == "versions"
            assert simulation.coordinator.version == VERSIONS
            shares = simulation.trainer.use.shares()["trainer"]
            assert shares["down"] * simulation.now == pytest.approx(1.1)
            assert shares["training"] * simulation.now >= VERSIONS * 0.5 - 1e-9
            ledger = simulation.coordinator.ledger
            assert not ledger.rejected or name in ("prime_rl", "trl")
            assert set(ledger.failed) <= {"the run crashed"}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("switch_s", [0.0, 0.2])
def test_on_a_colocated_cluster_too(name: str, switch_s: float) -> None:
    """Its servers stop for training, whatever the strategy would like to become of what runs."""
    faults = Faults(
        servers_down=(ServerDown(0, 1.5, 2.0), ServerDown(1, 1.2, 0.5)),
        sync_fails=SyncFails(0.3, 0.2),
        trainer_crashes=(TrainerCrash(2.0, 0.5), TrainerCrash(5.0, 0.5, keeps_rollouts=True)),
    )
    for way in WAYS:
        for each in (Faults(), faults):
            of = small(colocated=True, training_gpus=2, switch_s=switch_s)
            assert scenario(system(name, way), of, faults=each).ended == "versions"


@pytest.mark.parametrize("name", SYSTEMS)
def test_at_the_end_of_the_data_a_group_that_never_comes_is_no_end_of_the_data(name: str) -> None:
    """It stalls the run, where nothing gives it up: prime-rl cancels it when it has grown too old."""
    faults, asked = Faults(lost_reply_probability=0.2), pairs(count=20, epochs=1)
    simulation = scenario(system(name, "interrupt"), asked=asked, faults=faults)
    lost = simulation.coordinator.in_flight
    assert simulation.ended.startswith("stalled" if lost else "data exhausted")
    assert lost or name == "prime_rl"


@pytest.mark.parametrize("name", SYSTEMS)
def test_short_runs_end(name: str) -> None:
    for versions in (1, 2):
        assert scenario(system(name, "interrupt"), versions=versions).coordinator.version == versions


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_finished_run_passes_its_own_verdicts_whatever_went_wrong(name: str) -> None:
    """`simulate_cluster` raises where a law is broken; the summary says what ended the run, and what happened."""
    faults = Faults(
        servers_down=(ServerDown(0, 1.0, 2.0), ServerDown(0, 3.0, 1.0)),
        slow_servers=(SlowServer(1, 2.0, 3.0, 4.0),),
        answer_failure_probability=0.1,
        lost_reply_probability=0.1,
        answer_timeout_s=0.5,
        sync_fails=SyncFails(0.4, 0.5),
        reward_stuck=(RewardStuck(5.0, 1.0),),
        trainer_crashes=(TrainerCrash(6.0, 1.0), TrainerCrash(8.0, 1.0, keeps_rollouts=True)),
    )
    for order, policy in zip((*ORDERS, ORDERS[0]), POLICIES, strict=True):
        of = small(weights={"order": order}, partial_groups=policy)
        asked = pairs(count=50, epochs=2, prompt_tokens=Values((10.0, 10.0, 500.0)), most_prompt_tokens=100)
        run = simulate_cluster(SYSTEMS[name], of, asked, faults=faults, versions=12)
        assert all(verdict["holds"] for verdict in run.summary["verdicts"])
        assert run.summary["ended"].startswith(("versions", "data exhausted"))
        assert run.summary["incidents_total"] >= 10
        assert run.summary["rollouts"]["conservation"]["prompts"]["dropped"]["prompt too long"] > 0


spans = st.lists(st.tuples(st.floats(0.0, 3.0), st.one_of(st.none(), st.floats(0.1, 3.0))), max_size=2).map(
    lambda drawn: [
        (sum(at_s + (for_s or 0.0) for at_s, for_s in drawn[:k]) + drawn[k][0], drawn[k][1])
        for k in range(len(drawn))
        if all(for_s is not None for _, for_s in drawn[:k])
    ]
)
"""Starts and lengths of troubles, one after the other."""
any_faults = st.builds(
    lambda down, slow, stuck, crashes, keeps, **rest: Faults(
        servers_down=tuple(ServerDown(server, *span) for server, each in enumerate(down) for span in each),
        slow_servers=tuple(slow),
        reward_stuck=tuple(RewardStuck(*span) for span in stuck),
        trainer_crashes=tuple(TrainerCrash(at_s, for_s or 1.0, keeps) for at_s, for_s in crashes),
        **rest,
    ),
    down=st.tuples(spans, spans),
    slow=st.lists(st.builds(SlowServer, st.integers(0, 1), st.floats(0, 5), st.sampled_from([0.5, 3.0])), max_size=2),
    stuck=spans,
    crashes=spans,
    keeps=st.booleans(),
    answer_failure_probability=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    lost_reply_probability=st.sampled_from([0.0, 0.0, 0.1]),
    answer_timeout_s=st.sampled_from([None, 0.5]),
    sync_fails=st.sampled_from([None, SyncFails(0.5, 0.3, 0.1, 2), SyncFails(1.0, 0.2, 0.0, 1)]),
    slow_syncs=st.sampled_from([(), (SlowSync(1, 2, 8.0),)]),
)


@given(
    name=st.sampled_from(sorted(SYSTEMS)),
    way=st.sampled_from(WAYS),
    order=st.sampled_from(ORDERS),
    policy=st.sampled_from(POLICIES),
    faults=any_faults,
    count=st.sampled_from([None, 4 * BATCH, 4 * BATCH + 1]),
    colocated=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=120)
def test_random_faults_end_or_recover_too(
    name: str,
    way: InFlight,
    order: str,
    policy: Any,
    faults: Faults,
    count: int | None,
    colocated: bool,
    seed: int,
) -> None:
    of = small(
        weights={"order": "all_at_once" if colocated else order},
        partial_groups=policy,
        **({"colocated": True, "training_gpus": 2, "switch_s": 0.1} if colocated else {}),
    )
    asked = pairs(count=count, epochs=None if count is None else 1)
    simulation = scenario(system(name, way), of, asked, faults, versions=6, seed=seed)
    never_back = {down.server for down in faults.servers_down if down.for_s is None}
    may_stall = (
        len(never_back) == 2
        or any(stuck.for_s is None for stuck in faults.reward_stuck)
        or (faults.lost_reply_probability and faults.answer_timeout_s is None)
    )
    hopeless = faults.answer_failure_probability == 1.0
    ends = {"stalled"} if may_stall else set()
    ends |= {"nothing accepted", "data exhausted"} if hopeless else {"versions", "data exhausted"}
    assert simulation.ended.split(":")[0] in ends
    if count is None and not hopeless and not may_stall:
        assert simulation.ended == "versions"
