"""What a fault costs, in closed form: answers of exactly 1 s, steps of exactly 1 s."""

from __future__ import annotations

from dataclasses import replace
from math import comb, sqrt

import numpy as np
import pytest

from fedasync.core import Barrier, Cohort, EveryVersion
from fedasync.rl.partial_groups import PartialGroups
from fedasync.runs.measures import event_table
from fedasync.simulation.cluster import AllowShort, Faults, Refill, RequireFull, Reward
from fedasync.simulation.cluster.agents import Tool, Turns
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.faults import (
    RewardStuck,
    ServerDown,
    SlowServer,
    SlowSync,
    SyncFails,
    TrainerCrash,
)
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Values
from fedasync.strategies.rollouts import areal, synchronous_rl

from .ideal import cluster, play, prompts

EXACT = prompts(0.0)
SYNCHRONOUS = synchronous_rl(batch=4)
"""A version takes 1 s of generation and 1 s of training, so commits are at 2, 4, 6, …"""


def commits(simulation: ClusterSimulation) -> list[float]:
    events = event_table(simulation.log)
    return [float(time_s) for time_s in events.filter(events["kind"] == "committed")["time_s"]]


def told(simulation: ClusterSimulation) -> list[str]:
    return [incident.what for incident in simulation.incidents]


# -- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failure", "answers"), [(0.05, 8), (0.2, 3), (0.01, 16)])
@pytest.mark.parametrize("policy", [RequireFull(), AllowShort(2), Refill()], ids=lambda policy: policy.kind)
def test_policies_lose_groups_as_the_binomial_law_says(policy: PartialGroups, failure: float, answers: int) -> None:
    """1 − (1 − p)^n of them where all are required: 33.7 % at 5 % and n = 8; those left with fewer than two; none."""
    of = cluster(slots=512, train_s=0.1, partial_groups=policy, most_attempts=100)
    faults = Faults(answer_failure_probability=failure)
    simulation = play(areal(batch=64, eta=1), of, prompts(0.5, answers=answers), faults=faults, versions=25)
    ledger = simulation.coordinator.ledger
    ended = ledger.consumed + ledger.buffered + ledger.failed.total()
    if isinstance(policy, Refill):
        assert not ledger.failed
        columns = simulation.answers.columns(simulation.rollouts.servers)
        whole = ~np.isnan(columns["end_s"])
        goal = np.array(simulation.answers.goal)[columns["lease"] * answers + columns["answer"]]
        assert (columns["generated_tokens"] == goal)[whole].all()
        share = goal[whole].sum() / (goal + columns["lost_tokens"])[whole].sum()
        assert share == pytest.approx(1 - failure, abs=0.02)  # each token is generated 1/(1 − p) times
        return
    least = answers if isinstance(policy, RequireFull) else policy.least
    lost = sum(comb(answers, k) * (1 - failure) ** k * failure ** (answers - k) for k in range(least))
    assert abs(ledger.failed["answer failed"] / ended - lost) <= 4 * sqrt(lost * (1 - lost) / ended) + 1e-12


def test_a_short_group_trains_on_what_it_has() -> None:
    of = cluster(partial_groups=AllowShort(1))
    faults = Faults(answer_failure_probability=0.3)
    simulation = play(SYNCHRONOUS, of, prompts(0.0, answers=2), faults=faults, versions=200)
    table = simulation.trainer.times.table()
    tokens = table.filter(table["name"] == "tokens")["value"].sum()
    # Of two answers 1 − p come each, given that not both fail.
    assert tokens / simulation.coordinator.ledger.consumed == pytest.approx(2000 * 0.7 / (1 - 0.09), rel=0.04)


@pytest.mark.parametrize("policy", [RequireFull(), Refill()], ids=lambda policy: policy.kind)
def test_a_dead_server_costs_its_answers_the_time_that_they_had(policy: PartialGroups) -> None:
    faults = Faults(servers_down=(ServerDown(1, 0.4),))
    simulation = play(SYNCHRONOUS, cluster(servers=2, partial_groups=policy), EXACT, faults=faults, versions=3)
    assert commits(simulation) == pytest.approx([2.4, 4.4, 6.4])


def test_while_no_server_is_up_prompts_wait_for_the_first() -> None:
    faults = Faults(servers_down=(ServerDown(0, 2.5, 4.0), ServerDown(1, 2.2, 2.0)))
    assert commits(play(SYNCHRONOUS, cluster(servers=2), EXACT, faults=faults, versions=2)) == pytest.approx([2.0, 6.2])


