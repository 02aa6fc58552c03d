"""Comparisons paired by seed: ratios of times, differences of values, their intervals, and what is within noise.

A pair is two runs of one seed in one facet: they met the same clients and the same luck (common random numbers), so
what both met alike drops out of the comparison. `docs/statistics.md` says why each interval was chosen and what it
covers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

RESAMPLES = 9_999
STREAM = "report.bootstrap"
"""The name that seeds the resampling: the same pairs, in the order of their seeds, give the same interval."""
FEWEST_FOR_BCA = 5
"""Below, the acceleration of BCa would rest on four jackknife values or fewer, and the percentile interval stands."""
ALPHA = 0.05

Verdict = Literal["clear", "weak", "within noise", "no interval"]
"""``clear``: the interval excludes "no difference", and so does Holm's test among the facet's comparisons. ``weak``:
only the interval does. ``within noise``: the interval contains it. ``no interval``: fewer than two pairs, or pairs that
agree on a difference, which say nothing of how far it may be off."""

_LARGEST_LOG = 700.0
"""Two seeds far apart give an interval whose end is no float any more."""


@dataclass(frozen=True)
class Missed:
    """A target that a run had not reached by ``until_s``, when it ended: its time is known to be longer.

    A run that ``diverged`` never reaches it, so any ``until_s`` bounds its time.
    """

    until_s: float
    diverged: bool = False


Time = float | Missed | None
"""When a run reached its target (s), or until when it had not; None where nothing is known."""


@dataclass(frozen=True)
class Spread:
    """The mean of one number a seed, and how far it may be off.

    t, bootstrap: two-sided Student-t and bootstrap intervals; None for one value, and for values that agree on a mean
        other than 0: a width of 0 would be that of the grid which they lie on.
    p: two-sided p-value of the paired t-test of "the mean is 0"; None where there is no interval.
    """

    mean: float
    count: int
    t: tuple[float, float] | None
    bootstrap: tuple[float, float] | None
    p: float | None

    @property
    def low(self) -> float | None:
        """The lower end of the two intervals: the wider stands, since the bootstrap's is too short for few seeds."""
        return None if self.t is None or self.bootstrap is None else min(self.t[0], self.bootstrap[0])

    @property
    def high(self) -> float | None:
        return None if self.t is None or self.bootstrap is None else max(self.t[1], self.bootstrap[1])


