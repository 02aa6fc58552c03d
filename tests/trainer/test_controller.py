"""The controller among workers and a trainer on a virtual clock: laws, deaths at any moment, resumption, watchdog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import EveryN, Kl
from fedasync.rl.partial_groups import AllowShort, Refill, RequireFull
from fedasync.runs.run import Run
from fedasync.strategies.rollouts import areal, nemo_rl, one_step_overlap, synchronous_rl
from fedasync.trainer.attendance import LostProcessError, TrainerFailedError
from fedasync.trainer.controller import Controller
from fedasync.trainer.link import EOF
from fedasync.trainer.messages import Message
from fedasync.trainer.run import TrainerRequest, finished_run
from fedasync.trainer.run_state import RunState
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings

from .world import Ended, KilledError, World, controller


def finished(made: Controller, state: RunState, ended: str, prompts: int | None, epochs: int | None) -> Run:
    """The run with its verdicts, which raise where they do not hold."""
    asked = PromptSettings(made.driver.answers, epochs)
    request = TrainerRequest(made.strategy, {}, prompts, asked, ProcessSettings(), RunSettings(versions=1))
    return finished_run(request, made, state, ended)


def play(world: World, folder: Path, strategy: Any, **more: Any) -> Run:
    """A run from its start, or from where it was, to its end."""
    with RunState(folder) as state:
        made = controller(world, state, strategy, **more)
        ended = made.make(folder / "policy")
        return finished(made, state, ended, more.get("prompts"), more.get("epochs"))


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_a_run_keeps_its_laws_and_its_versions(tmp_path: Path, eta: int) -> None:
    world = World(workers=2, answer_s=lambda request, version: 0.3 + 0.4 * (request.answer % 5))
    run = play(world, tmp_path, areal(batch=3, eta=eta), versions=20, evaluate_every=5)
    assert run.summary["versions"] == 20
    assert run.summary["staleness"]["mean"] <= eta
    assert len(world.trained) == 60
    assert {"worker-0", "worker-1", "rank-0"} == world.stopped
    table = run.metrics
    assert table.filter(table["name"] == "exact")["version"].to_list() == [5, 10, 15, 20]
    parts = ("train_s", "wait_s", "sync_s", "evaluate_s", "save_s", "down_s", "lost_s")
    for version in (1, 7, 20):
        rows = dict(table.filter(table["version"] == version).select("name", "value").iter_rows())
        assert sum(rows[name] for name in parts) == pytest.approx(rows["step_s"])


def test_at_eta_0_batches_are_those_of_the_order_whoever_is_slow(tmp_path: Path) -> None:
    slow = World(workers=3, answer_s=lambda request, version: float(1 + request.answer * 7 % 11))
    even = World(workers=1)
    play(slow, tmp_path / "slow", areal(batch=4, eta=0), versions=8, prompts=16)
    play(even, tmp_path / "even", synchronous_rl(batch=4), versions=8, prompts=16)
    assert [sorted(batch) for batch in slow.batches] == [sorted(batch) for batch in even.batches]


def test_generation_overlaps_training_from_eta_1_on(tmp_path: Path) -> None:
    """A batch takes 1 s and a step 1 s: synchronous steps take 2 s, overlapped ones 1 s."""
    steps = {}
    for eta in (0, 1):
        world = World(answer_s=lambda request, version: 1.0, train_s=1.0)
        run = play(world, tmp_path / str(eta), areal(batch=2, eta=eta), versions=30, checkpoint_every=None)
        steps[eta] = run.summary["rollouts"]["throughput"]["step_s"]["p50"]
    assert steps[0] == pytest.approx(2.01, abs=0.02)
    assert steps[1] == pytest.approx(1.01, abs=0.02)


def test_workers_get_the_weights_before_they_are_asked_for_more(tmp_path: Path) -> None:
    world = World(workers=2)
    run = play(world, tmp_path, areal(batch=2, eta=0), versions=6)
    assert run.rollouts is not None
    done = run.rollouts.filter(run.rollouts["end_s"].is_not_null())
    assert (done["first_version"] == done["base_version"]).all()


# -- exactly once ----------------------------------------------------------------------------------------------


def until_done(folder: Path, strategy: Any, kills: list[int], **more: Any) -> tuple[World, Run]:
    """The whole run is killed at these moments, one life after the other, and lives to its end after the last."""
    for kill_at in [*kills, None]:
        world = World(workers=2, answer_s=lambda request, version: 0.5 + request.index, kill_at=kill_at)
        try:
            return world, play(world, folder, strategy, **more)
        except KilledError:
            continue
    raise AssertionError("the last life has no end")


@given(
    kills=st.lists(st.integers(1, 120), max_size=4),
    eta=st.sampled_from([0, 1, 3]),
    every=st.sampled_from([1, 2, 3]),
)
@settings(deadline=None, max_examples=40)
def test_killed_at_any_moment_every_prompt_is_trained_once_an_epoch(
    kills: list[int], eta: int, every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    more = {"prompts": 6, "epochs": 2, "versions": 6, "checkpoint_every": every}
    world, run = until_done(folder, areal(batch=2, eta=eta), kills, **more)
    assert sorted(world.trained) == sorted([prompt, epoch] for prompt in range(6) for epoch in range(2))
    assert run.summary["versions"] == 6
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])
    if eta == 0:  # and the weights are those of a run that nobody disturbed
        undisturbed, _ = until_done(folder / "undisturbed", areal(batch=2, eta=eta), [], **more)
        assert world.trained == undisturbed.trained


@given(
    death=st.tuples(st.sampled_from(["rank-0", "worker-0", "worker-1"]), st.integers(1, 25)),
    eta=st.sampled_from([0, 2]),
    policy=st.sampled_from([Refill(), RequireFull()]),
)
@settings(deadline=None, max_examples=40)
def test_a_child_that_dies_at_any_moment_loses_no_prompt(
    death: tuple[str, int], eta: int, policy: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    world = World(
        workers=2, answer_s=lambda request, version: 0.5 + request.index, accident=lambda name, n: (name, n) == death
    )
    processes = ProcessSettings(workers=2, partial_groups=policy)
    strategy = areal(batch=2, eta=eta)
    run = play(world, folder, strategy, prompts=6, epochs=2, versions=6, processes=processes)
    assert sorted(world.trained) == sorted([prompt, epoch] for prompt in range(6) for epoch in range(2))
    assert world.restarted == ([death[0]] if run.summary["restarts"] else [])


ROWS = {
    "in order": nemo_rl(batch=2, sampler="in_order"),
    "waits at the bound": areal(batch=2, eta=3, max_staleness=3, at_bound="wait"),
    "publishes every third": areal(batch=2, eta=2, publication=EveryN(3)),
    "time-outs": areal(batch=2, eta=1, lease_timeout_s=2.6),
    "overlap": one_step_overlap(batch=2),
}


@given(
    kills=st.lists(st.integers(1, 160), min_size=1, max_size=3),
    death=st.tuples(st.sampled_from(["rank-0", "worker-0", "nobody"]), st.integers(1, 30)),
    row=st.sampled_from(sorted(ROWS)),
)
@settings(deadline=None, max_examples=60)
def test_every_row_survives_every_death_with_each_prompt_once_and_each_evaluation(
    kills: list[int], death: tuple[str, int], row: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    more = {"prompts": 6, "epochs": 2, "versions": 6, "checkpoint_every": 2, "evaluate_every": 2}
    for kill_at in [*kills, None]:
        world = World(
            workers=2,
            answer_s=lambda request, version: 0.5 + request.index + 0.3 * (request.prompt % 3),
            accident=lambda name, n: (name, n) == death,
            kill_at=kill_at,
        )
        try:
            run = play(world, folder, ROWS[row], **more)
        except KilledError:
            continue
        break
    trained = sorted(map(tuple, world.trained))
    assert len(trained) == len(set(trained)) == 12
    table = run.metrics
    assert table.filter(table["name"] == "exact")["version"].to_list() == [2, 4, 6]


def test_a_trainer_that_dies_costs_its_time_and_the_clock_goes_on(tmp_path: Path) -> None:
    world = World(accident=lambda name, n: (name, n) == ("rank-0", 14))
    run = play(world, tmp_path, areal(batch=2, eta=0), versions=6, checkpoint_every=2)
    lost = run.metrics.filter(run.metrics["name"].is_in(["lost_s", "down_s"]))["value"].sum()
    assert lost > 0.4  # the trainer alone needs half a second to come back
    steps = run.metrics.filter(run.metrics["name"] == "step_s")["value"]
    assert steps.sum() == pytest.approx(run.metrics["time_s"].max())
    assert [each["time_s"] for each in run.summary["incidents"]] == sorted(
        each["time_s"] for each in run.summary["incidents"]
    )


def test_an_answer_that_comes_just_after_its_time_fails_its_group_and_nothing_else(tmp_path: Path) -> None:
    """The loop is busy when the deadline passes: both the answer and the time limit are seen at once."""
    world = World(answer_s=lambda request, version: 1.0 if request.prompt != 2 else 2.01)
    poll = world.poll
    world.poll = lambda timeout_s: poll(max(timeout_s, 0.2))  # type: ignore[method-assign]
    strategy = areal(batch=2, eta=0, lease_timeout_s=2.0)
    run = play(world, tmp_path, strategy, prompts=5, epochs=1, versions=2)
    assert run.summary["ledger"]["failed"].get("timeout", 0) >= 1


def test_groups_that_fail_leave_nothing_behind(tmp_path: Path) -> None:
    world = World(answer_s=lambda request, version: 9.0 if request.index == 1 and request.prompt % 2 else 0.5)
    with RunState(tmp_path) as state:
        made = controller(world, state, areal(batch=2, eta=1, lease_timeout_s=2.0), versions=20)
        made.run()
        groups = made.session.groups
        kept = (groups._came, groups.leases, made.driver.asked, groups.waiting)
        assert all(len(each) <= 8 for each in kept)


def test_a_hung_trainer_is_told_of_by_the_watchdog_and_nobody_waits_for_it_to_save(tmp_path: Path) -> None:
    world = World()
    with RunState(tmp_path) as state:
        made = controller(world, state, areal(batch=2, eta=0), versions=50, watchdog_s=30.0)
        receive = world.train_s
        world.train_s = 1e9
        began_s = world.now
        ended = made.make(tmp_path / "policy")
    assert receive == 1.0
    assert ended.startswith("stalled: no new version for 30 s: ")
    assert "the trainer makes version 1" in ended
    assert world.now - began_s < 60


def test_a_rank_that_is_killed_takes_the_run_back_and_one_that_raises_ends_it(tmp_path: Path) -> None:
    """Rank 0 says that its connection was closed; who ended tells why."""
    for status, goes_on in ((-9, True), (1, False)):
        world = World()
        with RunState(tmp_path / str(status)) as state:
            made = controller(world, state, areal(batch=2, eta=0), versions=6)
            link = _link_of(world, "trainer")
            world.later(3.2, link, Message("failed", {"what": "RuntimeError: connection closed", "fatal": True}))
            world.later(3.3, link, EOF)
            said: list[bool] = []

            def ended(world: World = world, status: int = status, said: list[bool] = said) -> list[Ended]:
                if world.now < 1003.35 or said:
                    return []
                said.append(True)
                return [
                    Ended("rank-0", "rank-0 ended with status 1", 1),
                    Ended("rank-1", "rank-1 ended: ValueError", status),
                ]

            world.ended = ended  # type: ignore[method-assign, assignment]
            if goes_on:
                assert made.run() == "versions"
                assert world.restarted == ["rank-0"]
            else:
                with pytest.raises(TrainerFailedError, match=r"rank-1 ended: ValueError"):
                    made.run()


def test_a_checkpoint_keeps_what_waits_for_the_trainer(tmp_path: Path) -> None:
    """Groups that were delivered are not generated again."""
    asked: list[int] = []

    def answer_s(request: Any, version: int) -> float:
        asked.append(request.prompt)
        return 0.1

    world = World(answer_s=answer_s, train_s=30.0, kill_at=400)
    with RunState(tmp_path) as state, pytest.raises(KilledError):
        controller(world, state, areal(batch=2, eta=3), prompts=50, versions=9).run()
    with RunState(tmp_path) as state:
        found = state.newest()
        assert found is not None
        waiting = {group.prompt for group in found.groups.values()}
    assert len(waiting) >= 4
    asked.clear()
    play(World(answer_s=answer_s, train_s=30.0), tmp_path, areal(batch=2, eta=3), prompts=50, versions=9)
    assert not waiting & set(asked)


# -- what goes wrong -------------------------------------------------------------------------------------------


def test_a_prompt_whose_environment_always_raises_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    world = World(fails=lambda request, n: "environment raised ValueError: no" if request.prompt == 3 else None)
    run = play(world, tmp_path, areal(batch=2, eta=1), prompts=7, epochs=1, versions=4)
    assert [3, 0] not in world.trained
    assert run.summary["failures"] == {"environment raised ValueError": 3}  # one answer of each attempt
    assert any("prompt 3 is given up after 3 attempts" in each["what"] for each in run.summary["incidents"])


def test_an_answer_that_is_lost_is_generated_again_and_the_seven_others_are_not(tmp_path: Path) -> None:
    world = World(fails=lambda request, n: "engine: connection reset" if (request.index, n) == (5, 1) else None)
    run = play(world, tmp_path, areal(batch=2, eta=0), prompts=4, versions=2, answers=8)
    assert run.summary["failures"] == {"engine": 4}
    assert run.summary["ledger"]["failed"] == {}


def test_a_group_may_be_short(tmp_path: Path) -> None:
    world = World(fails=lambda request, n: "engine: lost" if request.index == 1 else None)
    processes = ProcessSettings(partial_groups=AllowShort(least=2))
    run = play(world, tmp_path, areal(batch=2, eta=0), prompts=4, versions=2, answers=3, processes=processes)
    assert run.summary["ledger"]["consumed"] == 4
    assert run.rollouts is not None
    assert run.rollouts["end_s"].null_count() == 4


def test_a_prompt_that_is_too_long_is_not_asked_again(tmp_path: Path) -> None:
    world = World(fails=lambda request, n: "prompt too long: 99 tokens" if request.prompt == 0 else None)
    run = play(world, tmp_path, areal(batch=1, eta=0), prompts=3, epochs=1, versions=3)
    assert run.summary["ledger"]["failed"] == {"prompt too long": 1}


def test_data_that_end_end_the_run(tmp_path: Path) -> None:
    run = play(World(), tmp_path, areal(batch=4, eta=1), prompts=6, epochs=1, versions=5)
    assert run.summary["ended"].startswith("data exhausted")
    assert run.summary["versions"] == 1


def test_workers_are_told_to_stop_also_where_the_trainer_is_not_there_any_more(tmp_path: Path) -> None:
    world = World(workers=2)
    with RunState(tmp_path) as state:
        made = controller(world, state, areal(batch=2, eta=0), versions=3, prompts=8)
        assert made.run() == "versions"
        made.attendance.trainer = None
        assert made.make(tmp_path / "policy") == "versions"
    assert {"worker-0", "worker-1"} <= world.stopped


@pytest.mark.parametrize("name", ["rank-0", "worker-0"])
def test_the_watchdog_says_who_waits_for_whom(tmp_path: Path, name: str) -> None:
    world = World(silent={name})
    processes = ProcessSettings(silent_s=10_000.0)
    run = play_until_stalled(world, tmp_path, processes)
    assert run.startswith("stalled: ")
    assert ("publishes" if name == "rank-0" else "1 in flight") in run or "waits" in run or "not begun" in run


def play_until_stalled(world: World, folder: Path, processes: ProcessSettings) -> str:
    with RunState(folder) as state:
        return controller(
            world, state, areal(batch=1, eta=0), versions=3, watchdog_s=30.0, processes=processes, prompts=9
        ).run()


def test_a_worker_that_says_nothing_is_killed_and_comes_back(tmp_path: Path) -> None:
    world = World(workers=2)
    world.silent.add("worker-1")
    processes = ProcessSettings(workers=2, silent_s=20.0)
    with RunState(tmp_path) as state:
        made = controller(world, state, areal(batch=2, eta=0), versions=3, processes=processes, prompts=8)
        killed = world.kill

        def kill(name: str) -> None:
            link = made.crew.workers[int(name[-1])].link
            assert link is not None
            killed(name)
            link.die()  # type: ignore[attr-defined]

        world.kill = kill  # type: ignore[method-assign]
        for worker in made.crew.workers:
            worker.heard_s = world.now
        assert made.run() == "versions"
    assert world.restarted[0] in ("worker-0", "worker-1")


def test_processes_that_die_too_often_end_the_run(tmp_path: Path) -> None:
    world = World(accident=lambda name, n: name == "worker-0" and n % 2 == 0)
    processes = ProcessSettings(restarts=2)
    with RunState(tmp_path) as state, pytest.raises(LostProcessError, match=r"started again 2 times.*in flight"):
        controller(world, state, areal(batch=2, eta=0), versions=50, processes=processes, prompts=8).run()


def test_what_a_child_says_of_its_end_ends_the_run(tmp_path: Path) -> None:
    world = World()
    with RunState(tmp_path) as state:
        made = controller(world, state, areal(batch=2, eta=0), versions=50, prompts=8)
        world.later(3.0, _link_of(world, "trainer"), Message("failed", {"what": "ValueError: no", "fatal": True}))
        with pytest.raises(TrainerFailedError, match=r"^the trainer: ValueError: no$"):
            made.run()


def _link_of(world: World, kind: str) -> Any:
    return next(link for _, _, link, told in world.events if getattr(told, "header", {}).get("kind") == kind)


def test_publication_rules_get_what_they_measure(tmp_path: Path) -> None:
    """KL is 0.5 at every version that is asked about."""
    for bound, publications in ((0.4, 6), (0.6, 0)):
        strategy = areal(batch=2, eta=None, limit=4, publication=Kl(bound))
        run = play(World(), tmp_path / str(bound), strategy, versions=6)
        assert (run.summary["publications"], run.summary["checks"]) == (publications, 6)