def test_outages_that_follow_each_other_without_a_gap_are_one_long_one() -> None:
    faults = Faults(servers_down=(ServerDown(0, 0.5, 2.0), ServerDown(0, 2.5, 3.0)))
    simulation = play(SYNCHRONOUS, cluster(), EXACT, faults=faults, versions=1)
    assert commits(simulation) == pytest.approx([7.5])
    assert simulation.trainer.use.shares()["servers"]["down"] * 7.5 == pytest.approx(5.0)


@pytest.mark.parametrize("times", [0.5, 2.0, 7.0])
def test_a_slow_server_makes_a_synchronous_step_as_slow_as_its_answers(times: float) -> None:
    faults = Faults(slow_servers=(SlowServer(0, 0.0, times),))
    simulation = play(SYNCHRONOUS, cluster(servers=2), EXACT, faults=faults, versions=3)
    assert commits(simulation) == pytest.approx([(max(times, 1.0) + 1.0) * k for k in (1, 2, 3)])


def test_a_server_that_is_slow_for_a_while_makes_up_for_nothing() -> None:
    """From 0.5 s to 1.5 s it does a quarter of a second's work."""
    faults = Faults(slow_servers=(SlowServer(0, 0.5, 4.0, 1.0),))
    assert commits(play(SYNCHRONOUS, cluster(), EXACT, faults=faults, versions=2)) == pytest.approx([2.75, 4.75])


def test_a_dead_server_takes_nothing_even_when_its_speed_changes() -> None:
    faults = Faults(servers_down=(ServerDown(0, 0.1),), slow_servers=(SlowServer(0, 0.2, 3.0, 1.0),))
    simulation = play(SYNCHRONOUS, cluster(servers=2), EXACT, faults=faults, versions=2)
    assert commits(simulation) == pytest.approx([2.1, 4.1])


def test_a_lost_reply_is_generated_again_once_its_loss_shows() -> None:
    faults = Faults(lost_reply_probability=0.5, answer_timeout_s=3.0)
    one = play(synchronous_rl(batch=1), cluster(), EXACT, faults=faults, versions=60)
    steps_s = np.diff([0.0, *commits(one)])
    lost = np.rint((steps_s - 2.0) / 4.0)  # the time-out, and another second of generation
    assert steps_s == pytest.approx(2.0 + 4.0 * lost)
    assert lost.sum() == sum("reply" in what for what in told(one)) > 20


# -- weights ---------------------------------------------------------------------------------------------------

LOADING = Weights(transfer=False, load_s=0.5)


def test_failed_syncs_cost_their_time_outs_and_after_the_last_one_servers_keep_their_weights() -> None:
    faults = Faults(sync_fails=SyncFails(1.0, timeout_s=2.0, retry_s=0.25, most_retries=2))
    simulation = play(SYNCHRONOUS, cluster(weights=LOADING), EXACT, faults=faults, versions=3)
    assert commits(simulation) == pytest.approx([2.0, 10.5, 19.0])  # 3 attempts of 2 s, with 0.25 s between
    columns = simulation.answers.columns(simulation.rollouts.servers)
    assert set(columns["last_version"]) == {0}
    assert columns["base_version"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert sum("given up" in what for what in told(simulation)) == 2


def test_a_sync_that_fails_for_good_leaves_the_servers_usable() -> None:
    faults = Faults(sync_fails=SyncFails(0.6, timeout_s=1.0, most_retries=0))
    simulation = play(SYNCHRONOUS, cluster(weights=LOADING), EXACT, faults=faults, versions=40)
    assert simulation.coordinator.version == 40
    columns = simulation.answers.columns(simulation.rollouts.servers)
    behind = columns["base_version"] - columns["first_version"]
    assert 0 == behind.min() < behind.max(), "what failed now and then is made up for by the next sync that does not"


def test_a_slow_sync_takes_so_many_times_as_long_and_only_for_its_versions() -> None:
    faults = Faults(slow_syncs=(SlowSync(2, 3, 10.0),))
    simulation = play(SYNCHRONOUS, cluster(weights=LOADING), EXACT, faults=faults, versions=5)
    assert np.diff(commits(simulation)) == pytest.approx([2.5, 7.0, 7.0, 2.5])


# -- rewards ---------------------------------------------------------------------------------------------------


def test_answers_wait_for_a_reward_service_that_is_stuck() -> None:
    faults = Faults(reward_stuck=(RewardStuck(0.5, 3.0),))
    assert commits(play(SYNCHRONOUS, cluster(), EXACT, faults=faults, versions=2)) == pytest.approx([4.5, 6.5])
    busy = cluster(reward=Reward(Constant(0.25), workers=1))  # four answers: graded at 3.5, then 3.75, 4.0, 4.25
    faults = Faults(reward_stuck=(RewardStuck(1.1, 2.4),))
    assert commits(play(SYNCHRONOUS, busy, EXACT, faults=faults, versions=1)) == pytest.approx([5.25])


# -- the trainer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_s", "keeps_rollouts", "first_s"),
    [
        (0.0, True, 2.0),  # the servers had their prompts, and generate while the trainer is away
        (0.0, False, 3.0),  # generation from the start at 1
        (0.25, True, 2.25),  # the groups of 1 s wait for the trainer, who is back at 1.25
        (0.25, False, 3.25),  # generation from the start at 1.25
        (1.5, True, 3.5),  # the step from its start at 2.5
        (1.5, False, 3.5),  # the groups of the step had arrived, and are kept
        (2.0, True, 4.0),  # a crash at the moment at which the step would end comes before its end
        (2.5, True, 2.0),
    ],
)
def test_a_crash_costs_what_it_undoes(at_s: float, keeps_rollouts: bool, first_s: float) -> None:
    faults = Faults(trainer_crashes=(TrainerCrash(at_s, 1.0, keeps_rollouts),))
    simulation = play(SYNCHRONOUS, cluster(), EXACT, faults=faults, versions=2)
    assert simulation.coordinator.version == 2
    assert commits(simulation)[0] == pytest.approx(first_s)


