"""Workers of other machines, on a virtual clock: they come, die, fall silent, are replaced, and no prompt is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.partial_groups import Refill, RequireFull
from fedasync.runs.run import Run
from fedasync.strategies.rollouts import areal
from fedasync.trainer.link import EOF
from fedasync.trainer.messages import Message
from fedasync.trainer.run_state import RunState
from fedasync.trainer.settings import ProcessSettings
from fedasync.trainer.source import fedasync_version

from .test_controller import finished
from .world import Ended, FakeLink, Train, World, controller

ALL = sorted([prompt, epoch] for prompt in range(6) for epoch in range(2))


def processes(local: int, remote: int, **more: Any) -> ProcessSettings:
    return ProcessSettings(workers=local, remote_workers=remote, listen="10.0.0.1:0", channel="distributed", **more)


class Told:
    """A run that was made, and what a person was told meanwhile."""

    def __init__(self, world: World, folder: Path, asked: ProcessSettings, eta: int = 1, **more: Any) -> None:
        self.said: list[str] = []
        more = {"prompts": 6, "epochs": 2, "versions": 6, **more}
        with RunState(folder) as state:
            made = controller(world, state, areal(batch=2, eta=eta), processes=asked, say=self.said.append, **more)
            self.ended = made.make(folder / "policy")
            self.incidents = [each.what for each in made.incidents]
            self.restarts = made.attendance.restarts
            self.run: Run = finished(made, state, self.ended, more["prompts"], more["epochs"])

    @property
    def servers(self) -> set[int]:
        """Workers of whom answers came."""
        assert self.run.rollouts is not None
        done = self.run.rollouts.filter(self.run.rollouts["end_s"].is_not_null())
        return set(done["server"])


def numbers(world: World, name: str) -> list[int]:
    return [each.header["number"] for each in world.told.get(name, []) if each.kind == "welcome"]


def test_a_run_begins_when_all_are_there_and_everybody_works(tmp_path: Path) -> None:
    world = World(workers=1)
    world.join("a", 3.0)
    world.join("b", 9.0)
    told = Told(world, tmp_path, processes(1, 2))
    assert (numbers(world, "a"), numbers(world, "b")) == ([1], [2])
    assert world.told["a"][0].header["settings"] == {"what": "to do"}
    assert told.servers == {0, 1, 2}
    assert told.run.summary["time_s"] < world.now - 1009.0
    assert {"worker-0", "a", "b"} <= world.stopped
    assert told.said == ["worker 1 (remote) has come, from a", "worker 2 (remote) has come, from b"]
    assert told.incidents == []
    assert told.run.rollouts is not None
    done = told.run.rollouts.filter(told.run.rollouts["end_s"].is_not_null())
    assert (done["end_s"] - done["start_s"]).to_list() == pytest.approx([1.0] * len(done)), "clocks differ"
    assert told.run.iterations is not None
    steps = told.run.iterations
    for server in (1, 2):  # which say what a step took as soon as they are asked for answers
        at_s = set(steps.filter(steps["server"] == server)["at_s"].round(6))
        assert at_s >= set(done.filter(done["server"] == server)["start_s"].round(6))


def test_a_hello_that_was_late_does_not_shift_what_is_told_of_answers(tmp_path: Path) -> None:
    world = World(workers=1)
    world.join("a", late_s=30.0)
    run = Told(world, tmp_path, processes(1, 1)).run
    assert run.rollouts is not None
    done = run.rollouts.filter((run.rollouts["server"] == 1) & run.rollouts["end_s"].is_not_null())
    assert len(done)
    assert (done["end_s"] - done["start_s"]).to_list() == pytest.approx([1.0] * len(done))


def test_there_may_be_no_worker_of_this_machine(tmp_path: Path) -> None:
    world = World(workers=0)
    world.join("a")
    assert Told(world, tmp_path, processes(0, 1)).servers == {0}


def test_one_that_goes_is_no_restart_and_another_takes_its_number_with_the_present_weights(tmp_path: Path) -> None:
    world = World(workers=1, answer_s=lambda request, version: 0.5 + request.index)
    first = world.join("a")
    world.later(6.0, first, Message("failed", {"what": "MemoryError: no", "fatal": True}))
    world.join("b", 9.0)
    told = Told(world, tmp_path, processes(1, 1, restarts=0), epochs=4, versions=12)
    assert len(world.trained) == len(set(map(tuple, world.trained))) == 24
    assert numbers(world, "b") == [1]
    assert (told.restarts, world.restarted) == (0, [])
    (incident,) = told.incidents
    assert incident == "worker 1 (remote) cannot go on (MemoryError: no); its answers are given to others"
    assert told.said == [
        "worker 1 (remote) has come, from a",
        incident,
        "worker 1 (remote) has come, from b",
    ]
    assert told.run.rollouts is not None
    late = told.run.rollouts.filter((told.run.rollouts["server"] == 1) & (told.run.rollouts["start_s"] > 8))
    assert len(late)
    assert late["first_version"].min() >= 1


@given(
    deaths=st.lists(st.tuples(st.sampled_from(["a", "b", "c", "worker-0", "rank-0"]), st.integers(1, 25)), max_size=4),
    comes_s=st.lists(st.floats(0.0, 12.0), min_size=2, max_size=3),
    eta=st.sampled_from([0, 2]),
    policy=st.sampled_from([Refill(), RequireFull()]),
)
@settings(deadline=None, max_examples=40)
def test_whoever_dies_and_comes_whenever_every_prompt_is_trained_once(
    deaths: list[tuple[str, int]],
    comes_s: list[float],
    eta: int,
    policy: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    world = World(
        workers=1, answer_s=lambda request, version: 0.5 + request.index, accident=lambda name, n: (name, n) in deaths
    )
    for name, at_s in zip("abc", comes_s, strict=False):
        world.join(name, at_s)
    world.join("last", 30.0)  # which does not die, should all others do so before the run begins
    told = Told(world, tmp_path_factory.mktemp("run"), processes(1, 1, partial_groups=policy, restarts=9), eta)
    assert sorted(world.trained) == ALL
    assert set(world.restarted) <= {"worker-0", "rank-0"}
    assert sum("(remote) has gone" in each for each in told.incidents) <= sum(name in "abc" for name, _ in deaths)


def test_whoever_is_too_many_waits_and_takes_the_place_of_the_first_that_goes(tmp_path: Path) -> None:
    world = World(workers=0)
    first = world.join("a")
    second = world.join("b", 1.0)
    gone = world.join("c", 2.0)
    world.join("d", 3.0)
    world.later(3.5, gone, EOF)
    world.later(4.0, first, EOF)
    world.later(5.0, second, EOF)
    told = Told(world, tmp_path, processes(0, 1))
    assert [each.kind for each in world.told["b"]] == ["wait", "welcome"]
    assert world.told["b"][0].header["why"] == "all 1 remote workers are there"
    assert [each.kind for each in world.told["c"]] == ["wait"]
    assert [each.kind for each in world.told["d"]] == ["wait", "welcome"]
    assert sorted(world.trained) == ALL
    assert sum("has gone" in each for each in told.incidents) == 2


def test_one_that_says_nothing_is_cut_off_and_its_answers_are_given_to_others(tmp_path: Path) -> None:
    world = World(workers=1, accident=lambda name, n: name == "a" and n == 3 and bool(world.silent.add("a")))
    link = world.join("a")
    killed: list[str] = []
    world.kill = killed.append  # type: ignore[method-assign]
    told = Told(world, tmp_path, processes(1, 1, silent_s=20.0))
    assert sorted(world.trained) == ALL
    assert "worker 1 (remote) has said nothing for 20 s; its answers are given to others" in told.incidents
    assert "worker-1" not in killed
    assert not link.open


def test_one_that_never_makes_its_engine_gives_its_place_to_another(tmp_path: Path) -> None:
    world = World(workers=1, silent={"b"})
    first = world.join("a")
    world.later(4.0, first, EOF)
    world.join("b", 5.0)
    world.join("d", 6.0)
    told = Told(world, tmp_path, processes(1, 1, start_timeout_s=10.0), epochs=20, versions=60)
    assert told.ended == "versions"
    assert (numbers(world, "b"), numbers(world, "d")) == ([1], [1])
    assert "worker 1 (remote) has not made its engine within 10 s" in told.incidents


def test_before_the_first_beginning_the_run_stalls_over_one_that_never_makes_its_engine(tmp_path: Path) -> None:
    world = World(workers=1, silent={"a"})
    world.join("a")
    world.join("b", 1.0)
    told = Told(world, tmp_path, processes(1, 1, start_timeout_s=40.0), watchdog_s=1e4)
    assert told.ended.startswith("stalled: the run has not begun for 40 s: ")
    assert "remote rollout worker 1 not there" in told.ended


def test_what_others_say_while_the_last_version_is_saved_is_heard_where_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(workers=1)
    first = world.join("a")
    saves, whole = [], Train.__call__

    def dies(self: Train, link: FakeLink, message: Message) -> None:
        if message.kind != "save" or not message.header["folder"].endswith("policy") or saves:
            whole(self, link, message)
            return
        saves.append(message)
        world.later(0.1, first, EOF)
        world.join("b", 0.2)
        world.later(0.5, link, EOF)
        world.dead.append(Ended("rank-0", "rank-0 ended by signal 9"))

    monkeypatch.setattr(Train, "__call__", dies)
    told = Told(world, tmp_path, processes(1, 1))
    assert told.ended == "versions"
    assert len(saves) == 1
    assert [each.kind for each in world.told["b"]] == ["welcome"]
    assert "worker 1 (remote) has gone" in told.incidents


def test_one_that_is_not_ready_when_the_run_ends_is_told_to_stop(tmp_path: Path) -> None:
    """Else it would take the run for one whose controller died, and wait for that to come back."""
    world = World(workers=1, silent={"b"})
    world.later(3.0, world.join("a"), EOF)
    world.join("b", 4.0)
    Told(world, tmp_path, processes(1, 1))
    assert numbers(world, "b") == [1]
    assert "b" in world.told_to_stop


def test_another_fedasync_is_refused_on_both_sides(tmp_path: Path) -> None:
    world = World(workers=1)
    world.join("old", version="0.0.9 (source 12345678)")
    world.join("a", 1.0)
    told = Told(world, tmp_path, processes(1, 1))
    (refused,) = world.told["old"]
    assert refused.kind == "refused"
    why = f"its fedasync is 0.0.9 (source 12345678), and the controller's is {fedasync_version()}; the same would do"
    assert refused.header["why"] == why
    assert told.said[0] == f"a worker at old is refused: {why}"
    assert told.servers == {0, 1}


def test_a_run_of_this_machine_alone_refuses_others(tmp_path: Path) -> None:
    world = World(workers=1)
    world.join("a")
    told = Told(world, tmp_path, ProcessSettings())
    assert told.ended == "versions"
    assert [each.kind for each in world.told["a"]] == ["refused"]


def test_a_trainer_that_dies_while_a_remote_worker_is_away_is_not_made_to_wait_for_it(tmp_path: Path) -> None:
    world = World(workers=1, accident=lambda name, n: (name, n) in [("a", 4), ("rank-0", 14)])
    world.join("a")
    told = Told(world, tmp_path, processes(1, 1), eta=0)
    assert sorted(world.trained) == ALL
    assert any("the trainer died" in each for each in told.incidents)


@pytest.mark.parametrize("local", [0, 1])
def test_the_watchdog_says_that_nobody_is_left(tmp_path: Path, local: int) -> None:
    world = World(workers=local, silent={"worker-0"} if local else set())
    first = world.join("a")
    world.later(4.0, first, EOF)
    told = Told(world, tmp_path, processes(local, 1, silent_s=1e6), watchdog_s=30.0)
    assert told.ended.startswith("stalled: no new version for 30 s: ")
    assert "remote rollout worker" in told.ended
    assert ("no worker is left" in told.ended) == (not local)


def test_a_run_that_has_not_begun_says_whom_it_waits_for(tmp_path: Path) -> None:
    world = World(workers=1)
    world.join("a")
    told = Told(world, tmp_path, processes(1, 3, start_timeout_s=20.0))
    assert told.ended.startswith("stalled: the run has not begun for 20 s: ")
    assert "remote rollout workers 2, 3 not there" in told.ended


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"workers": 0}, "processes: workers must be an integer ≥ 1, got 0"),
        ({"workers": -1, "remote_workers": 1}, "processes: workers must be an integer ≥ 0, got -1"),
        ({"remote_workers": 1}, 'remote_workers = 1 without listen; .* such as listen = "10.0.0.1:7777"'),
        ({"remote_workers": 1, "listen": "10.0.0.1:0"}, "channel = 'files' with remote_workers = 1: .*'distributed'"),
        ({"listen": "10.0.0.1"}, "processes: listen: got '10.0.0.1'; this machine's address as others reach it"),
        ({"listen": "0.0.0.0:7777"}, "processes: listen: got '0.0.0.0:7777'; this machine's address as others"),
        ({"weights_port": 0}, "processes: weights_port must be an integer ≥ 1, got 0"),
        ({"weights_port": 70000}, "processes: weights_port must be an integer ≤ 65535, got 70000"),
        *(
            ({"listen": f"{host}:7777"}, "this machine's address as others reach it would do")
            for host in ("000.0.0.0", "0", "[::]", "[0:0:0:0:0:0:0:0]", "*")
        ),
        (
            {"listen": "10.0.0.1:7777"},
            "listen = '10.0.0.1:7777' says nothing with remote_workers = 0; leave it out, or",
        ),
        ({"weights_port": 7777}, "weights_port = 7777 says nothing with remote_workers = 0; leave it out, or"),
        (
            {"remote_workers": 1, "channel": "distributed", "listen": "h:7777", "weights_port": 7777},
            "weights_port = 7777 is the port of listen = 'h:7777'; another would do, or leave it out",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ProcessSettings(**keys)
