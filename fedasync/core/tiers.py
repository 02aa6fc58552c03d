"""FedAT's admission: clients in tiers of like speed, each with rounds of its own.

``Tiers`` is the frozen rule, ``TierRounds`` what a run knows of it: which rounds are open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedasync.core.bounds import check_integer

if TYPE_CHECKING:
    from fedasync.core.admission import Affairs
    from fedasync.core.events import Lease


@dataclass(frozen=True, slots=True)
class Tiers:
    """FedAT (Chai et al. 2021): ``tiers`` groups of clients by their speed; in each, rounds of ``cohort`` clients.

    Within a tier everybody waits for the round's last, as in FedAvg; tiers do not wait for each other. Who belongs
    where is decided by the runtime's profile, the seconds that each client's work is expected to take: tiers hold
    equally many clients (up to one), tier 0 the fastest. A tier smaller than ``cohort`` has rounds of all its clients.
    A round takes each client once, and waits for absent ones where it needs them.
    """

    tiers: int
    cohort: int

    def __post_init__(self) -> None:
        check_integer("tiers", self.tiers, 1)
        check_integer("cohort size", self.cohort, 1)

    @property
    def most_in_flight(self) -> int:
        return self.tiers * self.cohort

    def slots(self, now: Affairs) -> int:
        """How many leases may start now, in all tiers together."""
        return now.groups.free if now.step is None and isinstance(now.groups, TierRounds) else 0

    def refusal(self, now: Affairs) -> str:
        if now.step is not None:
            return f"the server step to version {now.version + 1} is under way"
        return f"all {self.tiers} tiers have started the {self.cohort} clients of their rounds"

    def groups(self, profile: Sequence[float] | None) -> TierRounds:
        """A run's rounds. Raises ValueError without a profile, and for more tiers than clients."""
        if profile is None:
            raise ValueError("tiers need a profile: the seconds that each client's work is expected to take")
        if self.tiers > len(profile):
            raise ValueError(f"{self.tiers} tiers for {len(profile)} clients; tiers ≤ {len(profile)} would do")
        return TierRounds(self, profile)


class TierRounds:
    """The open round of each tier."""

    def __init__(self, rule: Tiers, profile: Sequence[float]) -> None:
        order = sorted(range(len(profile)), key=lambda worker: (profile[worker], worker))
        self.tier_of = [0] * len(order)
        sizes = [0] * rule.tiers
        for place, worker in enumerate(order):
            tier = place * rule.tiers // len(order)
            self.tier_of[worker] = tier
            sizes[tier] += 1
        self._targets = [min(rule.cohort, size) for size in sizes]
        self._started: list[set[int]] = [set() for _ in range(rule.tiers)]
        """Workers that have started in the open round: once each."""
        self._in_flight = [0] * rule.tiers
        self._arrived = [0] * rule.tiers

    @property
    def free(self) -> int:
        """Places that open rounds still have."""
        return sum(self._targets) - sum(map(len, self._started))

    def may_start(self, worker: int) -> bool:
        tier = self.tier_of[worker]
        return len(self._started[tier]) < self._targets[tier] and worker not in self._started[tier]

    def start(self, worker: int, now: float) -> tuple[int, int | None]:
        """The worker's group, and its number of local steps (None: the workload's own)."""
        tier = self.tier_of[worker]
        self._started[tier].add(worker)
        self._in_flight[tier] += 1
        return tier, None

    def ended(self, lease: Lease, now: float, *, accepted: bool) -> None:
        tier = lease.group
        self._in_flight[tier] -= 1
        self._arrived[tier] += accepted
        if self._over(tier) and not self._arrived[tier]:
            self._started[tier].clear()  # nothing came back: the round starts anew

    def dropped(self, lease: Lease) -> None:
        """A contribution that waited for its group is not used after all."""
        tier = lease.group
        self._arrived[tier] -= 1
        if self._over(tier) and not self._arrived[tier]:
            self._started[tier].clear()

    def ready(self, now: float) -> int | None:
        """The first tier whose round is over."""
        return next((t for t in range(len(self._started)) if self._arrived[t] and self._over(t)), None)

    def is_part(self, lease: Lease, group: int) -> bool:
        """A contribution of this lease is part of the group's step."""
        return lease.group == group

    def taken(self, group: int) -> None:
        """The group's contributions became a step: its next round may start."""
        self._started[group].clear()
        self._arrived[group] = 0

    def next_timer(self) -> float | None:
        return None

    def state(self) -> dict[str, Any]:
        """Plain data, for a snapshot."""
        started = [sorted(workers) for workers in self._started]
        return {"started": started, "in_flight": self._in_flight[:], "arrived": self._arrived[:]}

    def load(self, state: dict[str, Any]) -> None:
        self._started = [set(workers) for workers in state["started"]]
        self._in_flight, self._arrived = list(state["in_flight"]), list(state["arrived"])

    def _over(self, tier: int) -> bool:
        return len(self._started[tier]) >= self._targets[tier] and not self._in_flight[tier]
