"""Time-outs of leases that follow what has been seen: the median of recent durations, and their spread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

from fedasync.core.bounds import check_integer, check_real


@dataclass(frozen=True, slots=True)
class AdaptiveTimeout:
    """A lease's time-out is median + ``factor``·MAD of the last ``memory`` durations (MAD: median absolute deviation).

    Before ``at_least`` have been seen it is ``first_s``; it is never below ``margin`` times the median, so that
    durations that hardly differ time nobody out. A lease that timed out counts with the time that it was given:
    time-outs that are too short lengthen themselves. The defaults are ours.
    """

    first_s: float
    factor: float = 3.0
    memory: int = 100
    at_least: int = 10
    margin: float = 1.25
    kind: Literal["adaptive"] = "adaptive"

    def __post_init__(self) -> None:
        check_real("adaptive time-out: first_s", self.first_s, 0, above=True)
        check_real("adaptive time-out: factor", self.factor, 0)
        check_integer("adaptive time-out: at_least", self.at_least, 1)
        check_integer("adaptive time-out: memory", self.memory, self.at_least)
        check_real("adaptive time-out: margin", self.margin, 1)

    def seconds(self, recent_s: deque[float]) -> float:
        """The time-out of a lease that starts now."""
        if len(recent_s) < self.at_least:
            return self.first_s
        middle = median(recent_s)
        deviation = median(abs(seconds - middle) for seconds in recent_s)
        return max(middle + self.factor * deviation, self.margin * middle) or self.first_s
