"""Threads about runs that resume, or hang, held against the real runtime's controller.

The number in a test's name is that of the public thread; docs/threads.md has the table. Around the controller are
workers and a trainer on a clock of their own; tests/trainer has the same with real processes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedasync.core import Strategy
from fedasync.rl.engine import Request
from fedasync.runs.run import Run
from fedasync.strategies.rollouts import areal, synchronous_rl, trl
from fedasync.trainer.attendance import LostProcessError
from fedasync.trainer.run_state import RunState
from fedasync.trainer.settings import ProcessSettings

from ..trainer.test_controller import play
from ..trainer.world import KilledError, World, controller

EVERY_PROMPT_ONCE = [[prompt, 0] for prompt in range(8)]


def whole(folder: Path, kill_at: int | None, strategy: Strategy, **more: Any) -> tuple[World, Run, bool]:
    """A run of 8 prompts in batches of 2 that may be killed once; whether it was."""
    settings: dict[str, Any] = {"prompts": 8, "epochs": 1, "versions": 4, "answers": 1, **more}
    try:
        world = World(kill_at=kill_at, answer_s=_long_for_the_last)
        return world, play(world, folder, strategy, **settings), False
    except KilledError:
        world = World(answer_s=_long_for_the_last)
        return world, play(world, folder, strategy, **settings), True


def _long_for_the_last(request: Request, version: int) -> float:
    return 0.4 + request.prompt


def test_openrlhf_1322_a_real_run_trains_each_prompt_once_after_whatever_message_it_is_killed(tmp_path: Path) -> None:
    kill_at, killed = 1, True
    while killed:
        world, _, killed = whole(tmp_path / str(kill_at), kill_at, areal(batch=2, eta=1))
        assert sorted(world.trained) == EVERY_PROMPT_ONCE
        kill_at += 1 if kill_at < 60 else 3
    assert kill_at > 60


def test_verl_4199_pending_prompts_of_a_real_run_are_asked_again(tmp_path: Path) -> None:
    _, run, killed = whole(tmp_path, 60, areal(batch=2, eta=1))
    assert killed
    assert set(run.summary["ledger"]["failed"]) == {"the run crashed"}
    assert run.summary["ledger"]["consumed"] == 8


def test_nemo_rl_3599_the_long_answers_of_a_real_run_survive_every_restart(tmp_path: Path) -> None:
    """Six lives; the longest answers are in flight at each death."""
    for kill_at in (50, 55, 60, 65, 70):
        try:
            play(World(kill_at=kill_at, answer_s=_long_for_the_last), tmp_path, areal(batch=2, eta=1), **_eight())
        except KilledError:
            continue
    world = World(answer_s=_long_for_the_last)
    run = play(world, tmp_path, areal(batch=2, eta=1), **_eight())
    assert sorted(world.trained) == EVERY_PROMPT_ONCE
    bias = run.summary["rollouts"]["conservation"]["prompts"]
    assert bias["trained"] == 8


def _eight() -> dict[str, Any]:
    return {"prompts": 8, "epochs": 1, "versions": 4, "answers": 1}


def test_trl_7274_a_dropped_group_of_a_real_run_is_settled_and_its_prompt_no_position(tmp_path: Path) -> None:
    """Prompt 1's only answer takes so long that its group is dropped as stale, as others are; none is trained twice."""
    world = World(answer_s=lambda request, version: 9.5 if request.prompt == 1 else 0.5, train_s=0.5, workers=2)
    run = play(world, tmp_path, trl(batch=1, max_staleness=2), prompts=12, epochs=1, versions=99, answers=1)
    counted = Counter(map(tuple, world.trained))
    assert max(counted.values()) == 1
    assert run.summary["ended"].startswith("data exhausted")
    assert run.summary["ledger"]["rejected"]["stale"] + len(counted) == 12
    assert (1, 0) not in counted


@pytest.mark.parametrize("versions", [1, 2])
def test_prime_rl_2219_a_real_run_shorter_than_its_lag_ends(tmp_path: Path, versions: int) -> None:
    run = play(World(), tmp_path, areal(batch=2, eta=8), versions=versions)
    assert run.summary["ended"] == "versions"


def test_torchforge_557_a_bound_of_0_and_weights_that_take_long_are_a_synchronous_real_run(tmp_path: Path) -> None:
    batches = {}
    for name, publish_s in (("quick", 0.0), ("slow", 30.0)):
        world = World(publish_s=publish_s)
        play(world, tmp_path / name, areal(batch=2, eta=0, max_staleness=0), versions=5, prompts=10)
        batches[name] = world.batches
    assert batches["quick"] == batches["slow"]


