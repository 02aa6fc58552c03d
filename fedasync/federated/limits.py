"""When a federated run ends, how often it is evaluated, who works next: the same under any clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fedasync.core.bounds import check_choice, check_integer
from fedasync.federated.selection import Selection

MOST_EVALUATIONS = 1_000_000


@dataclass(frozen=True)
class Limits:
    """When a run stops (whichever limit comes first), how often it is evaluated, who works next.

    ``updates`` counts contributions applied to the model, ``versions`` committed steps. Evaluation happens on the grid
    0, e, 2e, … of the run's time (``evaluate_every_s``); with ``stop_at_target`` the run ends there once every target
    is reached.
    """

    time_s: float | None = None
    updates: int | None = None
    versions: int | None = None
    evaluate_every_s: float | None = None
    selection: Selection = "random_idle"
    stop_at_target: bool = False

    def __post_init__(self) -> None:
        if self.time_s is None and self.updates is None and self.versions is None:
            raise ValueError("a run needs an end: give time_s, updates, or versions")
        for name in ("time_s", "evaluate_every_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value}")
        for name in ("updates", "versions"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_choice("selection", self.selection, Selection)
        if self.time_s is not None and self.evaluate_every_s is not None:
            points = self.time_s / self.evaluate_every_s
            if points > MOST_EVALUATIONS:
                raise ValueError(
                    f"evaluate_every_s = {self.evaluate_every_s:g} makes {points:.3g} evaluations in time_s = "
                    f"{self.time_s:g}; at most {MOST_EVALUATIONS:,} are made"
                )
