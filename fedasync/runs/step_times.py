"""How long each step of a trainer took, and what it did meanwhile: metrics of a run on prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.core import Coordinator, Step

if TYPE_CHECKING:
    import polars as pl

PARTS = {
    "waiting": "wait_s",
    "syncing": "sync_s",
    "switching": "switch_s",
    "saving": "save_s",
    "evaluating": "evaluate_s",
    "measuring": "measure_s",
    "down": "down_s",
    "lost": "lost_s",
}
"""What a step's time is spent on besides ``train_s``, and the metrics that say how long; they add up to ``step_s``."""


class StepTimes:
    """A row a committed version: how long it took, what the trainer did meanwhile, what it was made of."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []
        self._at_s: list[float] = []
        self._open: dict[str, float] = {}
        self._parts = dict.fromkeys(PARTS.values(), 0.0)
        self._last_s = 0.0
        self.training_s = 0.0
        """Spent in committed steps."""

    def begin(self, step: Step, train_s: float, tokens: float) -> None:
        """The trainer begins a step, perhaps anew after a crash."""
        ages = [step.staleness(arrival) for arrival in step.entering]
        self._open = {
            "train_s": train_s,
            "tokens": tokens,
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": max(ages),
            "groups": len(ages),
        }

    def took(self, train_s: float) -> None:
        """The step that is about to be committed took another time than was foreseen when it began."""
        self._open["train_s"] = train_s

    def committed(self, coordinator: Coordinator, now: float, metrics: Mapping[str, float] | None = None) -> None:
        """The step has become a version; ``metrics`` are those of what was learnt."""
        step_s = now - self._last_s
        self.training_s += self._open["train_s"]
        self._rows.append(
            {
                "step_s": step_s,
                **self._open,
                **self._parts,
                "tokens_per_second": self._open["tokens"] / step_s if step_s > 0 else float("inf"),
                "publications": coordinator.publications,
                "checks": coordinator.checks,
                **(metrics or {}),
            }
        )
        self._at_s.append(now)
        self._last_s, self._parts = now, dict.fromkeys(PARTS.values(), 0.0)

    def add(self, version: int, metrics: Mapping[str, float]) -> None:
        """What became known of a committed version later: an evaluation."""
        self._rows[version - 1].update(metrics)

    def spent(self, what: str, seconds: float) -> None:
        """So long the trainer was at one of `PARTS`: part of the time of the step that is committed next."""
        self._parts[PARTS[what]] += seconds

    def state(self) -> dict[str, Any]:
        """Plain data, for a snapshot between a commit and the next ``begin``."""
        return {
            "rows": [dict(row) for row in self._rows],
            "at_s": list(self._at_s),
            "last_s": self._last_s,
            "training_s": self.training_s,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._rows, self._at_s = [dict(row) for row in state["rows"]], list(state["at_s"])
        self._last_s, self.training_s = state["last_s"], state["training_s"]
        self._open, self._parts = {}, dict.fromkeys(PARTS.values(), 0.0)

    def table(self) -> pl.DataFrame:
        """time_s, version, name, value."""
        import polars as pl

        versions = np.repeat(np.arange(1, len(self._rows) + 1, dtype=np.int64), [len(row) for row in self._rows])
        return pl.DataFrame(
            {
                "time_s": np.array(self._at_s, np.float64)[versions - 1],
                "version": versions,
                "name": pl.Series([name for row in self._rows for name in row], dtype=pl.String),
                "value": np.array([value for row in self._rows for value in row.values()], np.float64),
            }
        )
