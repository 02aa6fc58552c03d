"""Whatever an environment does wrong is told in one line, costs its own answer, and is never a reward."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedasync.rl.environment import Reply
from fedasync.rl.episodes import EpisodeError, Guard, cut
from fedasync.rl.sampling import Sampling

from .talking import Fails, Talk, Talks, engine, finish, requests
from .tiny import Characters, HuggingFaceTokenizer, LanguagePolicy, llama, trajectory

NAN = float("nan")


def never_ends() -> None:
    while True:
        time.sleep(0.001)


def catches_all() -> None:
    """An environment that swallows whatever interrupts it, twice."""
    for _ in range(2):
        with suppress(BaseException):
            never_ends()
    never_ends()


class Unsure:
    def step(self, text: str) -> Any:
        return {"a": 1}["b"]


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (TypeError("no\nsecond line"), r"environment raised TypeError: no \(talking\.py, line \d+\)"),
        (AssertionError(), r"environment raised AssertionError \(talking\.py, line \d+\)"),
        (SystemExit(3), r"environment raised SystemExit: 3 \(talking\.py, line \d+\)"),
        (Reply(NAN), "reward is NaN"),
        (Reply(np.float32(NAN)), "reward is NaN"),
        (Reply(-np.inf), "reward is -inf"),
        (Reply("good"), "reward is str 'good' where a number would do"),
        (Reply(None), "reward is None where a number would do"),
        (None, "environment returned None where a Reply would do"),
        (1.0, "environment returned float 1.0 where a Reply would do"),
        (Reply(0.0, False, b"ab"), "environment observed bytes b'ab' where a text would do"),
    ],
)
def test_what_an_environment_does_wrong(reply: Any, failure: str) -> None:
    """Answer 1 fails with it; its siblings and neighbours are judged as ever."""
    made = engine(llama(), Fails(reply), max_running=3)
    made.submit(requests(6, answers=2))
    found = {each.answer: each for each in finish(made)}
    assert sorted(found) == list(range(6))
    for answer, each in found.items():
        if answer in (2, 3):
            with pytest.raises(AssertionError, match=f"^{failure}$"):
                raise AssertionError(each.failure)
            assert (each.trajectory, each.own_fault) == (None, True)
        else:
            assert each.failure is None
            assert each.trajectory is not None
            assert each.trajectory.reward >= 0


@pytest.mark.parametrize("reward", [True, 1, np.float32(1), np.int64(1), np.True_])
def test_whatever_is_a_number_is_a_reward(reward: Any) -> None:
    episode = SimpleNamespace(prompt="", step=lambda text: Reply(reward))
    assert Guard().reply(episode, "").reward == 1


def test_an_error_in_the_environment_s_own_code_is_where_it_is() -> None:
    with pytest.raises(EpisodeError, match=r"^environment raised KeyError: 'b' \(test_episodes\.py, line \d+\)$"):
        Guard().reply(Unsure(), "")  # type: ignore[arg-type]


@pytest.mark.parametrize("hangs", [never_ends, catches_all])
def test_an_environment_that_hangs_is_left(hangs: Any) -> None:
    before = signal.getsignal(signal.SIGALRM)
    made = engine(llama(), Fails(hangs), max_running=3, reward_timeout_s=0.02)
    made.submit(requests(3))
    found = {each.answer: each.failure for each in finish(made)}
    assert found == {0: None, 1: "environment took more than 0.02 s", 2: None}
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_without_a_main_thread_there_is_no_limit() -> None:
    def slowly(text: str) -> Reply:
        time.sleep(0.05)
        return Reply(1.0)

    told: list[float] = []
    episode = SimpleNamespace(prompt="", step=slowly)
    thread = threading.Thread(target=lambda: told.append(Guard(0.01).reply(episode, "").reward))
    thread.start()
    thread.join()
    assert told == [1.0]
    with pytest.raises(EpisodeError, match=r"more than 0\.01 s"):
        Guard(0.01).reply(episode, "")


def test_an_interrupt_is_no_failure_of_the_environment() -> None:
    episode = Fails(KeyboardInterrupt()).start(1)
    with pytest.raises(KeyboardInterrupt):
        Guard(1.0).reply(episode, "")


class Starts:
    """Its prompts cannot be made, are nothing, or are not text."""

    prompts, held_out = None, 0

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        if prompt == 0:
            raise ValueError("there is no prompt 0")
        return Talk(["", None, "AB", "abc"][prompt - 1])  # type: ignore[arg-type]


def test_prompts_that_cannot_be_made_or_read() -> None:
    made = engine(llama(), Starts())
    made.submit(requests(5))
    found = {each.answer: each.failure or "" for each in finish(made)}
    assert found[0].startswith("environment raised ValueError: there is no prompt 0 (test_episodes.py, line ")
    assert found[1] == "prompt is empty: it has no tokens"
    assert found[2].startswith("prompt cannot be encoded: TypeError: ")
    assert found[3] == "prompt cannot be encoded: ValueError: substring not found"
    assert found[4] == ""


def test_a_tokenizer_without_pad_and_end_token() -> None:
    """Nothing is padded with it; answers end by their length."""
    tokenizer = Characters()
    tokenizer.eos_token_id = None  # type: ignore[assignment]
    made = engine(LanguagePolicy(llama().module, HuggingFaceTokenizer(tokenizer), 64), Talks(), sampling=Sampling(3))
    made.submit(requests(4))
    assert [each.trajectory and each.trajectory.finish for each in finish(made)] == ["length"] * 4


def test_cut() -> None:
    told = trajectory(np.random.default_rng(0), prompt=3, answer=7)
    chosen = told.generated_tokens
    assert cut(told, 0) is None
    assert cut(told, chosen) is not None
    for count in range(1, chosen + 1):
        part = cut(told, count)
        assert part is not None
        assert part.generated_tokens == count
        assert part.generated[-1]
        assert part.tokens.tolist() == told.tokens[: len(part)].tolist()
    with pytest.raises(ValueError, match=f"{chosen} generated tokens, and {chosen + 1} are to be kept"):
        cut(told, chosen + 1)
    played = trajectory(np.random.default_rng(0), answer=5, control=True)
    part = cut(played, 2)
    assert part is not None
    assert part.observations is not None
    assert part.observations.shape == (3, played.observations.shape[1])  # type: ignore[union-attr]
