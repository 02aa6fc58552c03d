"""Regions that go dark: all clients of one are offline together, whatever else their availability is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import floor, gcd, inf
from typing import Literal, NamedTuple

from fedasync.core.bounds import check_integer
from fedasync.simulation.availability import Calendar, Intervals, OnOff, Presence, Renewal
from fedasync.simulation.groups import check_shares, counts, dealt
from fedasync.simulation.laws import Exponential, Law
from fedasync.simulation.streams import Stream

MOST_TURNS = 1000
"""How many turns of client and region are looked through for a moment at which both are on, before asking whether there
is one at all."""


@dataclass(frozen=True)
class OutageTimes:
    """For each region the [start, end) pairs, in seconds and in order, in which it is dark.

    With ``cycle_s`` the whole pattern repeats. ``shares`` of the clients belong to the regions, equal ones by default.
    """

    dark: tuple[tuple[tuple[float, float], ...], ...]
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

    def lit(self, seed: int) -> Presence:
        """The presence of regions instead of clients."""
        return _NotDark(Calendar(self.dark, [self.cycle_s] * self.regions))


class _NotDark:
    def __init__(self, dark: Calendar) -> None:
        self.dark = dark

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        dark, until = self.dark(client, now)
        return not dark, until


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


class Cycle(NamedTuple):
    """A presence that repeats itself: its change times within a turn, whether it is on before the first, the turn.

    In seconds, as the decimals that a file has: 0.3 is three times 0.1.
    """

    changes: tuple[Fraction, ...]
    starts_on: bool
    length: Fraction

    def online(self) -> Iterator[tuple[Fraction, Fraction]]:
        """The [start, end) pairs of the turn from 0 on."""
        edges = [Fraction(0), *self.changes, self.length]
        first = 0 if self.starts_on else 1
        yield from zip(edges[first::2], edges[first + 1 :: 2], strict=False)


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
    """What repeats: a calendar with a cycle, and turns whose two lengths are always the same."""
    match presence:
        case _NotDark():
            cycle = _cycle(presence.dark, client)
            return None if cycle is None else cycle._replace(starts_on=not cycle.starts_on)
        case Calendar():
            cycle_s = presence._cycles_s[client]
            if cycle_s is None:
                return None
            changes = tuple(map(_decimal, presence._changes[client]))
            return Cycle(changes, presence._starts_on[client], _decimal(cycle_s))
        case Renewal():
            on_s, off_s = map(_only_value, presence._laws)
            if on_s is None or off_s is None:
                return None
            starts_on, _ = presence(client, 0.0)
            return Cycle((_decimal(on_s if starts_on else off_s),), starts_on, _decimal(on_s) + _decimal(off_s))
    return None


def _only_value(law: Law) -> float | None:
    """The value of a law that has but one."""
    least, most = law.quantile(2.0**-53), law.quantile(1 - 2.0**-53)
    return least if least == most else None


def _decimal(seconds: float) -> Fraction:
    return Fraction(repr(float(seconds)))


def _check_shares(shares: tuple[float, ...] | None, regions: int) -> None:
    if shares is None:
        return
    if len(shares) != regions:
        raise ValueError(f"outages: {len(shares)} shares for {regions} regions; one each would do")
    check_shares("outages: shares", shares)
