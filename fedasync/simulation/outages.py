"""Regions that go dark: all clients of one are offline together, whatever else their availability is."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor, gcd, inf
from typing import Literal

from fedasync.core.bounds import check_integer
from fedasync.federated.selection import Presence
from fedasync.simulation.availability import Calendar, Cycle, Intervals, OnOff, Renewal, Times
from fedasync.simulation.groups import check_shares, counts, dealt
from fedasync.simulation.laws import Exponential, Law
from fedasync.streams import Stream

MOST_TURNS = 1000
"""How many turns of client and region are looked through for a moment at which both are on, before asking whether there
is one at all."""


@dataclass(frozen=True)
class OutageTimes:
    """For each region the [start, end) pairs, in seconds and in order, in which it is dark.

    With ``cycle_s`` the whole pattern repeats. ``shares`` of the clients belong to the regions, equal ones by default.
    """

    dark: tuple[Times, ...]
    cycle_s: float | None = None
    shares: tuple[float, ...] | None = None
    kind: Literal["times"] = "times"

    def __post_init__(self) -> None:
        if not self.dark:
            raise ValueError("outages: dark is empty; a list of times for at least one region would do")
        _check_shares(self.shares, len(self.dark))
        try:
            Intervals(self.dark, self.cycle_s)
        except ValueError as error:
            told = (
                str(error).replace("intervals: client", "outages: region").replace("is online until", "is dark until")
            )
            raise ValueError(told.replace("intervals: cycle_s", "outages: cycle_s")) from None

    @property
    def regions(self) -> int:
        return len(self.dark)

    def turn_s(self, within_s: float) -> float:
        """Seconds from one outage to the next, of the busiest region; infinite where nothing repeats."""
        return Intervals(self.dark, self.cycle_s).turn_s(within_s)

    def lit(self, seed: int) -> Presence:
        """The presence of regions instead of clients."""
        return _NotDark(Calendar(self.dark, [self.cycle_s] * self.regions))


class _NotDark:
    def __init__(self, dark: Calendar) -> None:
        self.dark = dark

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        dark, until = self.dark(client, now)
        return not dark, until

    def cycle(self, client: int) -> Cycle | None:
        cycle = self.dark.cycle(client)
        return None if cycle is None else cycle._replace(starts_on=not cycle.starts_on)


@dataclass(frozen=True)
class OutagesOnOff:
    """Each region is up for a time drawn from ``up_s``, dark for one from ``down_s``, and so on.

    It begins up with probability E[up] / (E[up] + E[down]). ``shares`` of the clients belong to the regions, equal ones
    by default.
    """

    regions: int
    up_s: Law = Exponential(86400.0)
    down_s: Law = Exponential(3600.0)
    shares: tuple[float, ...] | None = None
    kind: Literal["on_off"] = "on_off"

    def __post_init__(self) -> None:
        check_integer("outages: regions", self.regions, 1)
        if self.up_s.mean <= 0 or self.down_s.mean <= 0:
            raise ValueError("outages: up_s and down_s must have means > 0")
        _check_shares(self.shares, self.regions)

    def turn_s(self, within_s: float) -> float:
        """Mean seconds of a turn, up and dark, as of ``OnOff``."""
        return OnOff(self.up_s, self.down_s).turn_s(within_s)

    def lit(self, seed: int) -> Presence:
        """The presence of regions instead of clients."""
        return Renewal(OnOff(self.up_s, self.down_s), Stream(seed, "outages"))


Outages = OutageTimes | OutagesOnOff


class InRegions:
    """Presence of clients in regions: online when both the client and its region are. ``region_of`` each client.

    Where the two do not meet in ``MOST_TURNS`` turns, what is told of one that is offline is the time until which it is
    known to stay so: infinite where both repeat themselves and never meet, else a time to ask again.
    """

    def __init__(self, outages: Outages, own: Presence | None, clients: int, seed: int) -> None:
        if outages.regions > clients:
            raise ValueError(
                f"outages: {outages.regions:,} regions for {clients:,} clients; as many regions as clients, or fewer, "
                "would do"
            )
        shares = outages.shares or (1.0,) * outages.regions
        self.region_of = dealt(counts(shares, clients), Stream(seed, "region"))
        self._lit = outages.lit(seed)
        self._own = own
        self._never: dict[int, bool] = {}

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        lit, lit_until = self._lit(self.region_of[client], now)
        if self._own is None:
            return lit, lit_until
        online, until = self._own(client, now)
        if lit and online:
            return True, min(lit_until, until)
        at = now
        for _ in range(MOST_TURNS):
            # The next moment at which everything that is off now may be on.
            at = max(at if lit else lit_until, at if online else until)
            if at == inf:
                return False, inf
            lit, lit_until = self._lit(self.region_of[client], at)
            online, until = self._own(client, at)
            if lit and online:
                return False, at
        if client not in self._never:
            self._never[client] = never_meet(_cycle(self._lit, self.region_of[client]), _cycle(self._own, client))
        return False, inf if self._never[client] else at


def never_meet(one: Cycle | None, other: Cycle | None) -> bool:
    """It is certain that the two are never on together, however often they turn. None, no cycle: nothing is certain.

    The turns of both begin apart by every multiple of the greatest common divisor of their lengths, and by nothing
    else; [a, b) and [c, d) of them overlap when such a multiple lies between c − b and d − a.
    """
    if one is None or other is None:
        return False
    p, q = one.length, other.length
    step = Fraction(gcd(p.numerator * q.denominator, q.numerator * p.denominator), p.denominator * q.denominator)
    theirs = list(other.online())
    return not any((floor((c - b) / step) + 1) * step < d - a for a, b in one.online() for c, d in theirs)


def _cycle(presence: Presence | None, client: int) -> Cycle | None:
    """What repeats; None for a presence of which that is not known."""
    return presence.cycle(client) if isinstance(presence, (_NotDark, Calendar, Renewal)) else None


def _check_shares(shares: tuple[float, ...] | None, regions: int) -> None:
    if shares is None:
        return
    if len(shares) != regions:
        raise ValueError(f"outages: {len(shares)} shares for {regions} regions; one each would do")
    check_shares("outages: shares", shares)