def spread(values: Sequence[float], level: float = 0.95) -> Spread:
    """Mean of paired differences with its Student-t and its bootstrap interval.

    The bootstrap (Efron 1987) resamples seeds: BCa from `FEWEST_FOR_BCA` values on, percentile below. Its generator is
    seeded by `STREAM`, so the interval is a function of the values. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("spread: no values; give one or more")
    return _spread(tuple(map(float, values)), level)


@lru_cache(maxsize=4096)
def _spread(values: tuple[float, ...], level: float) -> Spread:
    from scipy.stats import t

    sample, n = np.array(values), len(values)
    mean = float(sample.mean())
    if mean < 0:
        # "A over B" is "B over A" mirrored, to the last digit: rounding decides ties among resamples otherwise.
        other = _spread(tuple(-value for value in values), level)
        return Spread(mean, n, _mirrored(other.t), _mirrored(other.bootstrap), other.p)
    if n == 1:
        return Spread(mean, 1, None, None, None)
    error = float(sample.std(ddof=1)) / math.sqrt(n)
    if error <= 1e-12 * max(1.0, abs(mean)):  # rounding, no spread
        if abs(mean) > 1e-12:
            return Spread(mean, n, None, None, None)
        return Spread(mean, n, (mean, mean), (mean, mean), 1.0)
    half = float(t.ppf((1 + level) / 2, n - 1)) * error
    p = 2 * float(t.sf(abs(mean) / error, n - 1))
    return Spread(mean, n, (mean - half, mean + half), _bootstrap(sample, level), p)


def _mirrored(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (-ends[1], -ends[0])


def _bootstrap(sample: np.ndarray, level: float) -> tuple[float, float]:
    from scipy.stats import bootstrap

    def interval(method: str) -> tuple[float, float]:
        drawn = bootstrap(
            (sample,),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=level,
            method=method,
            random_state=np.random.default_rng(list(STREAM.encode())),
        ).confidence_interval
        return float(drawn.low), float(drawn.high)

    found = interval("BCa" if len(sample) >= FEWEST_FOR_BCA else "percentile")
    return found if all(map(math.isfinite, found)) else interval("percentile")


@dataclass(frozen=True)
class Speedup:
    """How many times sooner a series is than its baseline, over seeds both ran.

    ratio: geometric mean of t_baseline / t_series over ``pairs`` seeds; None where there are none.
    bound: ``=``; or ``≥`` where the baseline had not reached the target in ``bounded`` of the pairs, whose ratio is
        then at least (its run's length) / t_series; or ``≤`` where the series had not.
    low, high: the wider of the Student-t and the bootstrap interval of the log ratio; None for fewer than two pairs,
        and where all pairs agree on a ratio other than 1. A bound is open to its side: ``high`` is infinite for ``≥``,
        ``low`` is 0 for ``≤``.
    t, bootstrap: the two intervals by themselves, of the ratios and bounds as they stand.
    p: of "no difference", by the paired t-test; for a bound of the side that it leaves.
    seeds: seeds both ran. missed, baseline_missed: of these, how many the series, and the baseline, did not reach
        the target in. diverged, baseline_diverged: how many of those runs diverged. at_start: in how many one of them
        had reached it at time 0, which has no ratio.
    unmatched: the seeds that only one of the two ran.
    """

    ratio: float | None
    low: float | None
    high: float | None
    pairs: int
    seeds: int
    missed: int
    baseline_missed: int
    at_start: int
    unmatched: tuple[int, ...]
    bound: Literal["=", "≥", "≤"] = "="
    bounded: int = 0
    t: tuple[float, float] | None = None
    bootstrap: tuple[float, float] | None = None
    p: float | None = None
    diverged: int = 0
    baseline_diverged: int = 0

    @property
    def contains_none(self) -> bool | None:
        """Whether the interval contains 1, "as fast"; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= 1.0 <= self.high

    def note(self) -> str:
        """What the ratio leaves out or only bounds, in words; empty where there is nothing to say."""
        parts = []
        if self.seeds == 0:
            parts.append("no seed in common with the baseline")
        if self.missed:
            parts.append(f"{self.missed} of {self.seeds} seeds did not reach{_of_these(self.diverged)}")
        if self.baseline_missed:
            lost = _of_these(self.baseline_diverged)
            parts.append(f"baseline: {self.baseline_missed} of {self.seeds} did not reach{lost}")
        if self.at_start:
            parts.append(f"{self.at_start} of {self.seeds} reached at time 0")
        parts.append(agreeing(self))
        if self.seeds:
            parts.append(without_partner(self.unmatched))
        return "; ".join(filter(None, parts))


def _of_these(diverged: int) -> str:
    return f", {diverged} of these diverged" if diverged else ""


def agreeing(found: Speedup | Difference) -> str:
    """Why several pairs give no interval; empty where they give one, and for fewer than two."""
    return f"no interval: {found.pairs} pairs agree" if found.pairs > 1 and found.contains_none is None else ""


def without_partner(seeds: Sequence[int]) -> str:
    """``seeds 3, 5 without a partner``; empty for none."""
    named = ", ".join(map(str, seeds))
    return f"seed{'s' if len(seeds) > 1 else ''} {named} without a partner" if seeds else ""


def paired_speedup(times_s: Mapping[int, Time], baseline_s: Mapping[int, Time], level: float = 0.95) -> Speedup:
    """Speed-up from times by seed, paired by seed.

    The mean and its interval are taken of log ratios, where "twice as fast" and "half as fast" lie equally far from 1.
    A seed in which one of the two missed the target bounds its ratio. Where all such seeds bound it from the same
    side, so is the mean bounded, and the interval's end on the other side holds for the true mean too; where they
    point to both sides nothing follows, and the mean is of the seeds in which both reached it. Seeds in which both
    missed it say nothing about the ratio. What is left out is counted. A run that diverged is one that missed.
    """
    both = sorted(times_s.keys() & baseline_s.keys())
    exact: list[float] = []
    at_least: list[float] = []
    at_most: list[float] = []
    missed = baseline_missed = diverged = baseline_diverged = at_start = 0
    for seed in both:
        own, other = times_s[seed], baseline_s[seed]
        own_missed, other_missed = not isinstance(own, float | int), not isinstance(other, float | int)
        missed += own_missed
        baseline_missed += other_missed
        diverged += isinstance(own, Missed) and own.diverged
        baseline_diverged += isinstance(other, Missed) and other.diverged
        own_s, other_s = _known_s(own), _known_s(other)
        if (own_missed and other_missed) or own_s is None or other_s is None:
            continue
        if own_s <= 0 or other_s <= 0:
            at_start += 1
            continue
        chosen = at_least if other_missed else at_most if own_missed else exact
        chosen.append(math.log(other_s) - math.log(own_s))
    bound: Literal["=", "≥", "≤"] = "="
    if at_least and not at_most:
        bound = "≥"
    elif at_most and not at_least:
        bound = "≤"
    used = exact + at_least + at_most if bound != "=" else exact
    ratio = low = high = p = t = drawn = None
    if used:
        found = spread(used, level)
        ratio, p = _exp(found.mean), found.p
        low = None if found.low is None else _exp(found.low)
        high = None if found.high is None else _exp(found.high)
        t = found.t and (_exp(found.t[0]), _exp(found.t[1]))
        drawn = found.bootstrap and (_exp(found.bootstrap[0]), _exp(found.bootstrap[1]))
        if bound == "≥" and low is not None:
            high, p = math.inf, p if found.mean > 0 else 1.0
        if bound == "≤" and high is not None:
            low, p = 0.0, p if found.mean < 0 else 1.0
    unmatched = tuple(sorted(times_s.keys() ^ baseline_s.keys()))
    counts = (len(used), len(both), missed, baseline_missed, at_start)
    bounded = len(at_least + at_most) if bound != "=" else 0
    lost = (diverged, baseline_diverged)
    return Speedup(ratio, low, high, *counts, unmatched, bound, bounded, t, drawn, p, *lost)


def _known_s(time: Time) -> float | None:
    return time.until_s if isinstance(time, Missed) else time


def _exp(log: float) -> float:
    return math.exp(max(-_LARGEST_LOG, min(log, _LARGEST_LOG)))


@dataclass(frozen=True)
class Difference:
    """By how much a value is larger in one series than in another, over seeds both ran.

    mean: mean of the paired differences over ``pairs`` seeds; None where there are none. low, high, t, bootstrap, p:
    as in `Speedup`. unmatched: seeds that only one of the two ran, or in which a value is missing or not finite.
    baseline_diverged: in how many of ``baseline_seeds`` the other series diverged, whose last values stand for it.
    """

    mean: float | None
    low: float | None
    high: float | None
    pairs: int
    unmatched: tuple[int, ...]
    t: tuple[float, float] | None = None
    bootstrap: tuple[float, float] | None = None
    p: float | None = None
    baseline_diverged: int = 0
    baseline_seeds: int = 0

    @property
    def contains_none(self) -> bool | None:
        """Whether the interval contains 0, "no difference"; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= 0.0 <= self.high

    def note(self) -> str:
        """What the difference leaves out or rests on, in words; empty where there is nothing to say."""
        lost = f"baseline: {self.baseline_diverged} of {self.baseline_seeds} diverged" if self.baseline_diverged else ""
        return "; ".join(filter(None, [lost, agreeing(self), without_partner(self.unmatched)]))


def paired_difference(
    values: Mapping[int, float | None], others: Mapping[int, float | None], level: float = 0.95
) -> Difference:
    """Mean of values − others by seed, with the wider of its Student-t and its bootstrap interval."""
    differences = []
    unmatched = []
    for seed in sorted(values.keys() | others.keys()):
        own, other = values.get(seed), others.get(seed)
        if own is None or other is None or not (math.isfinite(own) and math.isfinite(other)):
            unmatched.append(seed)
        else:
            differences.append(own - other)
    if not differences:
        return Difference(None, None, None, 0, tuple(unmatched))
    found = spread(differences, level)
    return Difference(
        found.mean, found.low, found.high, found.count, tuple(unmatched), found.t, found.bootstrap, found.p
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment (1979): each p-value as it counts among all of them; None stays None.

    Rejecting where the adjusted value is ≤ α keeps the chance of any false rejection at α, whatever the dependence.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted


def verdicts(compared: Sequence[Speedup | Difference]) -> list[Verdict]:
    """What can be said of each of the comparisons that one facet makes."""
    return [
        "no interval"
        if one.contains_none is None
        else "within noise"
        if one.contains_none
        else "clear"
        if p is not None and p <= ALPHA
        else "weak"
        for one, p in zip(compared, holm([one.p for one in compared]), strict=True)
    ]
