"""What a run on prompts took, by what took it: decoding, prefill, weights, latencies, steps; and lines fitted to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BAD_LINE = 0.05
"""Where the mean iteration of a number of sequences lies farther from the line than this share, on average, knots
stand in its place (ours)."""
MOST_KNOTS = 16
FEW = 8
"""Rows below which a slope is not asked for."""


@dataclass(frozen=True)
class Mean:
    """A mean of ``count`` values, and its standard error, which one value does not have."""

    value: float
    standard_error: float | None
    count: int
    spread: float = 0.0
    """Standard deviation of the values."""

    @classmethod
    def of(cls, values: Floats) -> Mean:
        """Of no value: 0, of none."""
        n = len(values)
        if n == 0:
            return cls(0.0, None, 0)
        spread = float(values.std(ddof=1)) if n > 1 else 0.0
        return cls(float(values.mean()), spread / sqrt(n) if n > 1 else None, n, spread)


@dataclass(frozen=True)
class Line:
    """y = Σ coefficient × x with coefficients ≥ 0, by least squares; ``one`` is the constant.

    Standard errors are those of ordinary least squares over the coefficients that are not 0.
    """

    coefficients: Mapping[str, float]
    standard_errors: Mapping[str, float]
    count: int
    mean: float
    spread: float
    """Standard deviation of what is left."""

    def __getitem__(self, name: str) -> float:
        return self.coefficients.get(name, 0.0)

    def at(self, **x: float) -> float:
        return self["one"] + sum(self[name] * value for name, value in x.items())


def line(y: Floats, **x: Floats) -> Line:
    """Fit ``y`` to ``x`` and a constant; of fewer than `FEW` rows, and of columns that do not vary, the mean alone."""
    from scipy.optimize import nnls

    n = len(y)
    if n == 0:
        return Line({}, {}, 0, 0.0, 0.0)
    names = ["one", *(name for name, column in x.items() if n >= FEW and np.ptp(column) > 1e-9 * np.abs(column).max())]
    columns = np.stack([np.ones(n) if name == "one" else x[name] for name in names], axis=1)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    found = nnls(columns / scale, y)[0] / scale
    left = y - columns @ found
    used = np.flatnonzero(found > 0)
    freedom = max(1, n - len(used))
    variance = float(left @ left) / freedom
    scaled = columns[:, used] / scale[used]
    errors = np.sqrt(np.maximum(np.diag(np.linalg.pinv(scaled.T @ scaled)), 0.0) * variance) / scale[used]
    return Line(
        {name: float(value) for name, value in zip(names, found, strict=True)},
        {names[place]: float(error) for place, error in zip(used, errors, strict=True)},
        n,
        float(y.mean()),
        sqrt(variance),
    )


@dataclass(frozen=True)
class Decode:
    """Seconds of an iteration: a line in running sequences and resident tokens, or knots in the former.

    ``loop`` is the rest of a worker's round: messages, rewards, letting answers in.
    """

    line: Line
    loop: Line
    knots: tuple[tuple[int, float], ...] = ()
    """(running, seconds without the resident tokens' share), with the loop."""
    off: float = 0.0
    """How far means lie from the line, on average, as a share."""

    @property
    def overhead_s(self) -> float:
        return self.line["one"] + self.loop["one"]

    @property
    def per_sequence_s(self) -> float:
        return self.line["running"] + self.loop["running"]

    @property
    def context_s(self) -> float:
        return self.line["context"]


def decode(seconds: Floats, running: Floats, context: Floats, loop_s: Floats, loop_running: Floats) -> Decode:
    """Of measured iterations, and of the pauses between two of them in which the worker had answers to go on with."""
    straight = line(seconds, running=running, context=context)
    loop = line(loop_s, running=loop_running)
    groups = _groups(running)
    own = seconds - straight["context"] * context
    means = np.array([own[group].mean() for group in groups])
    sizes = np.array([len(group) for group in groups], np.float64)
    middle = np.array([running[group].mean() for group in groups])
    expected = straight["one"] + straight["running"] * middle
    # The noise of means is no curvature: what chance alone would give is taken off.
    chance = np.array([own[group].std() / sqrt(len(group)) for group in groups])
    off = float(sizes @ np.maximum(np.abs(means - expected) - chance, 0.0) / (sizes @ means)) if len(groups) else 0.0
    if len(groups) < 3 or off <= BAD_LINE:
        return Decode(straight, loop, (), off)
    return Decode(straight, loop, _knots(middle, means, sizes, loop), off)


def prefill(seconds: Floats, tokens: Floats, iteration: Line) -> Line:
    """Of calls of prefill. Unless sizes tell it to be less, a call's own share is at least what an iteration has of its
    own, and that where sizes tell nothing: both go through the model's layers once (ours).
    """
    found = line(seconds, tokens=tokens)
    least_s = min(iteration["one"], found.mean)
    if not found.count or found["one"] + 2 * _constant_error(found, tokens) < least_s:
        return found
    more = line(seconds - least_s, tokens=tokens)
    if more["tokens"] > 2 * more.standard_errors.get("tokens", 0.0):
        call_s, token_s, errors = least_s + more["one"], more["tokens"], more.standard_errors
    else:
        call_s, token_s, errors = least_s, (found.mean - least_s) / float(tokens.mean()), {}
    return Line({"one": call_s, "tokens": token_s}, errors, found.count, found.mean, more.spread)


def _constant_error(found: Line, x: Floats) -> float:
    """Standard error of a line's constant, also of one at its bound of 0; infinite where ``x`` does not vary."""
    spread = float(((x - x.mean()) ** 2).sum())
    return found.spread * sqrt(1 / len(x) + x.mean() ** 2 / spread) if spread > 0 else inf


def _groups(running: Floats) -> list[NDArray[np.int64]]:
    """Rows by the number of running sequences; neighbours together where there are many numbers."""
    numbers = np.unique(running)
    edges = numbers if len(numbers) <= MOST_KNOTS else np.unique(np.quantile(running, np.linspace(0, 1, MOST_KNOTS)))
    place = np.searchsorted(edges, running, side="right") - 1
    return [found for each in np.unique(place) if len(found := np.flatnonzero(place == each))]


def _knots(running: Floats, means: Floats, sizes: Floats, loop: Line) -> tuple[tuple[int, float], ...]:
    """Means by running sequences, made to rise: more sequences never take less time."""
    from scipy.optimize import isotonic_regression

    rising = isotonic_regression(means, weights=sizes).x
    knots: dict[int, float] = {}
    for b, seconds in zip(running, rising, strict=True):
        place = max(1, round(float(b)))
        knots[place] = max(float(seconds) + loop["one"] + loop["running"] * place, *(knots.values() or (1e-9,)))
    return tuple(sorted(knots.items()))


def pooled(parts: Sequence[Floats]) -> Floats:
    """One array of several."""
    return np.concatenate([np.zeros(0), *parts])
