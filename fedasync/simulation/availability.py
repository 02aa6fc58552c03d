"""When clients are online.

``presence`` says for a client and a time whether it is online then, and until when that stays so. A client's history
is a function of seed and client alone, made as far as somebody looks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from fedasync.simulation.laws import Exponential, Law
from fedasync.simulation.streams import Stream


class Presence(Protocol):
    """Realised availability of one population."""

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        """Online at ``now``?, and the time (> now) at which that changes, infinite if it never does."""
        ...


@dataclass(frozen=True)
class Always:
    """Every client is online for ever."""

    kind: Literal["always"] = "always"

    def presence(self, clients: int, seed: int) -> Presence | None:
        return None


@dataclass(frozen=True)
class OnOff:
    """Each client is online for a time drawn from ``on_s``, offline for one from ``off_s``, and so on.

    It starts online with probability E[on] / (E[on] + E[off]); the first period counts from time 0 (exact for
    exponential laws, which are the default reading of a renewal process).
    """

    on_s: Law = Exponential(3600.0)
    off_s: Law = Exponential(3600.0)
    kind: Literal["on_off"] = "on_off"

    def __post_init__(self) -> None:
        if self.on_s.mean <= 0 or self.off_s.mean <= 0:
            raise ValueError("on_off: on_s and off_s must have means > 0")

    def presence(self, clients: int, seed: int) -> Presence:
        return _Renewal(self, Stream(seed, "availability"))


class _Renewal:
    def __init__(self, law: OnOff, stream: Stream) -> None:
        self._laws = (law.on_s, law.off_s)
        self._share_on = law.on_s.mean / (law.on_s.mean + law.off_s.mean)
        self._stream = stream
        self._changes: dict[int, list[float]] = {}

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        starts_on = self._stream.uniform(client) < self._share_on
        changes = self._changes.setdefault(client, [])
        while not changes or changes[-1] <= now:
            period = len(changes)
            law = self._laws[(period + (not starts_on)) % 2]
            changes.append((changes[-1] if changes else 0.0) + law.quantile(self._stream.uniform(client, period + 1)))
        period = bisect_right(changes, now)
        return (period % 2 == 0) == starts_on, changes[period]


@dataclass(frozen=True)
class Intervals:
    """Explicit times: for each client the [start, end) pairs, in seconds and in order, in which it is online.

    With ``cycle_s`` the whole pattern repeats.
    """

    intervals: tuple[tuple[tuple[float, float], ...], ...]
    cycle_s: float | None = None
    kind: Literal["intervals"] = "intervals"

    def __post_init__(self) -> None:
        for client, pairs in enumerate(self.intervals):
            last = 0.0
            for start, end in pairs:
                if not last <= start < end < inf:
                    raise ValueError(
                        f"intervals: client {client}: [{start}, {end}] must have 0 ≤ start < end, "
                        f"be finite, and come after {last:g}"
                    )
                last = end
            if self.cycle_s is not None and last > self.cycle_s:
                raise ValueError(
                    f"intervals: client {client} is online until {last:g} s, beyond cycle_s = {self.cycle_s}"
                )
        if self.cycle_s is not None and not 0 < self.cycle_s < inf:
            raise ValueError(f"intervals: cycle_s must be > 0 and finite, got {self.cycle_s}")

    def presence(self, clients: int, seed: int) -> Presence:
        if len(self.intervals) != clients:
            raise ValueError(
                f"intervals: {len(self.intervals)} lists of times for {clients} clients; one each would do"
            )
        return _Calendar(self)


class _Calendar:
    """Change times in order; with a cycle those of one turn, the k-th turn's being k·cycle later."""

    def __init__(self, plan: Intervals) -> None:
        self._cycle_s = plan.cycle_s
        self._changes = [_merged(pairs) for pairs in plan.intervals]
        self._starts_on = [False] * len(self._changes)
        if plan.cycle_s is None:
            return
        for client, changes in enumerate(self._changes):
            if changes and changes[-1] == plan.cycle_s:  # online over the turn: the change there is none, or the next's
                self._starts_on[client] = True
                changes.pop()
                changes[:] = changes[1:] if changes[0] == 0 else [0.0, *changes]

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        changes, starts_on, cycle_s = self._changes[client], self._starts_on[client], self._cycle_s
        if not changes:
            return starts_on, inf
        turn = 0.0 if cycle_s is None else _turn(now, cycle_s)
        offset = turn * (cycle_s or 0.0)
        place = bisect_right(changes, now, key=lambda change: offset + change)
        online = (place % 2 == 1) != starts_on
        if place < len(changes):
            return online, offset + changes[place]
        return online, inf if cycle_s is None else (turn + 1) * cycle_s + changes[0]


def _turn(now: float, cycle_s: float) -> float:
    """The k with k·cycle ≤ now < (k + 1)·cycle in the very floats; a quotient alone may be one off."""
    turn = now // cycle_s
    return turn - 1 if turn * cycle_s > now else turn + 1 if (turn + 1) * cycle_s <= now else turn


def _merged(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Change times off→on→off…, with intervals that touch joined."""
    changes: list[float] = []
    for start, end in pairs:
        if changes and changes[-1] == start:
            changes[-1] = end
        else:
            changes += [start, end]
    return changes


Availability = Always | OnOff | Intervals
