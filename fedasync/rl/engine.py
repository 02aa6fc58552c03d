"""What generates: requests go in, answers come out, and weights may change between two decoding steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from fedasync.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

KvCache = Literal["recompute", "keep"]
"""What becomes of the KV cache of sequences that new weights interrupt."""


class LoadError(RuntimeError):
    """New weights were not taken; the engine goes on under ``version``, or refuses work until others are."""


class Request(NamedTuple):
    """An answer to be generated. What is drawn for it depends on (prompt, epoch, index) and the position alone, so
    whoever generates it again under the same weights gets the same tokens."""

    answer: int
    """Its number: lease × answers + index."""
    prompt: int
    epoch: int
    index: int  # type: ignore[assignment]  # of tuple's methods nobody asks this one
    """Its place in its group."""


class Finished(NamedTuple):
    """An answer has ended: with a trajectory, or with a ``failure`` in words and none."""

    answer: int
    trajectory: Trajectory | None
    failure: str | None = None
    own_fault: bool = True
    """The failure is the prompt's or its environment's, and would come again."""
    start_s: float = 0.0
    """When its first token was begun and its last was there, by ``time.monotonic``."""
    end_s: float = 0.0
    prompt_tokens: int = 0


class Iteration(NamedTuple):
    """One decoding step of all that runs, for cost models."""

    at_s: float
    """When it ended, by ``time.monotonic``."""
    running: int
    context_tokens: int
    """Resident tokens of all running sequences together, at its beginning."""
    seconds: float
    """Prefill not counted."""
    prefill_tokens: int
    """Tokens that were prefilled before it, and how long that took."""
    prefill_s: float


class Engine(Protocol):
    """A replica of the policy that generates many answers at a time (continuous batching)."""

    version: int

    @property
    def running(self) -> int:
        """Sequences that are being decoded."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        ...

    def submit(self, requests: Sequence[Request]) -> None: ...

    def withdraw(self, answers: Collection[int]) -> None:
        """Forget these answers, wherever they are; unknown ones are not looked at."""
        ...

    def step(self) -> list[Finished]:
        """Let in who waits where there is room, decode one token for all that runs; the answers that ended by that.

        Does nothing where nobody runs or waits.
        """
        ...

    def load(self, weights: Mapping[str, Tensor], version: int, kv: KvCache = "recompute") -> None:
        """From the next step on, generate with these weights; sequences go on where they are. May raise LoadError."""
        ...

    def hold(self, closed: bool) -> None:
        """Closed: nothing that waits begins."""
        ...

    def take_iterations(self) -> list[Iteration]:
        """What its decoding steps took, since this was last asked."""
        ...
