"""Talking with an environment that may raise, hang, or answer nonsense: whatever goes wrong is told in one line.

A failed answer has a failure and no reward; 0 would be learnt from.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isfinite, isnan
from traceback import extract_tb
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedasync.rl.engine import Request
from fedasync.rl.environment import ControlEnvironment, ControlEpisode, Environment, Episode, Message, Reply
from fedasync.rl.trajectory import Trajectory

T = TypeVar("T")


class Start(NamedTuple):
    """An answer to generate, and what exists of it already."""

    request: Request
    prefix: Trajectory | None = None
    """Tokens that are kept, the prompt's among them; how it says that it finished is not looked at."""


def cut(trajectory: Trajectory, generated_tokens: int) -> Trajectory | None:
    """What an answer was when it had so many generated tokens; None: of 0, when it was its prompt only."""
    if generated_tokens == 0:
        return None
    chosen = np.flatnonzero(trajectory.generated)
    if not 0 < generated_tokens <= len(chosen):
        raise ValueError(f"cut: the answer has {len(chosen)} generated tokens, and {generated_tokens} are to be kept")
    end = int(chosen[generated_tokens - 1]) + 1
    seen = trajectory.observations
    return replace(
        trajectory,
        tokens=trajectory.tokens[:end],
        generated=trajectory.generated[:end],
        log_probs=trajectory.log_probs[:end],
        versions=trajectory.versions[:end],
        rewards=trajectory.rewards[:end],
        observations=None if seen is None else seen[: end + 1],
    )


def all_new(starts: Sequence[Start], here: Iterable[int]) -> Sequence[Start]:
    """``starts`` as they are. Raises ValueError where an answer of them is here already, or twice among them."""
    known = set(here)
    for start in starts:
        if start.request.answer in known:
            raise ValueError(f"engine: answer {start.request.answer} is being generated already")
        known.add(start.request.answer)
    return starts


class EpisodeError(Exception):
    """What an environment did wrong, in words: a ``Finished.failure``."""


class _TimeUp(BaseException):
    """Not an Exception, so that an environment that catches those does not catch this."""


class Guard:
    """Calls an environment, and waits ``timeout_s`` for it at most (None: without end).

    The limit is an alarm (``signal.setitimer``), which works in a process's main thread only: in other threads, and
    where the system has no such alarm, calls run without a limit. It interrupts Python code, and C code where that
    returns to Python; an environment that sets an alarm of its own (math-verify's time-outs do) turns it off.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s

    def start(self, environment: Environment, prompt: int, held_out: bool) -> tuple[Episode, str | Sequence[Message]]:
        """The episode of a prompt, and the prompt itself. Raises EpisodeError."""

        def begin() -> tuple[Episode, str | Sequence[Message]]:
            episode = environment.start(prompt, held_out=held_out)
            return episode, episode.prompt

        return self._call(begin)

    def reply(self, episode: Episode, text: str) -> Reply:
        """What the environment says to a turn. Raises EpisodeError."""
        found = self._call(lambda: episode.step(text))
        if not isinstance(found, Reply):
            raise EpisodeError(f"environment returned {_kind(found)} where a Reply would do")
        _check_reward(found.reward)
        if not isinstance(found.observation, str):
            raise EpisodeError(f"environment observed {_kind(found.observation)} where a text would do")
        return found

    def reset(
        self, environment: ControlEnvironment, prompt: int, held_out: bool
    ) -> tuple[ControlEpisode, NDArray[np.float32]]:
        """The episode of a number, and its first observation [d]. Raises EpisodeError."""

        def begin() -> tuple[ControlEpisode, Any]:
            episode = environment.start(prompt, held_out=held_out)
            return episode, episode.reset()

        episode, seen = self._call(begin)
        return episode, _observation(seen, environment.observation_size)

    def act(self, episode: ControlEpisode, action: int, size: int) -> tuple[NDArray[np.float32], float, bool, bool]:
        """The next observation [size], the reward, terminated, truncated. Raises EpisodeError."""
        found: Any = self._call(lambda: episode.step(action))
        if not isinstance(found, tuple) or len(found) != 4:
            raise EpisodeError(
                f"environment returned {_kind(found)} where (observation, reward, terminated, truncated) would do"
            )
        seen, reward, terminated, truncated = found
        _check_reward(reward)
        return _observation(seen, size), float(reward), bool(terminated), bool(truncated)

    def _call(self, call: Callable[[], T]) -> T:
        try:
            if self.timeout_s is None or not _alarms():
                return call()
            return _limited(call, self.timeout_s)
        except _TimeUp:
            raise EpisodeError(f"environment took more than {self.timeout_s:g} s") from None
        except (Exception, SystemExit) as error:
            raise EpisodeError(told(error)) from error


def told(error: BaseException) -> str:
    """An exception of an environment in one line: its type, the first line of what it says, and where it was raised."""
    first = next(iter(str(error).splitlines()), "")
    where = extract_tb(error.__traceback__)
    at = f" ({where[-1].filename.rpartition('/')[2]}, line {where[-1].lineno})" if where else ""
    return f"environment raised {type(error).__name__}{': ' * bool(first)}{first}{at}"


def _alarms() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def _limited(call: Callable[[], T], seconds: float) -> T:
    """Raises _TimeUp where ``call`` takes longer; once more each ``seconds`` where it catches that."""
    armed = True

    def ring(signum: int, frame: object) -> None:
        if armed:
            raise _TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        return call()
    finally:
        armed = False  # first, so that an alarm from here on does nothing
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _check_reward(reward: object) -> None:
    if not isinstance(reward, (int, float, np.integer, np.floating, np.bool_)):
        raise EpisodeError(f"reward is {_kind(reward)} where a number would do")
    if not isfinite(reward):
        raise EpisodeError("reward is NaN" if isnan(reward) else f"reward is {float(reward)}")


def _observation(seen: object, size: int) -> NDArray[np.float32]:
    found = np.asarray(seen)
    if found.shape != (size,) or found.dtype.kind not in "fiub":
        raise EpisodeError(f"environment observed {found.dtype}{list(found.shape)} where float32[{size}] would do")
    return found.astype(np.float32)


def _kind(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.80}"
