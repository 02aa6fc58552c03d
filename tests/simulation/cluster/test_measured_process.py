"""What a measured process has and an ideal one has not: latencies, calls of prefill, writing weights, contention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.runs.measures import event_table
from fedasync.simulation.cluster import (
    Cluster,
    Contention,
    Faults,
    MeasuredSpeed,
    ServerDown,
    SlowServer,
    SyncFails,
    Trainer,
    TrainerCrash,
    Weights,
)
from fedasync.simulation.cluster.contention import SharedWork
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.hardware import GPUS, MODELS
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.laws import Constant, Uniform, Values
from fedasync.strategies.rollouts import areal, synchronous_rl

from .ideal import cluster, play, prompts

seconds = st.floats(0, 5, allow_nan=False)


def cost(speed: MeasuredSpeed) -> Any:
    return speed.cost(GPUS["h800"], MODELS["1.5b"], 1)


def commits(simulation: ClusterSimulation) -> list[float]:
    events = event_table(simulation.log)
    return [float(time_s) for time_s in events.filter(events["kind"] == "committed")["time_s"]]


def steps(simulation: ClusterSimulation, name: str) -> list[float]:
    table = simulation.trainer.times.table()
    return [float(value) for value in table.filter(table["name"] == name)["value"]]


# -- decoding ------------------------------------------------------------------------------------------------------


def test_a_line_and_its_two_ends_are_the_same_server() -> None:
    line = cost(MeasuredSpeed(overhead_s=0.01, per_sequence_s=0.002, max_running=12))
    ends = cost(MeasuredSpeed(running=(1, 8), running_s=(0.012, 0.026), max_running=12))
    assert ends.base_s[1:] == pytest.approx(line.base_s[1:])


def test_knots_are_met_and_lines_lie_between() -> None:
    found = cost(MeasuredSpeed(running=(2, 4, 8), running_s=(0.1, 0.2, 0.2), max_running=10)).base_s
    assert found[1:9] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert found[10] == pytest.approx(0.2 + 2 * 0.1 / 6)
    assert all(a <= b for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({}, "an iteration takes time"),
        ({"overhead_s": 0.1, "running": (1,), "running_s": (0.1,)}, "got both"),
        ({"running": (1, 2), "running_s": (0.1,)}, "as many of each would do"),
        ({"running": (2, 2), "running_s": (0.1, 0.2)}, r"running\[1\] must be an integer ≥ 3, got 2"),
        ({"running": (1, 2), "running_s": (0.2, 0.1)}, r"running_s\[1\] must be a finite number ≥ 0.2, got 0.1"),
        ({"overhead_s": -1.0}, "overhead_s must be a finite number ≥ 0, got -1.0"),
    ],
)
def test_speeds_that_contradict_themselves_are_refused(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MeasuredSpeed(**knobs)


def test_what_starts_at_one_instant_is_one_call_of_prefill() -> None:
    """Two groups of 4 answers start together, each a call on one server: 0.5 s, and 8 prompts of 10 tokens."""
    speed = MeasuredSpeed(overhead_s=1.0, prefill_call_s=0.5, prefill_token_s=0.01, max_running=64)
    of = cluster(decoding=speed)
    asked = prompts(answers=4, prompt_tokens=Constant(10.0), answer_tokens=Constant(3.0))
    simulation = play(synchronous_rl(batch=2), of, asked, versions=3)
    generated_s = 0.5 + 8 * 10 * 0.01 + 3 * 1.0
    assert steps(simulation, "wait_s") == pytest.approx([generated_s] * 3)
    assert simulation.rollouts.servers[0].prefill_s == pytest.approx(3 * (0.5 + 0.8))


def test_a_prompt_is_computed_once_where_answers_share_it() -> None:
    speed = MeasuredSpeed(overhead_s=1.0, prefill_call_s=0.5, prefill_token_s=0.01, shared_prompts=True, max_running=64)
    asked = prompts(answers=4, prompt_tokens=Constant(10.0), answer_tokens=Constant(3.0))
    simulation = play(synchronous_rl(batch=2), cluster(decoding=speed), asked, versions=1)
    assert steps(simulation, "wait_s") == pytest.approx([0.5 + 2 * 10 * 0.01 + 3 * 1.0])


def test_what_ends_in_one_iteration_is_followed_in_one_call() -> None:
    """Six answers of 3 tokens, three at a time: two calls of prefill, however many begin in each."""
    speed = MeasuredSpeed(overhead_s=1.0, prefill_call_s=0.5, max_running=3)
    asked = prompts(answers=6, prompt_tokens=Constant(10.0), answer_tokens=Constant(3.0))
    simulation = play(synchronous_rl(batch=1), cluster(decoding=speed), asked, versions=1)
    assert steps(simulation, "wait_s") == pytest.approx([2 * (0.5 + 3.0)])


def test_sequences_begin_between_iterations_and_nothing_is_lost() -> None:
    """New weights come in the middle of iterations of 1 s; what begins then waits for the next one."""
    speed = MeasuredSpeed(overhead_s=1.0, max_running=64)
    of = cluster(decoding=speed, train_s=0.25, weights=Weights(transfer=False, load_s=0.35, order="each", kv="keep"))
    asked = prompts(answers=2, prompt_tokens=Constant(0.0), answer_tokens=Values((3.0, 5.0, 4.0, 2.0, 6.0, 7.0)))
    simulation = play(areal(batch=1, eta=1), of, asked, versions=30)
    server = simulation.rollouts.servers[0]
    assert server.decoding_s == pytest.approx(server.clock, abs=1.0)
    columns = simulation.answers.columns(simulation.rollouts.servers)
    ended = ~np.isnan(columns["end_s"])
    goals = [(3, 5), (4, 2), (6, 7)]
    for lease, answer, tokens in zip(
        *(columns[name][ended] for name in ("lease", "answer", "generated_tokens")), strict=True
    ):
        assert tokens == goals[lease % 3][answer]
    assert all(abs(running.end_clock - round(running.end_clock)) < 1e-6 for running in server.ends)
    resident = sum(running.context + server.tokens_of(running) for running in server.ends)
    assert server.context == pytest.approx(resident, abs=len(server.ends))


# -- latencies and weights -----------------------------------------------------------------------------------------


@given(seconds, seconds, seconds, seconds)
@settings(max_examples=25, deadline=None)
def test_a_synchronous_step_is_the_sum_of_its_parts(
    latency_s: float, publish_s: float, load_s: float, reward_s: float
) -> None:
    from fedasync.simulation.cluster import Reward

    of = cluster(
        train_s=2.0,
        trainer=Trainer(step_s=2.0, latency_s=latency_s),
        weights=Weights(transfer=False, publish_s=publish_s, load_s=load_s, order="each"),
        reward=Reward(Constant(reward_s)),
        servers=3,
    )
    simulation = play(synchronous_rl(batch=4), of, prompts(0.0), versions=4)
    gaps = np.diff([0.0, *commits(simulation)])
    assert gaps[1:] == pytest.approx([publish_s + load_s + 1.0 + reward_s + latency_s + 2.0] * 3)
    assert steps(simulation, "sync_s")[1:] == pytest.approx([publish_s] * 3)
    assert steps(simulation, "train_s") == pytest.approx([2.0] * 4)
    assert steps(simulation, "wait_s")[1:] == pytest.approx([load_s + 1.0 + reward_s + latency_s] * 3)
    assert all(server.paused_s == pytest.approx(3 * load_s) for server in simulation.rollouts.servers)


def test_evaluations_hold_the_trainer_up_and_nobody_else() -> None:
    of = cluster(trainer=Trainer(step_s=1.0, evaluate_s=5.0))
    alone = play(synchronous_rl(batch=4), cluster(), prompts(0.0), versions=6)
    evaluated = play(synchronous_rl(batch=4), of, prompts(0.0), versions=6, evaluate_every=2)
    assert commits(alone) == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0, 12.0])
    # Answers take 1 s of the 5 s that the trainer evaluates.
    assert commits(evaluated) == pytest.approx([2.0, 4.0, 10.0, 12.0, 18.0, 20.0])


def one_long(way: str) -> ClusterSimulation:
    """A server generates 8 s, the other 1 s at a time; new weights each 0.5 s of training, which load in 0.25 s."""
    strategy = areal(batch=1, eta=20, limit=2, interrupt=way == "interrupt")
    of = cluster(servers=2, slots=1, train_s=0.5, weights=Weights(transfer=False, load_s=0.25, order="each", kv="keep"))
    return play(strategy, of, prompts(answer_tokens=Values((8000.0,) + (1000.0,) * 30)), versions=12)


def test_each_server_loads_by_itself() -> None:
    drained, interrupted = one_long("continue"), one_long("interrupt")
    columns = drained.answers.columns(drained.rollouts.servers)
    assert (columns["segments"] == 1).all()  # nothing is interrupted
    assert columns["end_s"][0] == 8.0  # the long one never stood still
    assert drained.rollouts.servers[1].paused_s > 0
    first = interrupted.answers.columns(interrupted.rollouts.servers)
    assert first["segments"][0] > 2
    assert interrupted.rollouts.servers[0].version == interrupted.rollouts.servers[1].version


def test_a_version_published_while_one_is_loaded_follows_it() -> None:
    of = cluster(servers=1, slots=4, train_s=0.1, weights=Weights(transfer=False, load_s=3.0, order="each", kv="keep"))
    simulation = play(areal(batch=1, eta=9), of, prompts(0.0), versions=12)
    boundaries = [version for _, version in simulation.rollouts.servers[0].boundaries]
    assert boundaries == sorted(set(boundaries))
    assert len(boundaries) < 12  # some were never loaded


@pytest.mark.parametrize("order", ["each", "all_at_once", "one_by_one"])
def test_faults_leave_the_laws_of_a_run_whole(order: str) -> None:
    of = cluster(
        servers=3,
        slots=8,
        train_s=0.7,
        trainer=Trainer(step_s=0.7, latency_s=0.05),
        weights=Weights(transfer=False, load_s=0.4, publish_s=0.2, order=order, poll_s=Uniform(0.0, 0.3)),
        contention=Contention(servers=1.5, trainer=1.3),
    )
    faults = Faults(
        servers_down=(ServerDown(at_s=3.0, server=1, for_s=4.0), ServerDown(at_s=9.0, server=0, for_s=0.3)),
        slow_servers=(SlowServer(at_s=2.0, server=2, times=2.0, for_s=6.0),),
        trainer_crashes=(TrainerCrash(at_s=5.0, restart_s=1.0), TrainerCrash(at_s=9.1, restart_s=1.0)),
        sync_fails=SyncFails(probability=0.3, timeout_s=0.2, retry_s=0.1, most_retries=3),
    )
    from fedasync.simulation.cluster import ClusterSettings, simulate_cluster

    run = simulate_cluster(
        areal(batch=8, eta=2), of, prompts(1.0), ClusterSettings(versions=25), faults=faults, seed=3
    )  # raises where a law is broken
    assert run.summary["versions"] == 25
    assert run.summary["shares"]["trainer"]["waiting"] >= 0


# -- contention ----------------------------------------------------------------------------------------------------


def test_without_overlap_contention_costs_nothing() -> None:
    alone = play(synchronous_rl(batch=8), cluster(), prompts(1.0), versions=8)
    shared = play(synchronous_rl(batch=8), cluster(contention=Contention(3.0, 2.0)), prompts(1.0), versions=8)
    assert commits(shared) == pytest.approx(commits(alone))


def test_what_overlaps_is_slowed_by_hand() -> None:
    """Two answers at a time, a step of 4 s; in overlap servers take twice, and steps 1.5 times as long: 6 s."""
    of = cluster(train_s=4.0, slots=1, servers=2, contention=Contention(servers=2.0, trainer=1.5))
    asked = prompts(answer_tokens=Values((10_000.0, 30_000.0) + (100_000.0,) * 5))
    simulation = play(areal(batch=1, eta=9, limit=2), of, asked, versions=2)
    # Answer 0 ends at 10 s. Its step goes on until 16 s beside answer 1, which has 10 + 3 of its 30 s by then; so
    # it ends at 16 + 17 = 33 s, and its step at 39 s.
    assert commits(simulation) == pytest.approx([16.0, 39.0])
    assert steps(simulation, "train_s") == pytest.approx([6.0, 6.0])


def test_a_step_is_slowed_only_while_somebody_generates() -> None:
    """The server has 1 s to do when a step of 4 s begins: it takes 2 s, in which the step does 2 / 1.6 s."""
    of = cluster(train_s=4.0, slots=1, servers=2, contention=Contention(servers=2.0, trainer=1.6))
    asked = prompts(answer_tokens=Values((10_000.0, 11_000.0)), count=2, epochs=1)
    simulation = play(areal(batch=1, eta=9, limit=2), of, asked, versions=1)
    assert commits(simulation) == pytest.approx([12.0 + 4.0 - 2.0 / 1.6])


@given(st.lists(st.tuples(st.floats(0.01, 2), st.floats(1, 3)), max_size=5), st.floats(0.1, 10))
def test_shared_work_is_done_once(changes: list[tuple[float, float]], work_s: float) -> None:
    work, now, done = SharedWork(work_s, 0.0, 1.0), 0.0, 0.0
    for after_s, times in changes:
        if now + after_s >= work.ends_s:
            break
        done += after_s / work.times
        now += after_s
        work.change(now, times)
    assert done + (work.ends_s - now) / work.times == pytest.approx(work_s)


def test_contention_is_refused_where_it_says_nothing() -> None:
    with pytest.raises(ValueError, match="contention: says nothing on a colocated cluster"):
        Cluster(2, 2, colocated=True, decoding=FixedSpeed(1.0), contention=Contention(servers=2.0))
    with pytest.raises(ValueError, match=r"contention: servers must be a finite number ≥ 1, got 0\.5"):
        Contention(servers=0.5)
