"""Admission, the first decision: may a worker start now?

Each rule is a frozen value that says how many leases may start now, ``slots``, and in words why not, ``refusal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Literal, Protocol

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.core.compass import Compass, CompassGroups
from fedasync.core.tiers import TierRounds, Tiers

if TYPE_CHECKING:
    from fedasync.core.events import Step
    from fedasync.core.ledger import Ledger

Redispatch = Literal["after_step", "before_step", "next_version"]
Simultaneous = Literal["one_by_one", "together"]


Groups = TierRounds | CompassGroups
_UNLIMITED = 1 << 62


class Affairs(Protocol):
    """What an admission rule may look at."""

    version: int
    """Committed steps."""
    published: int
    """The version that workers start from."""
    round_started: int
    """Leases admitted since the last step."""
    step: Step | None
    """The step that was handed out and is not committed yet."""
    ledger: Ledger
    """How many leases are where."""
    groups: Groups | None
    """The groups of leases that end together, where admission forms some."""

    @property
    def samples_in_flight(self) -> int:
        """Samples of the leases in flight that have not ended, where admission counts them."""


def _under_way(now: Affairs) -> str:
    return f"the server step to version {now.version + 1} is under way"


@dataclass(frozen=True, slots=True)
class Cohort:
    """A synchronous round: ``size`` clients start from one version, and the round ends with the ``keep`` first.

    keep < size is over-selection (production federated learning starts about 1.3 × keep): those still at work when
    the round ends are cancelled. A round takes each client once: where fewer than ``size`` are there, it waits for the
    others. A failed client is not replaced; a round in which every lease ended takes what it has, and one that has
    nothing starts anew.
    """

    size: int
    keep: int | None = None

    def __post_init__(self) -> None:
        check_integer("cohort size", self.size, 1)
        if self.keep is not None:
            check_integer("keep", self.keep, 1)
        if self.keep is not None and self.keep > self.size:
            raise ValueError(
                f"a cohort of {self.size} can keep 1 to {self.size} results, got keep = {self.keep}: "
                "the round could never end"
            )

    @property
    def target(self) -> int:
        """Results that end the round."""
        return self.size if self.keep is None else self.keep

    @property
    def most_in_flight(self) -> int:
        return self.size

    def slots(self, now: Affairs) -> int:
        """How many leases may start now."""
        return self.size - now.round_started if now.step is None else 0

    def refusal(self, now: Affairs) -> str:
        if now.step is not None:
            return _under_way(now)
        return f"round {now.version + 1} has started all {self.size} of its cohort"


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Up to ``limit`` leases in flight; a slot that becomes free is given out again at once.

    ``redispatch`` says whether the slot of the contribution that completes a buffer is given out ``after_step`` (from
    the new version; mean staleness (n − 1)/K) or ``before_step`` (from the old one; n/K). With ``next_version`` the
    slot of every contribution waits for the step that uses it, so that who delivered goes on from the next version.
    ``simultaneous`` says what happens when several contributions arrive at one instant: ``one_by_one``, each slot given
    out before the next arrival is looked at, or ``together``, all arrivals first.
    """

    limit: int
    redispatch: Redispatch = "after_step"
    simultaneous: Simultaneous = "one_by_one"

    def __post_init__(self) -> None:
        check_integer("concurrency", self.limit, 1)
        check_choice("redispatch", self.redispatch, Redispatch)
        check_choice("simultaneous", self.simultaneous, Simultaneous)
        if self.redispatch == "before_step" and self.simultaneous == "together":
            raise ValueError(
                "slots cannot be given out before the step and after all arrivals of the instant: "
                "redispatch = 'after_step', or simultaneous = 'one_by_one', would do"
            )

    @property
    def most_in_flight(self) -> int:
        return self.limit

    def slots(self, now: Affairs) -> int:
        """How many leases may start now."""
        if now.step is not None and self.redispatch != "before_step":
            return 0
        if self.redispatch == "next_version":
            return self.limit - now.ledger.in_flight - now.ledger.buffered
        return self.limit - now.ledger.in_flight

    def refusal(self, now: Affairs) -> str:
        if now.ledger.in_flight >= self.limit:
            return f"{now.ledger.in_flight} of {self.limit} leases are in flight"
        if now.step is None and self.redispatch == "next_version":
            return (
                f"{now.ledger.buffered} contributions wait for version {now.version + 1}, and their workers with them"
            )
        return _under_way(now)


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """AReaL's gate (Eq. 3): accepted + in flight ≤ (η + v + 1)·B, and at most ``limit`` in flight.

    η = 0 is a synchronous system, exactly: the batch of version v is all that may be asked for before v + 1. η = None
    is no gate: what is in flight is limited, what waits is not.

    A lease may have several ``samples``: the answers to one prompt. ``limit_samples`` bounds those that are still being
    generated, so that an answer's slot is free as soon as it has ended, though its lease is not; a lease starts whole.
    With no other limit there are never more leases than ``limit_samples`` either (those whose answers have all ended
    hold no sample).

    ``in_batches``: a batch starts only when the one before has arrived whole. η = 1 is then one-step overlap: a batch
    is generated while the one before it trains, and no more than one.

    Raises ValueError for what could never admit a lease.
    """

    eta: int | None
    batch: int
    limit: int | None = None
    limit_samples: int | None = None
    samples: int = 1
    in_batches: bool = False

    def __post_init__(self) -> None:
        if self.eta is not None:
            check_integer("staleness budget: eta", self.eta, 0)
        check_integer("staleness budget: batch", self.batch, 1)
        check_integer("staleness budget: samples", self.samples, 1)
        if self.limit is not None:
            check_integer("staleness budget: limit", self.limit, 1)
        if self.limit_samples is not None:
            check_integer("staleness budget: limit_samples", self.limit_samples, 1)
            if self.limit_samples < self.samples:
                raise ValueError(
                    f"staleness budget: limit_samples = {self.limit_samples} never has room for a lease of "
                    f"{self.samples} samples, which starts whole; limit_samples ≥ {self.samples} would do"
                )
        if self.eta is None and self.in_batches:
            raise ValueError("staleness budget: in_batches counts the batches that may start; an eta ≥ 0 would do")
        if self.eta is None and self._most_leases is None:
            raise ValueError("staleness budget: eta = None is no gate; a limit or a limit_samples would do")

    @property
    def _most_leases(self) -> int | None:
        return self.limit_samples if self.limit is None else self.limit

    @property
    def most_in_flight(self) -> int:
        limits = [] if self._most_leases is None else [self._most_leases]
        if self.eta is not None:
            limits.append(self.batch if self.in_batches else (self.eta + 1) * self.batch)
        return min(limits)

    def slots(self, now: Affairs) -> int:
        """How many more leases may start (negative when a restart found more running than allowed)."""
        ledger = now.ledger
        slots = _UNLIMITED
        if self.eta is not None:
            batches = self.eta + now.version + 1
            if self.in_batches:
                batches = min(batches, ledger.accepted // self.batch + 1)
            slots = batches * self.batch - (ledger.accepted + ledger.in_flight)
        if self.limit is not None:
            slots = min(slots, self.limit - ledger.in_flight)
        if self.limit_samples is not None:
            slots = min(slots, (self.limit_samples - now.samples_in_flight) // self.samples)
            if self.limit is None:
                slots = min(slots, self.limit_samples - ledger.in_flight)
        return slots

    def refusal(self, now: Affairs) -> str:
        ledger, most = now.ledger, self._most_leases
        if most is not None and ledger.in_flight >= most:
            return f"{ledger.in_flight} of {most} leases are in flight"
        if self.limit_samples is not None and self.limit_samples - now.samples_in_flight < self.samples:
            return (
                f"{now.samples_in_flight} of {self.limit_samples} samples are being generated, and a lease has "
                f"{self.samples}"
            )
        if self.eta is None:
            return "nothing bounds what may start"
        if self.in_batches and ledger.accepted // self.batch < self.eta + now.version:
            return (
                f"batch {ledger.accepted // self.batch + 1} has started whole, and the next one waits for it "
                f"({ledger.accepted} accepted and {ledger.in_flight} in flight, batch = {self.batch})"
            )
        return (
            f"the staleness budget is spent: {ledger.accepted} accepted and {ledger.in_flight} in flight "
            f"at version {now.version} (eta = {self.eta}, batch = {self.batch}, limit = {self.limit})"
        )


@dataclass(frozen=True, slots=True)
class SyncBudget:
    """What may start between two publications: accepted + in flight ≤ ⌊(p + (1 + extra)·every)·batch⌋.

    p is the published version, ``every`` the versions between two publications. That is verl's rollout_num =
    (1 + s)·k·B − n_stale, with s = ``extra``, k = ``every`` and n_stale what the publication finds in flight and
    waiting: with s = 0 exactly what is trained before the next publication may start, s = 1 with k = 1 is a batch
    ahead. It belongs to a tumbling buffer of ``batch`` and a publication after ``every`` versions at the latest.
    """

    extra: float
    batch: int
    every: int
    limit: int | None = None

    def __post_init__(self) -> None:
        check_real("sync budget: extra", self.extra, 0)
        check_integer("sync budget: batch", self.batch, 1)
        check_integer("sync budget: every", self.every, 1)
        if self.limit is not None:
            check_integer("sync budget: limit", self.limit, 1)

    @property
    def between(self) -> int:
        """⌊(1 + extra)·every·batch⌋, of ``extra`` as it is written: 0.15 of 20 is 3."""
        ahead = self.every * self.batch
        return ahead + floor(self.extra * ahead * (1 + 1e-12))

    @property
    def most_in_flight(self) -> int:
        return self.between if self.limit is None else min(self.between, self.limit)

    def slots(self, now: Affairs) -> int:
        """How many more leases may start (negative when a restart found more running than allowed)."""
        slots = now.published * self.batch + self.between - (now.ledger.accepted + now.ledger.in_flight)
        return slots if self.limit is None else min(slots, self.limit - now.ledger.in_flight)

    def refusal(self, now: Affairs) -> str:
        if self.limit is not None and now.ledger.in_flight >= self.limit:
            return f"{now.ledger.in_flight} of {self.limit} leases are in flight"
        return (
            f"the budget until the next publication is spent: {now.ledger.accepted} accepted and "
            f"{now.ledger.in_flight} in flight since version {now.published} was published "
            f"(extra = {self.extra:g}, batch = {self.batch}, every = {self.every})"
        )


Admission = Cohort | Concurrency | StalenessBudget | SyncBudget | Tiers | Compass
