"""Buffering, the second decision: what is kept of what arrived, and when is it ready?

A rule says how many of the waiting contributions the next step takes (``take``), given how many wait and how many the
window already holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer

Order = Literal["arrival", "oldest_first"]
WarmUp = Literal["wait_until_full", "average_what_is_there"]


@dataclass(frozen=True, slots=True)
class Barrier:
    """The whole round: ready when the cohort's results are in (``Cohort.target``)."""

    def missing(self, waiting: int, window: int, target: int) -> int:
        return max(0, target - waiting)

    def take(self, waiting: int, window: int, round_over: bool) -> int:
        return waiting if round_over else 0


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Exactly ``size`` contributions a step, each used once; what arrives beyond them waits for the next step.

    size = 1 is "each arrival". ``order`` chooses among more than ``size`` waiting ones: by arrival, or those with
    the oldest base version first.
    """

    size: int
    order: Order = "arrival"

    def __post_init__(self) -> None:
        check_integer("buffer size", self.size, 1)
        check_choice("order", self.order, Order)

    def missing(self, waiting: int, window: int, target: int) -> int:
        return max(0, self.size - waiting)

    def take(self, waiting: int, window: int, round_over: bool) -> int:
        return self.size if waiting >= self.size else 0


@dataclass(frozen=True, slots=True)
class Sliding:
    """FedFa's window (Xu et al. 2024): every arrival makes a step over the last ``size`` contributions.

    The paper leaves the start open. ``wait_until_full`` makes no version before ``size`` contributions are in, as
    public re-implementations do; ``average_what_is_there`` steps from the first arrival on.
    """

    size: int
    warm_up: WarmUp = "wait_until_full"

    def __post_init__(self) -> None:
        check_integer("window size", self.size, 1)
        check_choice("warm_up", self.warm_up, WarmUp)

    def missing(self, waiting: int, window: int, target: int) -> int:
        if self.warm_up == "average_what_is_there" or window:
            return max(0, 1 - waiting)
        return max(0, self.size - waiting)

    def take(self, waiting: int, window: int, round_over: bool) -> int:
        if not waiting:
            return 0
        if window or self.warm_up == "average_what_is_there":
            return 1
        return self.size if waiting >= self.size else 0


Buffer = Barrier | Tumbling | Sliding
