"""Laws of durations, speeds and sizes, each given by its quantile function Q(u).

A draw is Q at a uniform number, so one uniform stream serves every law, and a law of another shape keeps the order of
the clients' luck. Units are those of the field that holds the law (``duration_s``, ``uplink_bytes_per_second``).
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, isfinite, log, pi, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer
from fedasync.simulation.traces import Trace, series

_normal = NormalDist()
_normal_quantile = _normal.inv_cdf


def _check(law: str, name: str, value: float, *, above: float = 0.0, or_equal: bool = False) -> None:
    if not (isfinite(value) and (value > above or (or_equal and value == above))):
        sign = "≥" if or_equal else ">"
        raise ValueError(f"{law}: {name} must be {sign} {above:g} and finite, got {value}")


@dataclass(frozen=True)
class Constant:
    """Always ``value``."""

    value: float
    kind: Literal["constant"] = "constant"

    def __post_init__(self) -> None:
        _check("constant", "value", self.value, or_equal=True)

    def quantile(self, u: float) -> float:
        return self.value

    @property
    def mean(self) -> float:
        return self.value


@dataclass(frozen=True)
class Values:
    """An explicit list: entry i belongs to client i, or (``by = "lease"``) to the i-th lease given out, cyclically.

    As a law of its own (``quantile``) the list is an empirical distribution.
    """

    values: tuple[float, ...]
    by: Literal["client", "lease"] = "client"
    kind: Literal["values"] = "values"

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values: the list is empty; at least one number is needed")
        for value in self.values:
            _check("values", "each entry", value, or_equal=True)

    @cached_property
    def _ordered(self) -> list[float]:
        return sorted(self.values)

    def quantile(self, u: float) -> float:
        return self._ordered[int(u * len(self._ordered))]

    @cached_property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


@dataclass(frozen=True)
class Uniform:
    """Uniform between ``low`` and ``high``."""

    low: float
    high: float
    kind: Literal["uniform"] = "uniform"

    def __post_init__(self) -> None:
        _check("uniform", "low", self.low, or_equal=True)
        _check("uniform", "high", self.high, above=self.low, or_equal=True)

    def quantile(self, u: float) -> float:
        return self.low + (self.high - self.low) * u

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Exponential:
    """Exponential with the given mean (not rate)."""

    mean: float
    kind: Literal["exponential"] = "exponential"

    def __post_init__(self) -> None:
        _check("exponential", "mean", self.mean)

    def quantile(self, u: float) -> float:
        return -self.mean * log(1.0 - u)


@dataclass(frozen=True)
class ShiftedExponential:
    """``shift`` plus an exponential of mean ``scale``."""

    shift: float
    scale: float
    kind: Literal["shifted_exponential"] = "shifted_exponential"

    def __post_init__(self) -> None:
        _check("shifted_exponential", "shift", self.shift, or_equal=True)
        _check("shifted_exponential", "scale", self.scale)

    def quantile(self, u: float) -> float:
        return self.shift - self.scale * log(1.0 - u)

    @property
    def mean(self) -> float:
        return self.shift + self.scale


@dataclass(frozen=True)
class HalfNormal:
    """``minimum`` + |N(0, sd)|."""

    sd: float
    minimum: float = 0.0
    kind: Literal["half_normal"] = "half_normal"

    def __post_init__(self) -> None:
        _check("half_normal", "sd", self.sd)
        _check("half_normal", "minimum", self.minimum, or_equal=True)

    def quantile(self, u: float) -> float:
        return self.minimum - self.sd * _normal_quantile((1.0 - u) / 2.0)  # this half keeps its digits as u → 1

    @property
    def mean(self) -> float:
        return self.minimum + self.sd * sqrt(2.0 / pi)


@dataclass(frozen=True)
class Normal:
    """N(location, sd), kept from falling below ``minimum``.

    ``below`` says how: ``floor`` puts what falls below at the minimum (as FLSim does), ``redraw`` draws it again (as
    FLASH does with speeds). ``location`` is the mean of the uncut law.
    """

    location: float
    sd: float
    minimum: float = 0.0
    below: Literal["floor", "redraw"] = "floor"
    kind: Literal["normal"] = "normal"

    def __post_init__(self) -> None:
        _check("normal", "location", self.location, above=-inf)
        _check("normal", "sd", self.sd)
        _check("normal", "minimum", self.minimum, or_equal=True)
        check_choice("normal: below", self.below, Literal["floor", "redraw"])
        if self._above < -6:
            raise ValueError(
                f"normal: location = {self.location:g} lies {-self._above:.3g} sd below minimum = {self.minimum:g}; "
                "at most 6 would do"
            )

    @property
    def _above(self) -> float:
        """Standard deviations of the location above the minimum."""
        return (self.location - self.minimum) / self.sd

    def quantile(self, u: float) -> float:
        # From the upper tail, which keeps its digits as u → 1.
        tail = (1.0 - u) * (_normal.cdf(self._above) if self.below == "redraw" else 1.0)
        return max(self.minimum, self.location - self.sd * _normal_quantile(tail))

    @property
    def mean(self) -> float:
        z = self._above
        if self.below == "redraw":
            return self.location + self.sd * _normal.pdf(z) / _normal.cdf(z)
        return self.minimum + self.sd * (_normal.pdf(z) + z * _normal.cdf(z))


@dataclass(frozen=True)
class Zipf:
    """``scale`` × an integer k with P(k) ∝ k^−a for k ≥ 1, clipped to minimum … maximum.

    Pisces draws latencies with a = 1.2, clipped to 16 … 180 s.
    """

    a: float
    minimum: int
    maximum: int
    scale: float = 1.0
    kind: Literal["zipf"] = "zipf"

    def __post_init__(self) -> None:
        _check("zipf", "a", self.a, above=1.0)
        check_integer("zipf: minimum", self.minimum, 1)
        check_integer("zipf: maximum", self.maximum, self.minimum)
        if self.maximum - self.minimum >= 1_000_000:
            raise ValueError(f"zipf: maximum must be less than minimum + 1,000,000, got {self.maximum}")
        _check("zipf", "scale", self.scale)

    @cached_property
    def _at_most(self) -> list[float]:
        """P(K ≤ k) for k = minimum … maximum, of the unclipped K below the maximum."""
        import numpy as np
        from scipy.special import zeta

        beyond = zeta(self.a, np.arange(self.minimum + 1, self.maximum + 1, dtype=np.float64)) / zeta(self.a)
        return [*(1.0 - beyond).tolist(), 1.0]

    def quantile(self, u: float) -> float:
        return self.scale * (self.minimum + bisect_left(self._at_most, u))

    @cached_property
    def mean(self) -> float:
        return self.scale * (self.maximum - sum(self._at_most[:-1]))


@dataclass(frozen=True)
class Lognormal:
    """Lognormal with the given mean; ``sigma`` is the standard deviation of the logarithm."""

    mean: float
    sigma: float
    kind: Literal["lognormal"] = "lognormal"

    def __post_init__(self) -> None:
        _check("lognormal", "mean", self.mean)
        _check("lognormal", "sigma", self.sigma, or_equal=True)
        # The largest uniform number, 1 − 2⁻⁵³, lies 8.2 sd above the middle: of sigma 50 it gives e^−840 of the mean.
        if self.sigma > 50:
            raise ValueError(
                f"lognormal: sigma must be ≤ 50, got {self.sigma}: beyond, every draw is 0 in double precision"
            )

    def quantile(self, u: float) -> float:
        return self.mean * exp(self.sigma * _normal_quantile(u) - self.sigma * self.sigma / 2.0)


@dataclass(frozen=True)
class Pareto:
    """P(T > t) = (minimum / t)^alpha for t ≥ minimum, cut at ``cap`` if one is given. alpha ≤ 1 needs a cap."""

    minimum: float
    alpha: float
    cap: float | None = None
    kind: Literal["pareto"] = "pareto"

    def __post_init__(self) -> None:
        _check("pareto", "minimum", self.minimum)
        _check("pareto", "alpha", self.alpha)
        if self.cap is not None:
            _check("pareto", "cap", self.cap, above=self.minimum, or_equal=True)
        elif self.alpha <= 1:
            raise ValueError(f"pareto: alpha = {self.alpha} has no finite mean; alpha > 1, or a cap, would do")

    def quantile(self, u: float) -> float:
        if self.cap is not None and -log(1.0 - u) > 700.0 * self.alpha:  # beyond what a float can hold
            return min(self.cap, self.minimum * exp(700.0))
        value: float = self.minimum * (1.0 - u) ** (-1.0 / self.alpha)
        return value if self.cap is None else min(value, self.cap)

    @property
    def mean(self) -> float:
        """Mean, of the cut law when there is a cap."""
        a, low = self.alpha, self.minimum
        if self.cap is None:
            return a * low / (a - 1.0)
        if a == 1:
            return low * (1.0 + log(self.cap / low))
        return float(low * (a - (low / self.cap) ** (a - 1.0)) / (a - 1.0))


@dataclass(frozen=True)
class Empirical:
    """Values of one column of a CSV file with a header row, times ``scale``, each as likely as the others."""

    file: str
    column: str
    scale: float = 1.0
    kind: Literal["empirical"] = "empirical"

    def __post_init__(self) -> None:
        _check("empirical", "scale", self.scale)
        _ = self._ordered  # an unreadable file is an error now, not in the middle of a run

    @cached_property
    def _ordered(self) -> list[float]:
        try:
            with Path(self.file).open(newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                header = rows.fieldnames or []
                if self.column not in header:
                    columns = ", ".join(header) or "no header"
                    raise ValueError(f"empirical: {self.file} has no column {self.column!r}; it has {columns}")
                values = [self._number(row[self.column], rows.line_num) for row in rows]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ValueError(f"empirical: {self.file} cannot be read: {reason}") from None
        if not values:
            raise ValueError(f"empirical: {self.file} has no rows")
        return sorted(values)

    def _number(self, text: str | None, line: int) -> float:
        try:
            value = float(text or "") * self.scale
        except ValueError:
            value = -inf
        if not 0 <= value < inf:
            raise ValueError(f"empirical: {self.file}, line {line}, column {self.column!r}: {text!r} is no number ≥ 0")
        return value

    def quantile(self, u: float) -> float:
        return self._ordered[int(u * len(self._ordered))]

    @cached_property
    def mean(self) -> float:
        return sum(self._ordered) / len(self._ordered)


Law = (
    Constant
    | Values
    | Uniform
    | Exponential
    | ShiftedExponential
    | HalfNormal
    | Normal
    | Lognormal
    | Pareto
    | Zipf
    | Empirical
    | Trace
)


def steps(law: Law) -> tuple[Sequence[float], Sequence[float]] | None:
    """The values of a law that has only finitely many, in order, and P(T ≤ value) of each; None for any other law."""
    if isinstance(law, Zipf):
        values: Sequence[float] = [law.scale * k for k in range(law.minimum, law.maximum + 1)]
        return values, law._at_most
    if isinstance(law, Trace):
        values = [value * law.scale for value in series(law.name)]
    elif isinstance(law, (Values, Empirical)):
        values = law._ordered
    else:
        return None
    return values, [(place + 1) / len(values) for place in range(len(values))]
