"""What a task is: prompts by number, and what becomes of an answer. Many turns, tools and several rewards fit in.

A language task speaks text; the policy's tokenizer stands between. A control task (CartPole) speaks observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray


class Message(TypedDict):
    """One message of a chat, for a model whose tokenizer has a chat template."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment says to a turn of the policy.

    ``done``: the answer is complete, and ``observation`` is not looked at. Else the text of ``observation`` (what a
    tool said, say) follows the turn as it is, and the policy goes on. Rewards of turns add up.
    """

    reward: float = 0.0
    done: bool = True
    observation: str = ""


class Episode(Protocol):
    """One answer's conversation with its environment."""

    @property
    def prompt(self) -> str | Sequence[Message]:
        """A text, or messages for the chat template."""
        ...

    def step(self, text: str) -> Reply:
        """The policy has generated ``text`` (without its end token) since the last observation."""
        ...


class Environment(Protocol):
    """A language task. Objects are made in every process that generates, so they must be cheap and deterministic."""

    @property
    def prompts(self) -> int | None:
        """Prompts 0 … ``prompts`` − 1 to train on; None: without end."""
        ...

    @property
    def held_out(self) -> int:
        """Prompts 0 … ``held_out`` − 1 that are never trained on, for evaluation (0: none)."""
        ...

    def start(self, prompt: int, *, held_out: bool = False) -> Episode:
        """The episode of a prompt, the same for all its answers. Raises ValueError for a prompt that it cannot make."""
        ...


class ControlEpisode(Protocol):
    """One episode of a control task."""

    def reset(self) -> NDArray[np.float32]:
        """The first observation [d]."""
        ...

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool]:
        """The next observation, the reward, whether it is over (terminated), whether it was cut (truncated)."""
        ...


class ControlEnvironment(Protocol):
    """A task of observations [d] and ``actions`` discrete actions."""

    observation_size: int
    actions: int

    @property
    def prompts(self) -> int | None: ...

    @property
    def held_out(self) -> int: ...

    def start(self, prompt: int, *, held_out: bool = False) -> ControlEpisode:
        """The episode of a number, which fixes all that is random in it."""
        ...
