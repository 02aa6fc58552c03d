"""Admission, the first decision: may a worker start now?

Each rule is a frozen value that says how many leases may start now, ``slots``, and in words why not, ``refusal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from fedasync.core.bounds import check_choice, check_integer
from fedasync.core.compass import Compass, CompassGroups
from fedasync.core.tiers import TierRounds, Tiers

if TYPE_CHECKING:
    from fedasync.core.events import Step
    from fedasync.core.ledger import Ledger

Redispatch = Literal["after_step", "before_step", "next_version"]
Simultaneous = Literal["one_by_one", "together"]


Groups = TierRounds | CompassGroups


class Affairs(Protocol):
    """What an admission rule may look at."""

    version: int
    """Committed steps."""
    round_started: int
    """Leases admitted since the last step."""
    step: Step | None
    """The step that was handed out and is not committed yet."""
    ledger: Ledger
    """How many leases are where."""
    groups: Groups | None
    """The groups of leases that end together, where admission forms some."""


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

    η = 0 is a synchronous system, exactly: the batch of version v is all that may be asked for before v + 1.
    """

    eta: int
    batch: int
    limit: int | None = None

    def __post_init__(self) -> None:
        check_integer("staleness budget: eta", self.eta, 0)
        check_integer("staleness budget: batch", self.batch, 1)
        if self.limit is not None:
            check_integer("staleness budget: limit", self.limit, 1)

    @property
    def most_in_flight(self) -> int:
        budget = (self.eta + 1) * self.batch
        return budget if self.limit is None else min(budget, self.limit)

    def slots(self, now: Affairs) -> int:
        """How many more leases may start (negative when a restart found more running than allowed)."""
        slots = (self.eta + now.version + 1) * self.batch - (now.ledger.accepted + now.ledger.in_flight)
        return slots if self.limit is None else min(slots, self.limit - now.ledger.in_flight)

    def refusal(self, now: Affairs) -> str:
        return (
            f"the staleness budget is spent: {now.ledger.accepted} accepted and {now.ledger.in_flight} in flight "
            f"at version {now.version} (eta = {self.eta}, batch = {self.batch}, limit = {self.limit})"
        )


Admission = Cohort | Concurrency | StalenessBudget | Tiers | Compass
