"""FedCompass's admission: each client gets as many local steps as let it arrive together with others.

``Compass`` is the frozen rule, ``CompassGroups`` what a run knows of it: speeds, and who is expected when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import floor
from typing import TYPE_CHECKING, Any

from fedasync.core.bounds import check_integer, check_real

if TYPE_CHECKING:
    from fedasync.core.admission import Affairs
    from fedasync.core.events import Lease


@dataclass(frozen=True, slots=True)
class Compass:
    """FedCompass (Li et al. 2024): up to ``limit`` leases, of ``least_steps`` to ``most_steps`` local steps each.

    A client joins the group of leases that lets it make the most steps and still arrive when the others do; if none
    fits, it starts a group of its own, with steps chosen so that the fastest clients of a group under way can join it
    later. A group is merged when all of it has arrived, or ``patience`` times its expected duration has passed; who
    arrives later is merged together with the next group. Who waits for its group gets no new lease.

    A client's speed is a moving average of its seconds a step, in which the newest counts ``speed_momentum``. Its first
    lease measures it: ``least_steps``, merged alone (ours, as is the momentum; patience 1.2 as recalled).
    """

    limit: int
    least_steps: int = 20
    most_steps: int = 100
    patience: float = 1.2
    speed_momentum: float = 0.9

    def __post_init__(self) -> None:
        check_integer("concurrency", self.limit, 1)
        check_integer("least_steps", self.least_steps, 1)
        check_integer("most_steps", self.most_steps, self.least_steps)
        check_real("patience", self.patience, 1)
        check_real("speed_momentum", self.speed_momentum, 0, 1, above=True)

    @property
    def most_in_flight(self) -> int:
        return self.limit

    def slots(self, now: Affairs) -> int:
        """How many leases may start now."""
        if now.step is not None:
            return 0
        return self.limit - now.ledger.in_flight - self._waiting(now)

    def refusal(self, now: Affairs) -> str:
        if now.step is not None:
            return f"the server step to version {now.version + 1} is under way"
        waiting = self._waiting(now)
        return f"{now.ledger.in_flight} of {self.limit} leases are in flight, {waiting} workers wait for their group"

    def _waiting(self, now: Affairs) -> int:
        return now.groups.waiting if isinstance(now.groups, CompassGroups) else 0

    def groups(self, profile: Sequence[float] | None) -> CompassGroups:
        """A run's groups; speeds are measured, whatever the profile says."""
        return CompassGroups(self)


@dataclass(slots=True)
class _Group:
    expected_s: float
    latest_s: float
    fastest: float
    """Seconds a step of its fastest member."""
    in_flight: int = 0
    arrived: list[int] = field(default_factory=list)
    """Its workers that have delivered."""


class CompassGroups:
    """Groups under way, and the speeds measured so far."""

    def __init__(self, rule: Compass) -> None:
        self._rule = rule
        self._speeds: dict[int, float] = {}
        self._groups: dict[int, _Group] = {}
        self._next = 0

    @property
    def waiting(self) -> int:
        """Workers that have arrived and wait for the rest of their group."""
        return sum(len(group.arrived) for group in self._groups.values())

    def may_start(self, worker: int) -> bool:
        """Not while it waits for its group."""
        return not any(worker in group.arrived for group in self._groups.values())

    def start(self, worker: int, now: float) -> tuple[int, int | None]:
        """The worker's group, and its number of local steps."""
        speed = self._speeds.get(worker)
        if speed is None:
            group, steps = self._found(_Group(now, float("inf"), 0.0)), self._rule.least_steps
        else:
            group, steps = self._joined(speed, now) or self._founded(speed, now)
            self._groups[group].fastest = min(self._groups[group].fastest, speed)
        self._groups[group].in_flight += 1
        return group, steps

    def _joined(self, speed: float, now: float) -> tuple[int, int] | None:
        """The group under way that allows the most steps, and how many."""
        fitting = [(self._fitting(group.expected_s - now, speed), number) for number, group in self._groups.items()]
        allowed = [(steps, -number) for steps, number in fitting if steps >= self._rule.least_steps]
        allowed = [(steps, number) for steps, number in allowed if steps <= self._rule.most_steps]
        if not allowed:
            return None
        steps, number = max(allowed)
        return -number, steps

    def _founded(self, speed: float, now: float) -> tuple[int, int]:
        """A new group, arriving when the fastest of a group under way could come back to it after a full lease."""
        rule = self._rule
        fitting = [
            self._fitting(group.latest_s + group.fastest * rule.most_steps - now, speed)
            for group in self._groups.values()
            if now < group.latest_s < float("inf")
        ]
        steps = max((steps for steps in fitting if steps <= rule.most_steps), default=rule.most_steps)
        steps = max(steps, rule.least_steps)
        group = _Group(now + steps * speed, now + rule.patience * steps * speed, speed)
        return self._found(group), steps

    def _fitting(self, seconds: float, speed: float) -> int:
        return floor(seconds / speed) if speed > 0 else self._rule.most_steps

    def _found(self, group: _Group) -> int:
        number, self._next = self._next, self._next + 1
        self._groups[number] = group
        return number

    def ended(self, lease: Lease, now: float, *, accepted: bool) -> None:
        if accepted and lease.steps:
            measured, known = (now - lease.admitted_s) / lease.steps, self._speeds.get(lease.worker)
            weight = self._rule.speed_momentum
            self._speeds[lease.worker] = measured if known is None else weight * measured + (1 - weight) * known
        group = self._groups.get(lease.group)
        if group is None:
            return  # too late for its group
        group.in_flight -= 1
        if accepted:
            group.arrived.append(lease.worker)
        if not group.in_flight and not group.arrived:
            del self._groups[lease.group]

    def dropped(self, lease: Lease) -> None:
        """A contribution that waited for its group is not used after all."""
        group = self._groups.get(lease.group)
        if group is None:
            return
        group.arrived.remove(lease.worker)
        if not group.in_flight and not group.arrived:
            del self._groups[lease.group]

    def ready(self, now: float) -> int | None:
        """The first group that has arrived whole, or whose time is over."""
        for number, group in list(self._groups.items()):
            if group.in_flight and now < group.latest_s:
                continue
            if group.arrived:
                return number
            del self._groups[number]  # its time is over, and nobody is there yet
        return None

    def is_part(self, lease: Lease, group: int) -> bool:
        """A contribution of this lease is part of the group's step: its own, and those too late for theirs."""
        return lease.group == group or lease.group not in self._groups

    def taken(self, group: int) -> None:
        """The group's contributions became a step."""
        del self._groups[group]

    def next_timer(self) -> float | None:
        """When the first group's time is over."""
        times = [group.latest_s for group in self._groups.values() if group.latest_s < float("inf")]
        return min(times, default=None)

    def state(self) -> dict[str, Any]:
        """Plain data, for a snapshot."""
        groups = []
        for number, group in self._groups.items():
            latest_s = None if group.latest_s == float("inf") else group.latest_s
            groups.append([number, {**asdict(group), "latest_s": latest_s}])
        return {"speeds": [[w, s] for w, s in self._speeds.items()], "groups": groups, "next": self._next}

    def load(self, state: dict[str, Any]) -> None:
        self._speeds = dict(state["speeds"])
        self._next = state["next"]
        self._groups = {}
        for number, fields in state["groups"]:
            latest_s = float("inf") if fields["latest_s"] is None else fields["latest_s"]
            self._groups[number] = _Group(**{**fields, "latest_s": latest_s, "arrived": list(fields["arrived"])})