def test_a_crash_at_the_moment_of_a_restart_is_another_one() -> None:
    faults = Faults(trainer_crashes=(TrainerCrash(1.5, 1.0), TrainerCrash(2.5, 3.0)))
    simulation = play(SYNCHRONOUS, cluster(), EXACT, faults=faults, versions=1)
    assert commits(simulation) == pytest.approx([6.5])
    shares = simulation.trainer.use.shares()["trainer"]
    assert {what: share * 6.5 for what, share in shares.items() if share} == pytest.approx(
        {"waiting": 1.0, "training": 1.5, "down": 4.0}
    )


def test_weights_on_their_way_arrive_while_the_trainer_is_down() -> None:
    faults = Faults(trainer_crashes=(TrainerCrash(2.25, 1.0, keeps_rollouts=True),))
    of = cluster(weights=replace(LOADING, load_s=2.0))
    simulation = play(SYNCHRONOUS, of, EXACT, faults=faults, versions=2)
    assert commits(simulation) == pytest.approx([2.0, 6.0])
    shares = simulation.trainer.use.shares()["trainer"]
    assert {what: share * 6 for what, share in shares.items() if share} == pytest.approx(
        {"waiting": 2.0, "training": 2.0, "syncing": 1.0, "down": 1.0}
    )


# -- what once went wrong here ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["all_at_once", "one_by_one"])
def test_a_server_that_dies_while_it_drains_lets_the_sync_go_on(order: str) -> None:
    """Also when it is back at once, or an attempt to bring it weights was to be made again."""
    of = cluster(servers=2, weights=replace(LOADING, order=order), partial_groups=RequireFull())
    long = prompts(answer_tokens=Values((1000.0, 1000.0, 9000.0, 9000.0)))
    for back_s in (None, 0.1, 3.0):
        for fails in (None, SyncFails(1.0, 0.4, 0.2, 3)):
            faults = Faults(servers_down=(ServerDown(0, 3.0, back_s), ServerDown(1, 3.0, 5.0)), sync_fails=fails)
            simulation = play(areal(batch=2, eta=1, interrupt=False), of, long, faults=faults, versions=4)
            assert simulation.ended == "versions"


def test_a_server_that_loads_an_older_version_has_another_turn() -> None:
    """It would have stayed behind until the next publication."""
    of = cluster(servers=2, train_s=1.0, weights=replace(LOADING, load_s=1.5, order="one_by_one"))
    simulation = play(areal(batch=1, eta=4), of, prompts(0.0, count=3, epochs=1), versions=9)
    assert simulation.ended.startswith("data exhausted")
    assert [server.version for server in simulation.rollouts.servers] == [3, 3]


def test_a_server_that_gives_up_an_older_version_has_another_turn() -> None:
    """Versions 2 and 3 are published while version 1 is loaded in vain: the newest is what is tried next."""
    of = cluster(servers=2, train_s=1.0, weights=replace(LOADING, order="each"))
    faults = Faults(sync_fails=SyncFails(1.0, timeout_s=2.5, most_retries=0))
    simulation = play(areal(batch=1, eta=4), of, prompts(0.0, count=3, epochs=1), faults=faults, versions=9)
    assert simulation.ended.startswith("data exhausted")
    tried = [what.split()[2] for what in told(simulation) if "given up" in what]
    assert tried == ["1", "1", "3", "3"]