def test_nemo_rl_3238_one_stuck_answer_of_a_real_group_costs_a_time_out(tmp_path: Path) -> None:
    world = World(answer_s=lambda request, version: 1e6 if (request.prompt, request.index) == (2, 1) else 0.5)
    strategy = synchronous_rl(batch=2, lease_timeout_s=20.0)
    run = play(world, tmp_path, strategy, prompts=6, epochs=1, versions=2)
    assert run.summary["ended"] == "versions"
    events = run.read_events(lambda log: log)
    failed = events.filter(events["kind"] == "failed")
    assert set(failed["reason"]) == {"timeout"}
    assert set(failed["worker"]) == {2}, "the stuck prompt, and no other"
    assert 1 <= len(failed) <= 3
    assert [2, 0] not in world.trained


def test_nemo_rl_3488_dead_producers_reach_whoever_waits_for_them(tmp_path: Path) -> None:
    world = World(accident=lambda name, n: name == "worker-0" and n > 1)
    with RunState(tmp_path) as state, pytest.raises(LostProcessError, match=r"worker-0 ended by signal 9.*in flight"):
        controller(world, state, areal(batch=2, eta=1), prompts=8, versions=4).run()
    assert world.now < 1100


def test_nemo_rl_2899_after_the_last_epoch_a_real_run_ends(tmp_path: Path) -> None:
    run = play(World(), tmp_path, areal(batch=3, eta=2), prompts=4, epochs=2, versions=50)
    assert run.summary["ended"].startswith("data exhausted")
    assert run.summary["versions"] == 2


def test_nemo_rl_3938_a_prompt_that_fails_always_leaves_no_hole_in_a_real_batch(tmp_path: Path) -> None:
    world = World(fails=lambda request, n: "prompt too long: 99 tokens" if request.prompt == 5 else None)
    run = play(world, tmp_path, areal(batch=2, eta=1), prompts=7, epochs=1, versions=3)
    assert run.summary["versions"] == 3
    assert all(len(batch) == 2 for batch in world.batches)


def test_skyrl_1173_a_worker_that_never_answers_is_replaced(tmp_path: Path) -> None:
    """Answers that were sent to it are generated by another."""
    world = World(workers=2, accident=lambda name, n: (name, n) == ("worker-1", 3))
    run = play(world, tmp_path, areal(batch=4, eta=0), prompts=16, epochs=1, versions=4)
    assert sorted(world.trained) == [[prompt, 0] for prompt in range(16)]
    assert run.summary["failures"]["worker died"] > 0


def test_miles_1673_an_empty_source_and_nothing_under_way_end_a_real_run(tmp_path: Path) -> None:
    run = play(World(), tmp_path, areal(batch=4, eta=0), prompts=3, epochs=1, versions=1)
    assert run.summary["ended"].startswith("data exhausted")
    assert "lacks 1 contribution" in run.summary["ended"]


def test_trl_7176_a_generation_that_fails_costs_one_generation_of_a_real_run(tmp_path: Path) -> None:
    world = World(fails=lambda request, n: "engine: 500" if (request.prompt, request.index, n) == (4, 2, 1) else None)
    run = play(world, tmp_path, areal(batch=2, eta=1), prompts=8, epochs=1, versions=4, answers=4)
    assert sorted(world.trained) == EVERY_PROMPT_ONCE
    assert (run.summary["failures"], run.summary["restarts"]) == ({"engine": 1}, 0)


def test_trl_6913_weights_that_never_come_stall_loudly(tmp_path: Path) -> None:
    world = World(publish_s=1e9)
    processes = ProcessSettings(start_timeout_s=40.0)
    with RunState(tmp_path) as state:
        ended = controller(world, state, areal(batch=2, eta=1), versions=4, processes=processes).run()
    assert ended.startswith("stalled: the run has not begun for 40 s")
    assert "the trainer publishes version 0" in ended


def test_slime_1800_a_real_run_asks_the_prompt_again_and_keeps_no_fragments(tmp_path: Path) -> None:
    """What a worker had when it died, or lost half-way, is asked again as it was; that attempt alone is trained."""

    def lost_half_way(request: Request, attempt: int) -> str | None:
        return "engine: lost after 2 tokens" if (request.prompt, request.index, attempt) == (5, 1, 1) else None

    world = World(
        workers=2,
        answer_s=lambda request, version: 1.0 + request.prompt % 3,
        accident=lambda name, n: (name, n) == ("worker-0", 5),
        fails=lost_half_way,
    )
    run = play(world, tmp_path, areal(batch=2, eta=1), prompts=8, epochs=1, versions=4, answers=2)
    attempts: dict[tuple[int, ...], int] = {}
    for attempt, request in world.asked:
        key = (request.prompt, request.epoch, request.index)
        assert attempt == attempts.get(key, 0) + 1
        attempts[key] = attempt
    again = {key for key, attempt in attempts.items() if attempt > 1}
    assert run.summary["failures"].keys() == {"worker died", "engine"}
    assert again > {(5, 0, 1)}, "and what the worker was generating when it died"
    assert len(world.answers) == 16
    for prompt, epoch, index, *tokens in world.answers:
        assert set(tokens) == {attempts[prompt, epoch, index]}, "of the last attempt, from its beginning"
    assert again == {(prompt, epoch, index) for prompt, epoch, index, *tokens in world.answers if tokens[0] > 1}
