"""How far a real run on prompts has come, from what its controller tells."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

RECENT = 10
"""Versions whose tokens are told a second."""
TOLD = {"reward_mean": "reward", "reward": "held-out reward", "exact": "exact"}
"""Metrics that are told, and their words."""


@dataclass
class TrainerProgress:
    """The last version, its mean reward, the last evaluation, and tokens trained a second over the last versions."""

    versions: int | None = None
    """Of how many; None: the run ends otherwise."""
    clock: Callable[[], float] = time.monotonic
    failures: list[str] = field(default_factory=list)
    _version: int = 0
    _metrics: dict[str, float] = field(default_factory=dict)
    _trained: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT + 1))
    """When each of the last versions was there, and its tokens."""

    def told(self, version: int, metrics: Mapping[str, float]) -> None:
        """What became known of a version: of its training, or of its evaluation."""
        self._version = max(self._version, version)
        self._metrics.update(metrics)
        if "tokens" in metrics:
            self._trained.append((self.clock(), metrics["tokens"]))

    def look(self) -> None:
        """Nothing: it is told."""

    @property
    def tokens_per_second(self) -> float | None:
        """None before two versions are there."""
        trained = list(self._trained)
        if len(trained) < 2 or trained[-1][0] <= trained[0][0]:
            return None
        return sum(tokens for _, tokens in trained[1:]) / (trained[-1][0] - trained[0][0])

    def __str__(self) -> str:
        if not self._version:
            return "waiting for the first version"
        said = [f"version {self._version}" + (f" of {self.versions}" if self.versions else "")]
        said += [f"{words} {self._metrics[name]:.3f}" for name, words in TOLD.items() if name in self._metrics]
        if (rate := self.tokens_per_second) is not None:
            said.append(f"{rate:,.0f} tokens/s")
        return ", ".join(said)
