"""Episodes of a control task side by side: each as if it were alone, with what its policy thought of each action."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.batch import answers_of
from fedasync.rl.control_engine import ControlEngine
from fedasync.rl.control_policy import ActorCritic, ControlPolicy
from fedasync.rl.engine import Request
from fedasync.rl.engines import engine_of, generate
from fedasync.rl.episodes import Start, cut
from fedasync.rl.policy import weights_of
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Trajectory, packed_trajectories

from .talking import finish, requests, trajectories
from .tiny import ACTIONS, OBSERVATION, Mlp, Walk, problem

torch.set_num_threads(1)


class Paths:
    """Where actions lead: over after 3 + n % 4 steps, or cut after 5, whichever comes first."""

    observation_size, actions, prompts, held_out = OBSERVATION, ACTIONS, None, 4

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        at, count = np.full(OBSERVATION, 0.1 * prompt), 0

        def step(action: int) -> Any:
            nonlocal at, count
            at, count = 0.5 * at + (action - 1.5), count + 1
            return at, at[0], count == 3 + prompt % 4, count == 5

        return SimpleNamespace(reset=lambda: at, step=step)


def policy(version: int = 0) -> ControlPolicy:
    module = ActorCritic(OBSERVATION, ACTIONS, (16,), version)
    with torch.no_grad():
        module.choice.weight.mul_(100)  # far from uniform
    return ControlPolicy(module)


POLICIES = {version: policy(version) for version in range(3)}


def play(calls: list[tuple[str, int]], running: int = 3) -> dict[int, Trajectory]:
    made = ControlEngine(policy(), Paths(), Sampling(100, 1.5), 5, max_running=running)
    found, asked, newest = [], 0, 0
    for what, value in calls:
        if what == "submit":
            made.submit(requests(value, answers=2, first=asked))
            asked += value
        elif what == "load":
            newest = max(newest, value)
            made.load(weights_of(POLICIES[newest].module), newest)
        elif what == "withdraw":
            made.withdraw([value])
        else:
            found += [each for _ in range(value) for each in made.step()]
    return trajectories(found + finish(made))


@settings(max_examples=20)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 4)),
            st.tuples(st.just("step"), st.integers(1, 4)),
            st.tuples(st.just("load"), st.integers(0, 2)),
            st.tuples(st.just("withdraw"), st.integers(0, 9)),
        ),
        max_size=10,
    ),
    st.integers(1, 5),
)
def test_recorded_log_probs_are_the_scores_of_the_versions_that_chose(calls: list[Any], running: int) -> None:
    told = play(calls, running)
    for answer, each in told.items():
        steps = 3 + answer // 2 % 4
        assert (len(each), each.finish) == (min(steps, 5), "done" if steps <= 5 else "length")
        assert each.generated.all()
        batch = answers_of([each], 0).rows([0])
        for version in set(each.versions.tolist()):
            chosen = POLICIES[version]
            with torch.no_grad():
                scores = chosen.score(chosen.module, batch, 1.5).log_probs[0].numpy()
            mine = each.versions == version
            assert np.abs(scores - each.log_probs)[mine].max() < 1e-5
        assert each.observations is not None
        assert each.observations[0].tolist() == [np.float32(0.1 * (answer // 2))] * OBSERVATION
        moved = 0.5 * each.observations[:-1] + (each.tokens[:, None] - 1.5)
        assert np.allclose(each.observations[1:], moved, atol=1e-5)
        assert np.allclose(each.rewards, each.observations[1:, 0])
    again = play(calls, running)
    assert packed_trajectories(list(again.values())) == packed_trajectories(list(told.values()))


def test_an_episode_does_not_depend_on_company() -> None:
    many = play([("submit", 12)], 12)
    few = play([("submit", 12)], 1)
    assert {answer: each.tokens.tolist() for answer, each in many.items()} == {
        answer: each.tokens.tolist() for answer, each in few.items()
    }
    assert len({tuple(each.tokens) for each in many.values()}) > 6


def test_the_sampling_cuts_an_episode() -> None:
    told = generate(policy(), [Start(each) for each in requests(4)], 2, Paths(), Sampling(2), 0)
    assert [(len(each), each.finish) for each in told] == [(2, "length")] * 4
    assert all((each.versions == 2).all() for each in told)


def test_what_is_kept_of_an_episode_is_played_again() -> None:
    asked = requests(5)
    whole = generate(policy(), [Start(each) for each in asked], 0, Paths(), Sampling(9), 7)
    for count in range(1, 6):
        starts = [Start(r, cut(each, min(count, len(each)))) for r, each in zip(asked, whole, strict=True)]
        for before, after in zip(whole, generate(policy(), starts, 0, Paths(), Sampling(9), 7), strict=True):
            assert np.allclose(before.log_probs, after.log_probs, atol=1e-6)
            assert before.tokens.tolist() == after.tokens.tolist()
            assert before.rewards.tolist() == after.rewards.tolist()
            assert before.finish == after.finish


def test_the_engine_of_a_control_problem() -> None:
    made = engine_of(problem(environment=Walk(), policy=Mlp()), policy(), 0, max_running=2)
    assert isinstance(made, ControlEngine)
    made.submit(requests(3))
    made.hold(True)
    assert made.step() == []
    assert (made.running, made.waiting) == (0, 3)
    made.hold(False)
    made.step()
    assert (made.running, made.waiting) == (2, 1)
    assert [(each.running, each.prefill_tokens) for each in made.take_iterations()] == [(2, 0)]
    with pytest.raises(ValueError, match="answer 2 is being generated already"):
        made.submit(requests(1, first=2))
    assert sorted(each.answer for each in finish(made)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        (ValueError("off the rails"), "environment raised ValueError: off the rails"),
        ((np.zeros(2), 0.0, False, False), r"environment observed float64\[2\] where float32\[3\] would do"),
        ((np.zeros(OBSERVATION), float("nan"), False, False), "reward is NaN"),
        (None, "environment returned None where"),
        ((1, 2), r"environment returned tuple \(1, 2\) where"),
    ],
)
def test_an_episode_that_fails_costs_nobody_else(said: Any, failure: str) -> None:
    class Wrong(Paths):
        def start(self, prompt: int, *, held_out: bool = False) -> Any:
            found = super().start(prompt)
            if prompt == 1:

                def step(action: int) -> Any:
                    if isinstance(said, Exception):
                        raise said
                    return said

                found.step = step
            return found

    made = ControlEngine(policy(), Wrong(), Sampling(9), 0)
    made.submit([Request(i, i, 0, 0) for i in range(3)])
    found = {each.answer: each for each in finish(made)}
    with pytest.raises(AssertionError, match=failure):
        raise AssertionError(found[1].failure)
    assert found[1].trajectory is None
    assert all(found[i].trajectory is not None for i in (0, 2))


def test_diverged_weights_are_told() -> None:
    made = ControlEngine(policy(), Paths(), Sampling(9), 0)
    made.submit(requests(2))
    made.load({name: torch.full_like(each, torch.nan) for name, each in weights_of(policy().module).items()}, 4)
    with pytest.raises(ValueError, match=r"version 4: .*not numbers"):
        made.step()
    made.load(weights_of(policy(1).module), 5)
    assert len(trajectories(finish(made))) == 2
