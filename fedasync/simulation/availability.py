"""When clients are online.

``presence`` says for a client and a time whether it is online then, and until when that stays so. A client's history
is a function of seed and client alone, made as far as somebody looks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import atan, cos, floor, inf, log, pi, sin, sqrt
from typing import Literal, NamedTuple

from fedasync.core.bounds import check_integer, check_real
from fedasync.federated.selection import Presence
from fedasync.simulation.laws import Constant, Exponential, Law, Values
from fedasync.simulation.recorded import read_availability
from fedasync.streams import Stream

Labels = Sequence[Sequence[int]]
"""For each client the labels that occur among its samples."""

Times = tuple[tuple[float, ...], ...]
"""The [start, end) pairs (s) of one client."""


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
        pairs = zip(edges[first::2], edges[first + 1 :: 2], strict=False)
        yield from ((start, end) for start, end in pairs if start < end)


@dataclass(frozen=True)
class Always:
    """Every client is online for ever."""

    kind: Literal["always"] = "always"

    def turn_s(self, within_s: float) -> float:
        return inf

    def presence(self, clients: int, seed: int, labels: Labels | None = None) -> Presence | None:
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

    def turn_s(self, within_s: float) -> float:
        """Mean seconds of a turn, a period on and one off, each counted up to ``within_s``.

        So a law whose mean lies in what is hardly ever drawn does not hide that its periods are short.
        """
        return sum(sum(min(law.quantile(u), within_s) for u in _GRID) / len(_GRID) for law in (self.on_s, self.off_s))

    def presence(self, clients: int, seed: int, labels: Labels | None = None) -> Presence:
        return Renewal(self, Stream(seed, "availability"))


class Renewal:
    """On and off in turns, by the laws of an ``OnOff``."""

    def __init__(self, law: OnOff, stream: Stream) -> None:
        self._laws = (law.on_s, law.off_s)
        self._share_on = law.on_s.mean / (law.on_s.mean + law.off_s.mean)
        self._stream = stream
        self._known: dict[int, tuple[bool, list[float]]] = {}

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        if client not in self._known:
            self._known[client] = self._stream.uniform(client) < self._share_on, []
        starts_on, changes = self._known[client]
        while not changes or changes[-1] <= now:
            period = len(changes)
            law = self._laws[(period + (not starts_on)) % 2]
            changes.append((changes[-1] if changes else 0.0) + law.quantile(self._stream.uniform(client, period + 1)))
        period = bisect_right(changes, now)
        return (period % 2 == 0) == starts_on, changes[period]

    def cycle(self, client: int) -> Cycle | None:
        """What repeats: turns whose two lengths are always the same. None where they are not."""
        on_s, off_s = map(_only_value, self._laws)
        if on_s is None or off_s is None:
            return None
        starts_on, _ = self(client, 0.0)
        return Cycle((_decimal(on_s if starts_on else off_s),), starts_on, _decimal(on_s) + _decimal(off_s))


@dataclass(frozen=True)
class Intervals:
    """Explicit times: for each client the [start, end) pairs, in seconds and in order, in which it is online.

    With ``cycle_s`` the whole pattern repeats.
    """

    intervals: tuple[Times, ...]
    cycle_s: float | None = None
    kind: Literal["intervals"] = "intervals"

    def __post_init__(self) -> None:
        for client, pairs in enumerate(self.intervals):
            last = 0.0
            for pair in pairs:
                if len(pair) != 2:
                    raise ValueError(f"intervals: client {client}: got {list(pair)}; a pair [start, end] would do")
                start, end = pair
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

    def turn_s(self, within_s: float) -> float:
        """Seconds from one time online to the next, of the busiest client; infinite where nothing repeats."""
        return _shortest_s(self.intervals, [self.cycle_s] * len(self.intervals))

    def presence(self, clients: int, seed: int, labels: Labels | None = None) -> Presence:
        if len(self.intervals) != clients:
            raise ValueError(
                f"intervals: {len(self.intervals)} lists of times for {clients} clients; one each would do"
            )
        return Calendar(self.intervals, [self.cycle_s] * clients)


class Calendar:
    """Change times in order; with a cycle those of one turn, the k-th turn's being k·cycle later.

    Each client has its own cycle (s), or none.
    """

    def __init__(self, intervals: Sequence[Sequence[Sequence[float]]], cycles_s: Sequence[float | None]) -> None:
        self._cycles_s = cycles_s
        self._changes = [_merged(pairs) for pairs in intervals]
        self._starts_on = [False] * len(self._changes)
        for client, (changes, cycle_s) in enumerate(zip(self._changes, cycles_s, strict=True)):
            if changes and changes[-1] == cycle_s:  # online over the turn: the change there is none, or the next's
                self._starts_on[client] = True
                changes.pop()
                changes[:] = changes[1:] if changes[0] == 0 else [0.0, *changes]

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        changes, starts_on, cycle_s = self._changes[client], self._starts_on[client], self._cycles_s[client]
        if not changes:
            return starts_on, inf
        turn = 0.0 if cycle_s is None else _turn(now, cycle_s)
        offset = turn * (cycle_s or 0.0)
        place = bisect_right(changes, now, key=lambda change: offset + change)
        online = (place % 2 == 1) != starts_on
        if place < len(changes):
            return online, offset + changes[place]
        return online, inf if cycle_s is None else (turn + 1) * cycle_s + changes[0]

    def cycle(self, client: int) -> Cycle | None:
        """One turn of a client; None where it does not repeat."""
        cycle_s = self._cycles_s[client]
        if cycle_s is None:
            return None
        return Cycle(tuple(map(_decimal, self._changes[client])), self._starts_on[client], _decimal(cycle_s))


@dataclass(frozen=True)
class ByLabels:
    """Clients with other data are online more or less often: p = p_min + (1 − p_min)·min(label)/(classes − 1).

    In every slot of ``slot_s`` seconds a client is online with its own p, independently of the other slots. MIFA (Gu et
    al., NeurIPS 2021) draws so in every round, with 10 classes; there it makes plain averaging fail. ``classes`` is one
    more than the largest label when not given. Needs a workload with ``client_labels``.
    """

    p_min: float
    slot_s: float
    classes: int | None = None
    kind: Literal["by_labels"] = "by_labels"

    def __post_init__(self) -> None:
        check_real("by_labels: p_min", self.p_min, 0, 1, above=True)
        check_real("by_labels: slot_s", self.slot_s, 0, above=True)
        if self.classes is not None:
            check_integer("by_labels: classes", self.classes, 2)

    def turn_s(self, within_s: float) -> float:
        """Mean seconds of a run of slots on and one off, at p = 1/2, where it is shortest: 1/p + 1/(1 − p) slots."""
        return 4 * self.slot_s

    def shares(self, labels: Labels) -> list[float]:
        """The share of slots in which each client is online. Raises ValueError for labels that do not fit."""
        for client, own in enumerate(labels):
            if not len(own) or min(own) < 0:
                raise ValueError(f"by_labels: client {client} has labels {list(own)}; at least one, each ≥ 0, would do")
        largest = max(max(own) for own in labels)
        classes = max(2, largest + 1) if self.classes is None else self.classes
        if largest >= classes:
            raise ValueError(
                f"by_labels: classes = {classes}, but a client has label {largest}; {largest + 1} would do"
            )
        rarest = [min(own) for own in labels]
        return [1.0 if k == classes - 1 else float(self.p_min + (1 - self.p_min) * k / (classes - 1)) for k in rarest]

    def presence(self, clients: int, seed: int, labels: Labels | None = None) -> Presence:
        if labels is None:
            raise ValueError(
                "by_labels: a workload that says its clients' labels (client_labels) is needed; this has none"
            )
        if len(labels) != clients:
            raise ValueError(f"by_labels: the workload gives labels of {len(labels)} clients, but has {clients}")
        return _Slots(self.shares(labels), self.slot_s, Stream(seed, "availability"))


class _Slots:
    """Independent slots as what they make together: runs of slots on and off in turns, of geometric lengths."""

    def __init__(self, shares: Sequence[float], slot_s: float, stream: Stream) -> None:
        self._shares, self._slot_s, self._stream = shares, slot_s, stream
        self._known: dict[int, tuple[bool, list[float]]] = {}

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        share = self._shares[client]
        if share == 1:
            return True, inf
        if client not in self._known:
            self._known[client] = self._stream.uniform(client) < share, []
        starts_on, changes = self._known[client]  # in slots
        while not changes or changes[-1] * self._slot_s <= now:
            stays = share if (len(changes) % 2 == 0) == starts_on else 1 - share
            run = 1 + floor(log(self._stream.uniform(client, len(changes) + 1)) / log(stays))
            changes.append((changes[-1] if changes else 0) + run)
        period = bisect_right(changes, now, key=lambda slots: slots * self._slot_s)
        return (period % 2 == 0) == starts_on, changes[period] * self._slot_s


@dataclass(frozen=True)
class Daily:
    """A client goes on and off at random, at rates that follow a daily cycle.

    With the target s(t) = share + swing·cos(2π(t − peak_s + phase)/day_s), one that is off comes on at rate
    s(t)/turnover_s, one that is on leaves at rate (1 − s(t))/turnover_s. So the expected share online is the cycle seen
    through a low-pass filter, exactly, from time 0 on (ours; ω = 2π/day_s):

        share + swing/√(1 + ω²·turnover²)·cos(ω(t − peak_s + phase) − atan(ω·turnover)).

    ``phase_s`` is drawn once a client: its clock's lead over the server's, as of a time zone.
    """

    share: float = 0.5
    swing: float = 0.3
    turnover_s: float = 3600.0
    day_s: float = 86400.0
    peak_s: float = 0.0
    phase_s: Law = Constant(0.0)
    kind: Literal["daily"] = "daily"

    def __post_init__(self) -> None:
        check_real("daily: share", self.share, 0, 1, above=True, below=True)
        check_real("daily: swing", self.swing, 0, min(self.share, 1 - self.share))
        check_real("daily: turnover_s", self.turnover_s, 0, above=True)
        check_real("daily: day_s", self.day_s, 0, above=True)
        check_real("daily: peak_s", self.peak_s, 0)

    def expected_share(self, t: float, phase_s: float = 0.0) -> float:
        """P(online) at time t (s) of a client of the given phase (s)."""
        omega = 2 * pi / self.day_s
        lag = omega * self.turnover_s
        angle = omega * (t - self.peak_s + phase_s) - atan(lag)
        return self.share + self.swing / sqrt(1 + lag * lag) * cos(angle)

    def turn_s(self, within_s: float) -> float:
        """Mean seconds of a period on and one off, where there is no swing."""
        return self.turnover_s / self.share + self.turnover_s / (1 - self.share)

    def presence(self, clients: int, seed: int, labels: Labels | None = None) -> Presence:
        if isinstance(self.phase_s, Values):
            if len(self.phase_s.values) != clients or self.phase_s.by != "client":
                raise ValueError(
                    f"daily: phase_s: {len(self.phase_s.values)} values for {clients} clients; one each would do"
                )
            return _Days(self, self.phase_s.values.__getitem__, Stream(seed, "availability"))
        stream, law = Stream(seed, "availability phase"), self.phase_s
        return _Days(self, lambda client: law.quantile(stream.uniform(client)), Stream(seed, "availability"))


class _Days:
    """Change times of each client as far as somebody looked, like ``Renewal``, from rates that change with time."""

    def __init__(self, law: Daily, phase_s: Callable[[int], float], stream: Stream) -> None:
        self._law, self._phase_s, self._stream = law, phase_s, stream
        self._known: dict[int, tuple[float, bool, list[float]]] = {}

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        if client not in self._known:
            phase = self._phase_s(client)
            self._known[client] = phase, self._stream.uniform(client) < self._law.expected_share(0.0, phase), []
        phase, starts_on, changes = self._known[client]
        while not changes or changes[-1] <= now:
            period = len(changes)
            start_s, on = (changes[-1] if changes else 0.0), (period % 2 == 0) == starts_on
            changes.append(self._next(start_s, phase, on, -log(1.0 - self._stream.uniform(client, period + 1))))
        period = bisect_right(changes, now)
        return (period % 2 == 0) == starts_on, changes[period]

    def _next(self, start_s: float, phase_s: float, on: bool, hazard: float) -> float:
        """When the integrated rate since ``start_s`` reaches ``hazard``: by bisection, to the last digit."""
        law = self._law
        level, swing = (1 - law.share, -law.swing) if on else (law.share, law.swing)
        omega = 2 * pi / law.day_s
        offset = phase_s - law.peak_s
        wanted, begun = hazard * law.turnover_s, sin(omega * (start_s + offset))
        low, high = start_s, start_s + (wanted + 2 * law.swing / omega) / level
        while low < (middle := (low + high) / 2) < high:
            grown = level * (middle - start_s) + swing / omega * (sin(omega * (middle + offset)) - begun)
            low, high = (middle, high) if grown < wanted else (low, middle)
        return high


@dataclass(frozen=True)
class AvailabilityFile:
    """Times online of recorded clients (FedScale's behaviour traces), from CSV or Parquet.

    Columns ``client``, ``active_s``, ``inactive_s``, ``finish_time_s``, a row for each time that a client is online:
    [active_s, inactive_s), repeated with the period ``finish_time_s``. Recorded clients are dealt to ours in order,
    again from the first when there are more of ours.
    """

    file: str
    kind: Literal["file"] = "file"

    def turn_s(self, within_s: float) -> float:
        """Seconds from one time online to the next, of the busiest recorded client."""
        return _shortest_s(*read_availability(self.file))

    def presence(self, clients: int, seed: int, labels: Labels | None = None) -> Presence:
        intervals, cycles_s = read_availability(self.file)
        recorded = len(intervals)
        return Calendar(
            [intervals[client % recorded] for client in range(clients)],
            [cycles_s[client % recorded] for client in range(clients)],
        )


def _turn(now: float, cycle_s: float) -> float:
    """The k with k·cycle ≤ now < (k + 1)·cycle in the very floats; a quotient alone may be one off."""
    turn = now // cycle_s
    return turn - 1 if turn * cycle_s > now else turn + 1 if (turn + 1) * cycle_s <= now else turn


_GRID = [(k + 0.5) / 256 for k in range(256)]


def _shortest_s(intervals: Sequence[Sequence[Sequence[float]]], cycles_s: Sequence[float | None]) -> float:
    turns = zip(intervals, cycles_s, strict=True)
    return min((cycle_s / len(own) for own, cycle_s in turns if cycle_s is not None and own), default=inf)


def _only_value(law: Law) -> float | None:
    """The value of a law that has but one."""
    least, most = law.quantile(2.0**-53), law.quantile(1 - 2.0**-53)
    return least if least == most else None


def _decimal(seconds: float) -> Fraction:
    return Fraction(repr(float(seconds)))


def _merged(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Change times off→on→off…, with intervals that touch joined."""
    changes: list[float] = []
    for start, end in pairs:
        if changes and changes[-1] == start:
            changes[-1] = end
        else:
            changes += [start, end]
    return changes


Availability = Always | OnOff | Daily | ByLabels | Intervals | AvailabilityFile
