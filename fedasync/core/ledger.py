"""Conservation of work: every admitted lease is in exactly one place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Counters of leases by where they are; ``imbalance`` is 0 at every moment, or work was lost or invented."""

    admitted: int = 0
    in_flight: int = 0
    buffered: int = 0
    consumed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    ignored: int = 0
    """Deliveries and failures of leases that had ended before (late, duplicate): they move nothing."""

    @property
    def accepted(self) -> int:
        """Contributions accepted since the start, less those dropped from the buffer later."""
        return self.buffered + self.consumed

    @property
    def imbalance(self) -> int:
        ended = self.rejected.total() + self.failed.total() + self.cancelled.total()
        return self.admitted - (self.in_flight + self.buffered + self.consumed + ended)

    def as_dict(self) -> dict[str, Any]:
        return {
            "admitted": self.admitted,
            "in_flight": self.in_flight,
            "buffered": self.buffered,
            "consumed": self.consumed,
            "rejected": dict(sorted(self.rejected.items())),
            "failed": dict(sorted(self.failed.items())),
            "cancelled": dict(sorted(self.cancelled.items())),
            "ignored": self.ignored,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Ledger:
        counters = {name: Counter(state[name]) for name in ("rejected", "failed", "cancelled")}
        return cls(**{**state, **counters})
