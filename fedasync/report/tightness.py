"""How tight a study's intervals are, and whether it needs more seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fedasync.report.arrangement import Arrangement, Runs, arrange, spoken
from fedasync.report.comparisons import differences, speedups, standing
from fedasync.report.paired import Difference, Speedup, agreeing
from fedasync.report.spec import Report

IN_A_ROW = 2
"""Rounds in a row that must find the intervals tight: one alone stops too often on a spread small by chance."""


@dataclass(frozen=True)
class Until:
    """How tight every interval of a study is to be: ``speedup`` or ``final``, each over the report's baseline.

    relative_half_width: of a speed-up, what the interval's farther end is off the ratio, as a share of it; of a final
    value's paired difference, half the interval as a share of the baseline's mean.
    """

    quantity: Literal["speedup", "final"]
    relative_half_width: float

    def __post_init__(self) -> None:
        if not self.relative_half_width > 0:
            raise ValueError(f"relative_half_width must be > 0, got {self.relative_half_width:g}")


@dataclass(frozen=True)
class Width:
    """A comparison and its relative half width; None where it has no closed interval, and ``open_because`` why.

    Pairs that agree on a difference have no interval yet, but one more seed may give it: infinite, and why.
    """

    comparison: str
    relative_half_width: float | None
    open_because: str = ""


@dataclass(frozen=True)
class Tightness:
    """The comparisons of a study with the widest interval first, and those that more seeds would not close."""

    closed: tuple[Width, ...]
    unclosed: tuple[Width, ...]

    @property
    def widest(self) -> Width | None:
        return self.closed[0] if self.closed else None

    def within(self, relative_half_width: float) -> bool:
        """Whether every closed interval is so tight."""
        return not any(_wider(one, relative_half_width) for one in self.closed)


def _wider(width: Width, relative_half_width: float) -> bool:
    wide = width.relative_half_width or 0.0
    return math.isinf(wide) or wide > relative_half_width


def tightness(runs: Runs, report: Report, quantity: Literal["speedup", "final"]) -> Tightness:
    """The relative half width of every comparison with the report's baseline.

    Of a speed-up, how far the farther end of its interval is off the ratio, as a share of it; of a final value's
    paired difference, half of its interval as a share of the baseline's mean. A speed-up is open where a target was
    missed, or reached at time 0: that seed stays as it is however many are added. Pairs that agree on a difference are
    not tight: that they have no spread is the grid's doing, which times and values lie on.
    """
    shown = arrange(runs, report)
    widths = list(_speedups(shown) if quantity == "speedup" else _finals(shown))
    closed = [one for one in widths if one.relative_half_width is not None]
    # The widest first; of equals, the first of the study.
    closed.sort(key=lambda one: -(one.relative_half_width or 0.0))
    return Tightness(tuple(closed), tuple(one for one in widths if one.relative_half_width is None))


def _speedups(shown: Arrangement) -> Iterator[Width]:
    base, target = shown.baseline(), shown.target()
    for facet in shown.facets:
        for label, judged in speedups(shown, facet, base, target).items():
            yield _ratio_width(_name("speed-up", label, base, shown.facet_title(facet)), judged.found)


def _ratio_width(name: str, found: Speedup) -> Width:
    if found.missed or found.baseline_missed or found.at_start or found.pairs < 2:
        return Width(name, None, found.note() or "too few pairs")
    if agreeing(found):
        return Width(name, math.inf, agreeing(found))
    if found.ratio is None or found.low is None or found.high is None:
        return Width(name, None, found.note())
    farther = max(math.log(found.high / found.ratio), math.log(found.ratio / found.low))
    return Width(name, math.expm1(min(farther, 700.0)))


def _finals(shown: Arrangement) -> Iterator[Width]:
    base, metric = shown.baseline(), shown.metric()
    for facet in shown.facets:
        at = standing(shown, facet, metric)
        known = [value for value in at.values.get(base, {}).values() if value is not None and math.isfinite(value)]
        scale = abs(sum(known) / len(known)) if known else 0.0
        for label, judged in differences(at, base).items():
            yield _difference_width(_name(spoken(metric), label, base, shown.facet_title(facet)), judged.found, scale)


def _difference_width(name: str, found: Difference, scale: float) -> Width:
    if agreeing(found):
        return Width(name, math.inf, agreeing(found))
    if found.low is None or found.high is None:
        return Width(name, None, found.note() or "too few pairs")
    if scale == 0:
        return Width(name, None, "the baseline's mean is 0, so nothing can be relative to it")
    return Width(name, (found.high - found.low) / 2 / scale)


def _name(what: str, label: str, base: str, facet: str) -> str:
    return f"{what} of {label} over {base}{f' ({facet})' if facet else ''}"


@dataclass(frozen=True)
class Round:
    """What the runs of the first ``seeds`` seeds say: a line for the user, and why no seed is added, if so."""

    seeds: int
    tight_in_a_row: int
    said: str
    stop: str | None


def look(runs: Runs, report: Report, until: Until, seeds: int, at_most: int, tight_before: int) -> Round:
    """Look at the runs of the first ``seeds`` seeds, after ``tight_before`` rounds in a row were tight.

    A study that goes on later, or elsewhere, stops at the same seed, as long as it shows no other runs here.
    """
    found = tightness(runs, report, until.quantity)
    in_a_row = tight_before + 1 if found.within(until.relative_half_width) else 0
    said = f"{seeds} seeds: {_widest(found, until.relative_half_width)}"
    return Round(seeds, in_a_row, said, _stop(found, until, seeds, at_most, in_a_row))


def _stop(found: Tightness, until: Until, seeds: int, at_most: int, in_a_row: int) -> str | None:
    wanted = f"± {until.relative_half_width:.1%}"
    if found.widest is None:
        return f"stopped at {seeds} seeds: no comparison has an interval that more seeds would close"
    if in_a_row >= IN_A_ROW:
        return f"stopped at {seeds} seeds: every closed interval is within {wanted}, for the second time in a row"
    if seeds >= at_most:
        wide = sum(_wider(one, until.relative_half_width) for one in found.closed)
        none = sum(math.isinf(one.relative_half_width or 0.0) for one in found.closed)
        without = f", {none} of these without an interval, as their pairs agree" if none else ""
        which = "tight only just now"
        if wide:
            which = f"{wide} of {len(found.closed)} intervals are wider than {wanted}{without}"
        return f"stopped at at_most = {seeds} seeds: {which}"
    return None


def _widest(found: Tightness, wanted: float) -> str:
    left_out = f"; {len(found.unclosed)} left out: {_why(found.unclosed[0])}" if found.unclosed else ""
    if found.widest is None:
        return f"no closed interval{left_out}"
    width = found.widest.relative_half_width or 0.0
    if math.isinf(width):
        return f"not tight (to be {wanted:.1%}): {_why(found.widest)}{left_out}"
    return f"widest interval ± {width:.1%} (to be {wanted:.1%}): {found.widest.comparison}{left_out}"


def _why(width: Width) -> str:
    return f"{width.comparison}: {width.open_because}"
