"""Publication, the fourth decision: when do workers see a new version, and what becomes of work in flight?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer

InFlight = Literal["continue", "interrupt", "abort"]
"""Work in flight goes on from its old base; goes on under the new version (the runtime swaps it in); is cancelled."""


@dataclass(frozen=True, slots=True)
class EveryVersion:
    in_flight: InFlight = "continue"

    def __post_init__(self) -> None:
        check_choice("publication: in_flight", self.in_flight, InFlight)

    def due(self, version: int, published: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class EveryN:
    """Every n-th version."""

    n: int
    in_flight: InFlight = "continue"

    def __post_init__(self) -> None:
        check_integer("publication: n", self.n, 1)
        check_choice("publication: in_flight", self.in_flight, InFlight)

    def due(self, version: int, published: int) -> bool:
        return version - published >= self.n


Publication = EveryVersion | EveryN
