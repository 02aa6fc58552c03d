"""What the trainer and the servers did with their time, and how long each step took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.core import Coordinator, Step
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.rollouts import Rollouts

if TYPE_CHECKING:
    import polars as pl

TRAINER = ("training", "syncing", "switching", "waiting", "down")
SERVERS = ("decoding", "prefilling", "paused", "down", "idle")
PARTS = {"waiting": "wait_s", "syncing": "sync_s", "switching": "switch_s", "down": "down_s", "lost": "lost_s"}
"""What a step's time is spent on besides ``train_s``, and the metrics that say how long; they add up to ``step_s``."""


class TimeUse:
    """Seconds by what they were spent on, from time 0 or from the last ``start_over`` on."""

    def __init__(self, cluster: Cluster, rollouts: Rollouts) -> None:
        self._servers = rollouts.servers
        self._from_s = 0.0
        self._trainer = dict.fromkeys(TRAINER, 0.0)
        self._before = self._spent(0.0)
        self._end_s = 0.0

    def trainer(self, what: str, from_s: float, to_s: float) -> None:
        """The trainer did this from then to then."""
        self._trainer[what] += max(0.0, to_s - max(from_s, self._from_s))

    def start_over(self, now: float) -> None:
        """What was before counts no more."""
        self._trainer = dict.fromkeys(TRAINER, 0.0)
        for server in self._servers:
            server.advance(now)
        self._before = self._spent(now)
        self._from_s = now

    def until(self, now: float) -> None:
        """The run ends."""
        for server in self._servers:
            server.advance(now)
        self._end_s = now

    def shares(self) -> dict[str, dict[str, float]]:
        """Shares of the trainer's time, and of servers × time."""
        whole_s = self._end_s - self._from_s
        if whole_s <= 0:
            return {"trainer": dict.fromkeys(TRAINER, 0.0), "servers": dict.fromkeys(SERVERS, 0.0)}
        trainer = {what: self._trainer[what] / whole_s for what in TRAINER}
        trainer["waiting"] += max(0.0, 1.0 - sum(trainer.values()))  # since the last step
        area_s = whole_s * len(self._servers)
        spent = self._spent(self._end_s)
        servers = {what: (spent[what] - self._before[what]) / area_s for what in spent}
        servers["idle"] = max(0.0, 1.0 - sum(servers.values()))
        return {"trainer": trainer, "servers": servers}

    def _spent(self, now: float) -> dict[str, float]:
        return {
            "decoding": sum(server.decoding_s for server in self._servers),
            "prefilling": sum(server.prefilled_s(now) for server in self._servers),
            "paused": sum(server.paused_s for server in self._servers),
            "down": sum(server.down_s for server in self._servers),
        }


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

    def committed(self, coordinator: Coordinator, now: float) -> None:
        """The step has become a version."""
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
            }
        )
        self._at_s.append(now)
        self._last_s, self._parts = now, dict.fromkeys(PARTS.values(), 0.0)

    def spent(self, what: str, seconds: float) -> None:
        """So long the trainer was at one of `PARTS`: part of the time of the step that is committed next."""
        self._parts[PARTS[what]] += seconds

    def table(self) -> pl.DataFrame:
        """time_s, version, name, value."""
        import polars as pl

        names = list(self._rows[0]) if self._rows else []
        values: list[Any] = [float(row[name]) for row in self._rows for name in names]
        return pl.DataFrame(
            {
                "time_s": np.repeat(np.array(self._at_s, np.float64), len(names)),
                "version": np.repeat(np.arange(1, len(self._rows) + 1, dtype=np.int64), len(names)),
                "name": pl.Series(names * len(self._rows), dtype=pl.String),
                "value": np.array(values, np.float64),
            }
        )
