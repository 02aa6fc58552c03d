"""Answers whose lengths a policy decides, with a policy that a table stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import EventLog, EveryN, Strategy
from fedasync.core.measured_publication import Kl
from fedasync.rl.engine import Request
from fedasync.rl.episodes import Start
from fedasync.rl.partial_groups import AllowShort, Refill, RequireFull
from fedasync.rl.trajectory import Trajectory
from fedasync.simulation.cluster import Cluster, ClusterSettings, Faults, Prompts, ServerDown, SlowSync, TrainerCrash
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.learning import cut
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Uniform, Values
from fedasync.strategies.rollouts import areal, synchronous_rl

from .faulty import SYSTEMS, WAYS, system
from .ideal import cluster
from .scripted import Scripted, by_number, learn

COLUMNS = ("generated_tokens", "first_version", "last_version", "segments", "mean_version")


def small(**knobs: Any) -> Cluster:
    """Two servers of eight sequences, 1,000 tokens a second."""
    load_s, order, poll_s = knobs.pop("load_s", 0.003), knobs.pop("order", "all_at_once"), knobs.pop("poll_s", 0.0)
    weights = Weights(transfer=False, load_s=load_s, order=order, poll_s=poll_s)
    return cluster(**{"servers": 2, "slots": 8, "train_s": 0.01, "weights": weights, **knobs})


def told(trajectory: Trajectory) -> tuple[Any, ...]:
    """What the table of rollouts says of an answer with these tokens."""
    versions = trajectory.versions[trajectory.generated]
    return len(versions), versions.min(), versions.max(), trajectory.segments, pytest.approx(versions.mean())


def check_tables(simulation: ClusterSimulation, learning: Scripted) -> None:
    """The table of rollouts and what was trained tell of the same tokens, and nothing is trained that is too new."""
    simulation.answers.correct, correct = None, simulation.answers.correct
    by_clock = simulation.answers.columns(simulation.rollouts.servers)
    simulation.answers.correct = correct
    columns = simulation.answers.columns(simulation.rollouts.servers)
    assert (columns["first_version"] >= by_clock["first_version"]).all()  # later by a part of a token at most
    assert (columns["last_version"] <= by_clock["last_version"]).all()
    row_of = {
        (int(lease), int(answer)): row
        for row, (lease, answer) in enumerate(zip(columns["lease"], columns["answer"], strict=True))
    }
    assert len(learning.batches) == simulation.coordinator.version
    for version, batch in enumerate(learning.batches):
        for group in batch:
            assert group.base_version <= version
            full = len(group.trajectories) == group.asked
            for index, trajectory in enumerate(group.trajectories if full else ()):
                row = row_of[group.lease, index]
                assert tuple(columns[name][row] for name in COLUMNS) == told(trajectory)
                assert columns["prompt"][row] == group.prompt
                assert trajectory.last_version is not None
                assert trajectory.last_version <= version


# -- the same clock --------------------------------------------------------------------------------------------

LENGTHS = tuple(float(5 + 37 * at % 53) for at in range(60))


def timing_only(strategy: Strategy, of: Cluster, prompts: Prompts, versions: int) -> EventLog:
    simulation = ClusterSimulation(strategy, of, prompts, ClusterSettings(versions=versions), Faults(), 0, EventLog())
    simulation.run()
    return simulation.log


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_policy_whose_answers_are_as_long_under_every_version_changes_no_event(name: str, way: Any) -> None:
    """Byte for byte the log of a simulation that is told the lengths."""
    of = small(decoding=FixedSpeed(1000.0, max_running=8, prefill_tokens_per_second=3000.0))
    asked = Prompts(answers=2, prompt_tokens=Constant(7.0), answer_tokens=Values(LENGTHS))
    alike = Scripted(lambda _, prompt, index: int(LENGTHS[(2 * prompt + index) % len(LENGTHS)]), prompt=7)
    log = timing_only(system(name, way), of, asked, versions=12)
    learnt = learn(system(name, way), of, alike, versions=12)
    assert list(log.rows()) == list(learnt.log.rows())
    check_tables(learnt, alike)


# -- by hand ---------------------------------------------------------------------------------------------------


def test_new_weights_continue_what_runs_from_the_whole_tokens_that_it_has() -> None:
    """Prompt 0 would take 50 tokens; prompt 1 ends at 10 ms and is version 1 at 20.5 ms, and prompt 0 goes on from 20.

    Under version 1 it ends with 24 tokens, 3 ms of loading later: at 27 ms.
    """
    lengths = {(0, 0): 50, (1, 0): 24, (0, 1): 10}
    learning = Scripted(lambda version, prompt, _: lengths.get((version, prompt), 1000), answers=1)
    strategy = areal(batch=1, eta=1, limit=2)
    simulation = learn(strategy, small(servers=1, train_s=0.0105), learning, versions=2)
    first = learning.batches[1][0].trajectories[0]
    assert first.versions.tolist() == [0] * 20 + [1] * 4
    assert first.tokens.tolist() == list(range(20)) + [1000 + t for t in range(20, 24)]
    columns = simulation.answers.columns(simulation.rollouts.servers)
    assert columns["end_s"][0] == pytest.approx(0.027)
    check_tables(simulation, learning)


def test_an_answer_with_all_its_tokens_stays_as_it_is_and_a_waiting_one_is_generated_anew() -> None:
    """One slot: answer 1 of each group waits, and is wholly of the version under which it starts."""
    learning = Scripted(by_number(), answers=2)
    simulation = learn(areal(batch=2, eta=3), small(slots=1), learning)
    columns = simulation.answers.columns(simulation.rollouts.servers)
    ended = ~np.isnan(columns["end_s"])
    assert (columns["first_version"] > columns["base_version"])[ended].any()
    check_tables(simulation, learning)


@pytest.mark.parametrize("order", ["all_at_once", "one_by_one"])
def test_a_load_is_one_call_a_version(order: str) -> None:
    learning = Scripted(by_number(200, 300), answers=4)
    of = small(slots=64, order=order, load_s=0.0)
    simulation = learn(areal(batch=4, eta=2), of, learning, versions=10)
    loads = 1 if order == "all_at_once" else 3  # one by one: a server, the other, and the groups that then start
    assert len(learning.calls) <= 1 + loads * simulation.coordinator.version
    check_tables(simulation, learning)


def test_where_groups_start_one_by_one_as_many_are_generated_ahead_as_started_under_the_version_before() -> None:
    learning = Scripted(by_number(20, 60), answers=4)
    simulation = learn(areal(batch=8, eta=2, limit=8), small(slots=64), learning, versions=40)
    groups = simulation.coordinator.ledger.admitted
    assert groups > 300
    assert len(learning.calls) < 3 * 40
    check_tables(simulation, learning)


def test_generating_ahead_changes_nothing_but_the_number_of_calls() -> None:
    logs, calls = [], []
    for ahead in (True, False):
        learning = Scripted(by_number(20, 60), answers=4)
        strategy, of = areal(batch=8, eta=2, limit=8), small(slots=8)
        simulation = ClusterSimulation(
            strategy, of, Prompts(answers=4), ClusterSettings(versions=30), Faults(), 0, EventLog(), learning
        )
        if not ahead:
            simulation.learnt._upcoming = lambda _: ()  # type: ignore[union-attr]
            simulation.learnt._how_many = lambda: 0  # type: ignore[union-attr, method-assign]
        simulation.run()
        logs.append(list(simulation.log.rows()))
        calls.append(len(learning.calls))
    assert logs[0] == logs[1]
    assert calls[0] < calls[1] / 4


def test_weights_are_kept_as_long_as_a_server_has_them() -> None:
    together, in_turn = Scripted(by_number()), Scripted(by_number())
    learn(areal(batch=4, eta=4), small(), together, versions=30)
    learn(areal(batch=4, eta=4), small(order="one_by_one", servers=3), in_turn, versions=30)
    assert together.most_kept == 2
    assert 2 <= in_turn.most_kept <= 4
    assert len(together.kept) <= 2
    assert len(in_turn.kept) <= 4


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_groups_that_were_trained_or_dropped(way: Any) -> None:
    strategy = areal(batch=4, eta=4, max_staleness=1, publication=EveryN(1, way))
    learning = Scripted(by_number(5, 200))
    simulation = learn(strategy, small(), learning, versions=40)
    learnt = simulation.learnt
    assert learnt is not None
    in_flight = {lease.id for lease in simulation.coordinator.leases}
    assert {answer // 2 for answer in learnt._made} <= in_flight
    assert set(learnt._epochs) <= in_flight
    assert len(learnt._groups) <= simulation.coordinator.waiting
    ledger = simulation.coordinator.ledger
    assert (ledger.cancelled if way == "abort" else ledger.rejected).total() > 0


def test_weights_that_are_still_on_their_way_to_a_slow_server_are_kept() -> None:
    """Loading version 2 takes 20 times as long, and who learns late of it loads the next one meanwhile."""
    learning = Scripted(by_number())
    of = small(servers=4, order="each", poll_s=Uniform(0.0, 0.05), load_s=0.01)
    faults = Faults(slow_syncs=(SlowSync(2, 2, 20.0),))
    simulation = learn(areal(batch=4, eta=4), of, learning, faults=faults, versions=30)
    assert simulation.ended == "versions"
    check_tables(simulation, learning)


# -- whatever goes wrong ---------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(SYSTEMS)),
    way=st.sampled_from(WAYS),
    order=st.sampled_from(["all_at_once", "one_by_one", "each"]),
    poll_s=st.sampled_from([0.0, Uniform(0.0, 0.03)]),
    capacity=st.sampled_from([None, 150.0]),
    partial=st.sampled_from([Refill(), RequireFull(), AllowShort(1)]),
    failing=st.sampled_from([0.0, 0.1]),
    prompt=st.integers(0, 3),
    down_s=st.floats(0.0, 0.3),
)
@settings(deadline=None, max_examples=60)
def test_tables_and_trained_tokens_agree_whatever_happens(
    name: str,
    way: Any,
    order: str,
    poll_s: Any,
    capacity: float | None,
    partial: Any,
    failing: float,
    prompt: int,
    down_s: float,
) -> None:
    """Full caches, dead servers, lost answers, weights in any order, prefills that end in the middle of a token."""
    decoding = FixedSpeed(
        1000.0, max_running=4, capacity_tokens=capacity, prefill_tokens_per_second=7000.0 if prompt else None
    )
    of = small(decoding=decoding, order=order, poll_s=poll_s, partial_groups=partial)
    learning = Scripted(by_number(), prompt=prompt)
    faults = Faults(servers_down=(ServerDown(0, down_s, 0.05),), answer_failure_probability=failing)
    simulation = learn(system(name, way), of, learning, faults=faults, versions=8)
    assert simulation.ended == "versions"
    check_tables(simulation, learning)


def test_a_restarted_answer_is_the_same_under_the_same_version() -> None:
    learning = Scripted(by_number(), answers=2)
    down = Faults(servers_down=(ServerDown(0, 0.004, 0.001),))
    simulation = learn(synchronous_rl(batch=4), small(), learning, faults=down, versions=4)
    plain = Scripted(by_number(), answers=2)
    learn(synchronous_rl(batch=4), small(), plain, versions=4)
    assert simulation.answers.tries(0)
    for batch, other in zip(learning.batches, plain.batches, strict=True):
        by_lease, others = ({group.lease: group.trajectories for group in each} for each in (batch, other))
        assert by_lease == others


@pytest.mark.parametrize("partial", [Refill(), RequireFull(), AllowShort(2)])
def test_a_prompt_whose_environment_always_fails_is_given_up_with_the_reason_in_the_log(partial: Any) -> None:
    learning = Scripted(by_number(), failing={3, 5})
    of = small(partial_groups=partial, most_attempts=2)
    simulation = learn(areal(batch=4, eta=1), of, learning, versions=6)
    assert simulation.ended == "versions"
    assert "environment raised TypeError" in simulation.log.reasons
    assert simulation.coordinator.ledger.failed.total() == 4  # two prompts, twice each
    assert sum("is given up after 2 attempts" in each.what for each in simulation.incidents) == 2
    assert not {group.prompt for batch in learning.batches for group in batch} & {3, 5}
    check_tables(simulation, learning)


def test_a_run_in_which_every_answer_fails_ends() -> None:
    simulation = learn(areal(batch=4, eta=1), small(), Scripted(by_number(), failing=range(10**6)), versions=6)
    assert simulation.ended.startswith("nothing accepted")


# -- what is learnt --------------------------------------------------------------------------------------------


def test_a_step_trains_its_groups_in_order_once_even_where_the_trainer_crashes() -> None:
    crashes = tuple(TrainerCrash(at_s, 0.01) for at_s in (0.055, 0.1, 0.2))
    learning = Scripted(by_number())
    simulation = learn(areal(batch=4, eta=2), small(), learning, faults=Faults(trainer_crashes=crashes))
    trained = [group.lease for batch in learning.batches for group in batch]
    assert len(trained) == len(set(trained)) == 80
    bases = [[group.base_version for group in batch] for batch in learning.batches]
    assert all(each == sorted(each) for each in bases)  # oldest first
    check_tables(simulation, learning)


def test_a_publication_rule_measures_the_policy_itself() -> None:
    learning = Scripted(by_number())
    strategy = areal(batch=4, eta=None, limit=8, publication=Kl(above=2.5))
    simulation = learn(strategy, small(), learning, versions=12)
    assert simulation.coordinator.publications == 4  # it has moved by 3 at versions 3, 6, 9, 12


def test_metrics_of_a_step_have_what_was_learnt_and_evaluated() -> None:
    simulation = learn(areal(batch=4, eta=2), small(), Scripted(by_number()), versions=4, evaluate_every=2)
    table = simulation.trainer.times.table()
    losses = table.filter(table["name"] == "loss")
    assert losses["value"].to_list() == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert table.filter(table["name"] == "exact")["version"].to_list() == [2, 4]


def test_a_short_group_is_trained_without_the_answers_that_were_lost() -> None:
    of = small(partial_groups=AllowShort(1))
    learning = Scripted(by_number(), answers=4)
    learn(areal(batch=4, eta=2), of, learning, faults=Faults(answer_failure_probability=0.2))
    sizes = {len(group.trajectories) for batch in learning.batches for group in batch}
    assert len(sizes) > 1
    assert max(sizes) == 4


def test_a_cut_is_the_prompt_and_the_first_tokens() -> None:
    learning = Scripted(lambda *_: 9, prompt=3)
    whole = learning.generate(0, [Start(Request(0, 0, 0, 0))])[0].trajectory
    assert whole is not None
    part = cut(whole, 4)
    assert (len(part), part.prompt_tokens, part.generated_tokens) == (7, 3, 4)
    assert part.tokens.tolist() == whole.tokens[:7].tolist()
