"""Means and curves over seeds, with Student-t intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
    """Times (s) in ascending order and the values at them."""


@dataclass(frozen=True)
class Interval:
    """A mean over ``count`` seeds and the half width of its interval; None where one seed gives none."""

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width


def mean_interval(values: Iterable[float], level: float = 0.95) -> Interval:
    """Mean and two-sided Student-t interval: half width t_{(1+level)/2, n−1} · s / √n.

    Raises ValueError for no values.
    """
    sample = np.fromiter(values, np.float64)
    n = sample.size
    if n == 0:
        raise ValueError("mean_interval: no values; give one or more")
    if n == 1:
        return Interval(float(sample[0]), None, 1)
    half_width = _t_quantile(level, n) * sample.std(ddof=1) / math.sqrt(n)
    return Interval(float(sample.mean()), float(half_width), n)


@dataclass(frozen=True)
class Band:
    """The mean of curves over seeds and its interval, on one time grid (all arrays ``[times]``).

    ``low`` and ``high`` are None for one seed. From ``all_running_until_s`` on, some curve has ended and its last
    value stands for it.
    """

    times_s: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64] | None
    high: NDArray[np.float64] | None
    count: int
    all_running_until_s: float


def align(curves: Sequence[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Put curves on their common grid: every time any of them has, from where all have begun.

    Returns times ``[times]`` and values ``[curves, times]``; between its own times, and after its last, a curve
    keeps its last value. Raises ValueError for no curves or an empty one.
    """
    if not curves or any(times.size == 0 for times, _ in curves):
        raise ValueError("align: a curve without points; give one or more curves of one or more points")
    begin = max(times[0] for times, _ in curves)
    grid = np.unique(np.concatenate([times for times, _ in curves]))
    grid = grid[grid >= begin]
    values = [value[np.searchsorted(times, grid, side="right") - 1] for times, value in curves]
    return grid, np.stack(values)


def band(curves: Sequence[Curve], level: float = 0.95) -> Band:
    """Mean curve and pointwise Student-t band. Raises ValueError as `align` does."""
    grid, values = align(curves)
    n = len(curves)
    mean = values.mean(axis=0)
    end = float(min(times[-1] for times, _ in curves))
    if n == 1:
        return Band(grid, mean, None, None, 1, end)
    half_width = _t_quantile(level, n) * values.std(axis=0, ddof=1) / math.sqrt(n)
    return Band(grid, mean, mean - half_width, mean + half_width, n, end)


def pooled_staleness(histograms: Iterable[Mapping[str, int]]) -> dict[int, int]:
    """Sum staleness histograms (staleness → contributions), sorted by staleness."""
    pooled: dict[int, int] = {}
    for histogram in histograms:
        for staleness, count in histogram.items():
            pooled[int(staleness)] = pooled.get(int(staleness), 0) + count
    return {staleness: pooled[staleness] for staleness in sorted(pooled) if pooled[staleness]}


def histogram_quantile(histogram: Mapping[int, int], share: float) -> int:
    """The smallest value that at least ``share`` of a sorted, non-empty histogram does not exceed."""
    total, so_far = sum(histogram.values()), 0
    for value, count in histogram.items():
        so_far += count
        if so_far >= share * total:
            return value
    raise ValueError(f"histogram_quantile: no {share:g} quantile of {total} values; give a share in [0, 1]")


def _t_quantile(level: float, n: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, n - 1))
