"""Laws fitted to measured durations by likelihood, and slopes within clients."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedasync.simulation.laws import Constant, Lognormal, ShiftedExponential

RESOLUTION = 0.01
"""A spread below this share of the mean counts as none: no measure of a run would show it."""
FEW = 5
"""Observations, of a client, below which only their mean is taken."""
SHORTEST_S = 1e-9

Fitted = Constant | Lognormal | ShiftedExponential
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """A law of ``count`` observations, whose mean is theirs; ``standard_error`` is of the mean, None of one alone."""

    law: Fitted
    mean: float
    standard_error: float | None
    count: int
    log_likelihood: float
    parameters: int

    @property
    def aic(self) -> float:
        return 2 * self.parameters - 2 * self.log_likelihood

    @property
    def text(self) -> str:
        """``lognormal(mean 3.2 s, sigma 0.41)``."""
        match self.law:
            case Constant():
                return f"constant({self.law.value:.4g} s)"
            case Lognormal():
                return f"lognormal(mean {self.law.mean:.4g} s, sigma {self.law.sigma:.3g})"
            case ShiftedExponential():
                return f"shifted exponential({self.law.shift:.4g} + {self.law.scale:.3g} s)"


def fit(observed: ArrayLike, *, means: int = 1, at_least: int = FEW) -> Fit:
    """The likelier law of lognormal and shifted exponential (by AIC); a constant where nothing tells them apart.

    That is where the spread is below `RESOLUTION`, and where there are fewer than ``at_least`` observations. A
    constant has the likelihood of a lognormal with that spread. ``means`` is how many means were taken out of the
    observations beforehand (one a client, where those of several are pooled): so many degrees of freedom are gone.

    Raises ValueError for no observations.
    """
    values = np.asarray(observed, np.float64)
    n = len(values)
    if n == 0:
        raise ValueError("fit: no observations; one or more would do")
    mean = float(values.mean())
    deviation = float(values.std(ddof=1)) if n > 1 else 0.0
    error = deviation / sqrt(n) if n > 1 else None
    if mean <= SHORTEST_S:
        return Fit(Constant(0.0), 0.0, error, n, 0.0, 1)
    logs = np.log(np.maximum(values, SHORTEST_S))
    if n < max(at_least, means + 1) or deviation < RESOLUTION * mean:
        return Fit(Constant(mean), mean, error, n, _lognormal(logs, RESOLUTION), 1)
    spread = float(logs.std())
    law = Lognormal(mean, spread * sqrt(n / (n - means)))
    lognormal = Fit(law, mean, error, n, _lognormal(logs, max(spread, RESOLUTION)), 2)
    return min(lognormal, _shifted_exponential(values, mean, error), key=lambda one: one.aic)


def _lognormal(logs: Floats, sigma: float) -> float:
    """Log-likelihood at the best location."""
    squares = float(((logs - logs.mean()) ** 2).sum())
    return -float(logs.sum()) - len(logs) * (log(sigma) + log(2 * pi) / 2) - squares / (2 * sigma**2)


def _shifted_exponential(values: Floats, mean: float, error: float | None) -> Fit:
    """The likeliest shift, the smallest value, lies a scale/n too high: the law has it corrected."""
    n, least = len(values), max(float(values.min()), 0.0)
    scale = mean - least
    likelihood = -n * log(scale) - n * (mean - least) / scale
    unbiased = scale * n / (n - 1)
    shift = max(0.0, mean - unbiased)
    return Fit(ShiftedExponential(shift, mean - shift), mean, error, n, likelihood, 2)


@dataclass(frozen=True)
class Slope:
    """y per x, within clients: what is left when each client's own means are taken away. Units: y's over x's."""

    value: float
    standard_error: float
    count: int

    @property
    def is_told(self) -> bool:
        """Whether it differs from 0 by more than two standard errors."""
        return abs(self.value) > 2 * self.standard_error


def slope(x: ArrayLike, y: ArrayLike, clients: ArrayLike) -> Slope | None:
    """Least squares with an intercept a client; None where x hardly varies within clients, or too little is known.

    Hardly: by less than `RESOLUTION` of its mean.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    _, of = np.unique(np.asarray(clients), return_inverse=True)
    n, groups = len(x), int(of.max(initial=-1)) + 1
    free = n - groups - 1
    if free < FEW:
        return None
    sizes = np.bincount(of)
    within_x = x - (np.bincount(of, x) / sizes)[of]
    within_y = y - (np.bincount(of, y) / sizes)[of]
    squares = float(within_x @ within_x)
    if squares <= n * (RESOLUTION * float(np.abs(x).mean())) ** 2:
        return None
    value = float(within_x @ within_y) / squares
    left = within_y - value * within_x
    return Slope(value, sqrt(float(left @ left) / free / squares), n)
