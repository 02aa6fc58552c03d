"""Buffering, the second decision: what is kept of what arrived, and when is it ready?

A rule says how many of the waiting contributions the next step takes (``take``), given how many wait and how many the
window already holds.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.core.events import Arrival

Order = Literal["arrival", "oldest_first", "freshest_first", "dispatch"]
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

    size = 1 is "each arrival". ``order`` chooses among more than ``size`` waiting ones: by ``arrival``; those with the
    oldest base version first (``oldest_first``: the earlier lease of two); or with the newest (``freshest_first``: the
    later lease of two), which leaves old ones behind. ``dispatch`` chooses none: a step takes exactly the leases that
    were given out first of all that have not failed, so it waits for the slowest of them whatever else has arrived.
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


@dataclass(frozen=True, slots=True)
class Periodic:
    """A step at the fixed times interval_s, 2·interval_s, … over whatever has arrived by then; none if nothing has.

    FedFix (Fraboni et al. 2023). A contribution that arrives at the very instant of a step is part of it.
    """

    interval_s: float

    def __post_init__(self) -> None:
        check_real("periodic buffer: interval_s", self.interval_s, 0, above=True)

    def missing(self, waiting: int, window: int, target: int) -> int:
        return max(0, 1 - waiting)

    def take(self, waiting: int, window: int, round_over: bool) -> int:
        return waiting if round_over else 0


@dataclass(frozen=True, slots=True)
class Quota:
    """SAFA's first come, first merged (Wu et al. 2021): a step when ``size`` contributions have been drafted.

    Who was not drafted for the last step is drafted as it arrives; who was waits behind, and fills the quota only when
    nobody is at work any more, or the round has lasted ``limit_s``. A step consumes all that have arrived: the drafted
    ones, and those left over, which the update sees as ``undrafted``.
    """

    size: int
    limit_s: float | None = None

    def __post_init__(self) -> None:
        check_integer("quota", self.size, 1)
        if self.limit_s is not None:
            check_real("quota: limit_s", self.limit_s, 0, above=True)

    def missing(self, waiting: int, window: int, target: int) -> int:
        return max(0, self.size - waiting)

    def take(self, waiting: int, window: int, round_over: bool) -> int:
        raise AssertionError("a quota is drafted, not counted")

    def draft(self, waiting: Sequence[Arrival], drafted_last: Container[int], over: bool) -> list[int] | None:
        """Places in ``waiting`` of those drafted, in order of arrival; None while the quota is open.

        ``over``: nobody else is waited for.
        """
        first = [i for i, arrival in enumerate(waiting) if arrival.lease.worker not in drafted_last]
        if len(first) < self.size and not over:
            return None
        behind = [i for i, arrival in enumerate(waiting) if arrival.lease.worker in drafted_last]
        return (first + behind)[: self.size] or None


@dataclass(frozen=True, slots=True)
class Grouped:
    """The contributions of a group of leases that end together, as ``Tiers`` or ``Compass`` forms it."""

    def missing(self, waiting: int, window: int, target: int) -> int:
        return max(0, 1 - waiting)

    def take(self, waiting: int, window: int, round_over: bool) -> int:
        raise AssertionError("a group is ready when its leases have ended, not when it counts so many")


Buffer = Barrier | Tumbling | Sliding | Periodic | Quota | Grouped
