"""Publication, the fourth decision: when do workers see a new version, and what becomes of work in flight?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InFlight = Literal["continue", "interrupt", "abort"]
"""Work in flight goes on from its old base; goes on under the new version (the runtime swaps it in); is cancelled."""


@dataclass(frozen=True, slots=True)
class EveryVersion:
    in_flight: InFlight = "continue"

    def due(self, version: int, published: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class EveryN:
    """Every n-th version."""

    n: int
    in_flight: InFlight = "continue"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"publication: n must be an integer ≥ 1, got {self.n}")

    def due(self, version: int, published: int) -> bool:
        return version - published >= self.n


Publication = EveryVersion | EveryN
