"""What the metrics of a run are, and when its targets are reached: evaluation on a grid of time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import inf
from typing import Any, Protocol


class Evaluated(Protocol):
    """Who holds the current model."""

    def evaluate(self, version: int) -> dict[str, float]:
        """Metrics of the current model, by name."""
        ...


class Evaluations:
    """Metrics by column (``time_s``, ``version``, ``name``, ``value``), at 0, e, 2e, … s and at the end.

    The model does not change between two events, so a grid point is evaluated when the clock is about to pass it, and
    a version only once. With ``stop_at_target``, ``reached_s`` is the grid point that saw the last target reached.
    """

    def __init__(
        self, learner: Evaluated | None, every_s: float | None, targets: Mapping[str, float], stop_at_target: bool
    ) -> None:
        self.time_s = array("d")
        self.version = array("q")
        self.name: list[str] = []
        self.value = array("d")
        self.reached_s = inf
        self._learner = learner
        self._every_s = inf if every_s is None or learner is None else every_s
        self._next = 0
        self._found: tuple[int, dict[str, float]] = (-1, {})
        self._targets = dict(targets)
        self._to_reach = dict(targets) if stop_at_target else {}

    @property
    def next_s(self) -> float:
        """The next grid point; infinite when there is none."""
        return self._next * self._every_s if self._every_s < inf else inf

    def state(self) -> dict[str, Any]:
        """What was found so far, as plain data."""
        return {
            "next": self._next,
            "found": list(self._found),
            "to_reach": self._to_reach,
            "reached_s": None if self.reached_s == inf else self.reached_s,
            "columns": [list(self.time_s), list(self.version), self.name, list(self.value)],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, of a run with the same targets."""
        self._next, self._found = state["next"], (state["found"][0], state["found"][1])
        self._to_reach = dict(state["to_reach"])
        self.reached_s = inf if state["reached_s"] is None else state["reached_s"]
        time_s, version, self.name, value = state["columns"]
        self.time_s, self.version, self.value = array("d", time_s), array("q", version), array("d", value)

    def before(self, time_s: float, version: int, *, inclusive: bool = False) -> None:
        """Evaluate the model at the grid points before ``time_s``."""
        while self.reached_s == inf and (self.next_s < time_s or (inclusive and self.next_s == time_s)):
            at_s = self.next_s
            self._next += 1
            self.at(at_s, version)

    def at(self, at_s: float, version: int) -> None:
        """Evaluate the model now, unless that was done already."""
        if self._learner is None or (self.time_s and self.time_s[-1] >= at_s):
            return
        if self._found[0] != version:
            self._found = (version, self._learner.evaluate(version))
        found = self._found[1]
        if not self.time_s:
            self._check(found, version)
        if self._to_reach:
            self._to_reach = {name: level for name, level in self._to_reach.items() if not found[name] >= level}
            self.reached_s = inf if self._to_reach else at_s
        for name, value in found.items():
            self.time_s.append(at_s)
            self.version.append(version)
            self.name.append(name)
            self.value.append(value)

    def _check(self, found: Mapping[str, float], version: int) -> None:
        """Targets are reached from below: one that version 0 meets says nothing, and a loss needs another measure."""
        for name, level in self._targets.items():
            if name not in found:
                raise ValueError(f"target {name!r}: the workload has no such metric; it has {sorted(found)}")
            if version == 0 and found[name] >= level:
                raise ValueError(
                    f"target {name} ≥ {level:g} is met by version 0 already ({found[name]:g}); a target is a value to "
                    "rise to, so for a metric that falls let the workload report one that rises (its negative, say)"
                )
