"""Environments that talk, in one turn or several, and what a tiny policy's answers must have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedasync.rl.engine import Finished, Request
from fedasync.rl.environment import Reply
from fedasync.rl.generation import LanguageEngine
from fedasync.rl.language_policy import LanguagePolicy
from fedasync.rl.policy import weights_of
from fedasync.rl.trajectory import Trajectory

from .tiny import CHARACTERS, llama


@dataclass
class Talk:
    """An episode of ``turns`` turns: each earns the length of its text, and all but the last are answered by "ab…"."""

    prompt: str
    turns: int = 1
    observation: str = "ab"
    heard: list[str] = field(default_factory=list)

    def step(self, text: str) -> Reply:
        self.heard.append(text)
        return Reply(len(text), len(self.heard) >= self.turns, self.observation)


@dataclass
class Talks:
    """Prompt p has 1 + p % 5 letters and, where ``turns`` is more than 1, 1 + p % ``turns`` turns."""

    turns: int = 1
    observation: str = "ab"
    prompts: int | None = None
    held_out: int = 6
    begun: list[Talk] = field(default_factory=list)

    def start(self, prompt: int, *, held_out: bool = False) -> Talk:
        self.begun.append(Talk(text_of(prompt + 100 * held_out), 1 + prompt % self.turns, self.observation))
        return self.begun[-1]


@dataclass
class Fails:
    """Says ``reply`` to ``prompts_that_fail``, or raises it, if it is an exception; is pleased by others."""

    reply: Any
    prompts_that_fail: frozenset[int] = frozenset({1})
    prompts: int | None = None
    held_out: int = 4

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        talk = Talk(text_of(prompt))
        if prompt in self.prompts_that_fail:
            talk.step = self._fail  # type: ignore[method-assign]
        return talk

    def _fail(self, text: str) -> Any:
        if isinstance(self.reply, BaseException):
            raise self.reply
        return self.reply() if callable(self.reply) else self.reply


def text_of(prompt: int) -> str:
    return "".join(CHARACTERS[2 + (prompt * 3 + at) % 10] for at in range(1 + prompt % 5))


def requests(count: int, answers: int = 1, first: int = 0) -> list[Request]:
    return [Request(i, i // answers, 0, i % answers) for i in range(first, first + count)]


def finish(engine: Any) -> list[Finished]:
    found = []
    while engine.running or engine.waiting:
        found += engine.step()
    return found


def trajectories(found: Sequence[Finished]) -> dict[int, Trajectory]:
    """By answer; a failure is an error."""
    assert [each.failure for each in found if each.failure is not None] == []
    return {each.answer: each.trajectory for each in found if each.trajectory is not None}


def other_weights(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in weights_of(llama(seed, dtype=dtype).module).items()}


def scores(policies: Mapping[int, LanguagePolicy], told: Trajectory, temperature: float = 1.0) -> NDArray[np.float64]:
    """[T]: log-probability of each generated token by the version that chose it, from one plain forward pass over the
    whole answer; 0 elsewhere."""
    found = np.zeros(len(told))
    tokens = torch.from_numpy(told.tokens)
    for version in {int(each) for each in told.versions if each >= 0}:
        with torch.no_grad():
            logits = policies[version].module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        log_probs = torch.log_softmax(logits.double() / temperature, -1)
        chosen = log_probs.gather(-1, tokens[1:, None])[:, 0].numpy()
        at = np.flatnonzero(told.versions == version)
        found[at] = chosen[at - 1]
    return found


def engine(policy: LanguagePolicy, environment: Any, **options: Any) -> LanguageEngine:
    from fedasync.rl.sampling import Sampling

    usual: dict[str, Any] = {"sampling": Sampling(8), "seed": 3}
    return LanguageEngine(policy, environment, **(usual | options))


def with_context(policy: LanguagePolicy, context_tokens: int) -> LanguagePolicy:
    return replace(policy, context_tokens=context_tokens)
