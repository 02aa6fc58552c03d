"""Regions that go dark: all clients of one are offline together, whatever else their availability is."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from fedasync.core.bounds import check_integer
from fedasync.simulation.availability import Calendar, Intervals, OnOff, Presence, Renewal
from fedasync.simulation.groups import check_shares, counts, dealt
from fedasync.simulation.laws import Exponential, Law
from fedasync.simulation.streams import Stream


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
    def __init__(self, dark: Presence) -> None:
        self._dark = dark

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        dark, until = self._dark(client, now)
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
    """Presence of clients in regions: online when both the client and its region are. ``region_of`` each client."""

    def __init__(self, outages: Outages, own: Presence | None, clients: int, seed: int) -> None:
        shares = outages.shares or (1.0,) * outages.regions
        self.region_of = dealt(counts(shares, clients), Stream(seed, "region"))
        self._lit = outages.lit(seed)
        self._own = own

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        lit, lit_until = self._lit(self.region_of[client], now)
        if self._own is None:
            return lit, lit_until
        online, until = self._own(client, now)
        if lit and online:
            return True, min(lit_until, until)
        while not (lit and online):
            # The next moment at which everything that is off now may be on.
            at = max(now if lit else lit_until, now if online else until)
            if at == inf:
                return False, inf
            lit, lit_until = self._lit(self.region_of[client], at)
            online, until = self._own(client, at)
        return False, at


def _check_shares(shares: tuple[float, ...] | None, regions: int) -> None:
    if shares is None:
        return
    if len(shares) != regions:
        raise ValueError(f"outages: {len(shares)} shares for {regions} regions; one each would do")
    check_shares("outages: shares", shares)
