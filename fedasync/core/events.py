"""What goes in and out of the coordinator: leases, and the events that a runtime acts on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fedasync.core.publication import InFlight


class Lease(NamedTuple):
    """The permission and duty to do one piece of work from a base version."""

    id: int
    worker: int
    base_version: int
    admitted_s: float
    deadline_s: float | None = None
    group: int = 0
    """Leases of one group end together (``Tiers``, ``Compass``)."""
    steps: int | None = None
    """Local steps that the worker is to make; None leaves them to the workload."""


class Arrival(NamedTuple):
    """An accepted contribution: its lease, and when and at which version it was delivered."""

    lease: Lease
    delivered_s: float
    delivered_version: int


class Step(NamedTuple):
    """What the next version is made of.

    ``entering`` are consumed by this step, in the order in which the update sees them; ``window`` and ``leaving`` are
    the lease numbers inside a sliding window after the step, and those that it pushes out. ``undrafted`` arrived beyond
    a quota: they are consumed too, behind ``entering``.
    """

    version: int
    """The version that the step starts from; committing it makes version + 1."""
    entering: tuple[Arrival, ...]
    window: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    undrafted: tuple[Arrival, ...] = ()
    time_s: float = 0.0
    """When it became ready."""

    def staleness(self, arrival: Arrival) -> int:
        """τ: versions between the contribution's base and the version that it is applied to."""
        return self.version - arrival.lease.base_version


@dataclass(frozen=True, slots=True)
class Accepted:
    """The contribution that was delivered waits in the buffer now."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The contribution is not used, and the model does not change; ``ignored`` when its lease had ended before."""

    lease_id: int
    reason: str
    ignored: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    lease: Lease
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The worker may stop: nobody waits for this lease any more."""

    lease: Lease
    reason: str


class StepReady(NamedTuple):
    """Apply the strategy's update to these contributions, then ``commit``."""

    step: Step


class Published(NamedTuple):
    version: int
    in_flight: InFlight


Event = Accepted | Rejected | Failed | Cancelled | StepReady | Published