def test_a_colocated_cluster_does_not_wait_for_what_its_training_has_stopped() -> None:
    of = cluster(servers=2, training_gpus=2, colocated=True, switch_s=0.5)
    simulation = play(areal(batch=4, eta=2, interrupt=False), of, prompts(1.0), versions=10)
    assert simulation.ended == "versions"


def test_a_server_that_is_back_while_its_gpus_train_waits_for_the_end_of_that() -> None:
    of = cluster(servers=2, training_gpus=2, colocated=True, train_s=5.0)
    faults = Faults(servers_down=(ServerDown(0, 1.5, 1.0), ServerDown(1, 1.5, 1.0)))
    asked = prompts(answer_tokens=Values((1000.0, 1000.0) + (3000.0,) * 8))
    simulation = play(areal(batch=2, eta=1), of, asked, faults=faults, versions=2)
    assert commits(simulation) == pytest.approx([6.0, 14.0])  # and not 11, had it generated from 2.5 s on


def test_what_is_cancelled_is_not_computed_anew_before() -> None:
    """New weights that arrive at once recompute the KV cache of what goes on, and nothing else goes on."""
    of = cluster(decoding=FixedSpeed(1000.0, max_running=64, prefill_tokens_per_second=100.0), train_s=0.5)
    strategy = areal(batch=1, eta=1, publication=EveryVersion("abort"))
    simulation = play(strategy, of, prompts(answer_tokens=Values((1000.0, 9000.0))), versions=1)
    assert simulation.coordinator.ledger.cancelled.total() == 1
    assert simulation.rollouts.servers[0].prefill_s == 0.0


def test_prompts_that_were_cancelled_have_not_failed() -> None:
    """An abort does not count as one of the attempts after which a prompt is given up."""
    strategy = areal(batch=1, eta=2, publication=EveryVersion("abort"))
    asked = prompts(answer_tokens=Values((500.0, 9000.0, 700.0, 800.0)), count=4, shuffle=False)
    of = cluster(partial_groups=RequireFull(), most_attempts=2)
    simulation = play(strategy, of, asked, faults=Faults(servers_down=(ServerDown(0, 6.0, 0.1),)), versions=8)
    assert simulation.coordinator.ledger.cancelled.total() > 8
    assert not any("given up" in what for what in told(simulation))


def test_refused_prompts_leave_their_slots_to_the_next() -> None:
    """The first batch is too long as a whole: nobody else would have asked."""
    asked = prompts(0.0, prompt_tokens=Values((500.0,) * 4 + (5.0,) * 8), most_prompt_tokens=100)
    simulation = play(SYNCHRONOUS, cluster(), asked, versions=2)
    assert commits(simulation) == pytest.approx([2.0, 4.0])
    assert simulation.coordinator.ledger.failed["prompt too long"] == 4


def test_a_round_over_the_end_of_an_epoch_passes_over_a_prompt_that_it_has() -> None:
    rounds = replace(SYNCHRONOUS, admission=Cohort(3), buffer=Barrier())
    for seed in range(8):
        simulation = play(rounds, cluster(), prompts(0.0, count=4), versions=20, seed=seed)
        assert simulation.ended == "versions"
        events = event_table(simulation.log)
        trained = events.filter(events["kind"] == "consumed")
        assert max(trained.group_by("version").n_unique()["worker"]) == 3
        assert set(trained["worker"].value_counts()["count"]) == {15}, "four prompts, fifteen epochs"


def test_what_a_dead_server_had_cached_is_lost() -> None:
    turns = Turns(Constant(1.0), Constant(1000.0), (Tool("search", Constant(10.0), Constant(100.0)),))
    asked = prompts(answer_tokens=None, turns=turns, prompt_tokens=Constant(500.0))
    decoding = FixedSpeed(1000.0, max_running=64, prefill_tokens_per_second=1000.0)

    def prefilled_s(faults: Faults) -> float:
        of = cluster(decoding=decoding, prefix_cache=True)
        return play(synchronous_rl(batch=1), of, asked, faults=faults, versions=1).rollouts.servers[0].prefill_s

    assert prefilled_s(Faults()) == pytest.approx(0.5 + 0.1)
    assert prefilled_s(Faults(servers_down=(ServerDown(0, 5.0, 1.0),))) == pytest.approx(0.5 + 1.6)


def test_an_answer_that_stops_where_it_began_is_of_its_base_version() -> None:
    """Not of a version that came to its server later, when its clock still stood at the beginning."""
    of = cluster(servers=2, partial_groups=Refill())
    faults = Faults(servers_down=(ServerDown(0, 0.0, 0.5),))
    simulation = play(areal(batch=2, eta=0), of, EXACT, faults=faults, versions=3)
    columns = simulation.answers.columns(simulation.rollouts.servers)
    assert columns["last_version"].tolist() == columns["base_version"].tolist()
