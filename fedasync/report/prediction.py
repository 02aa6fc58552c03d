"""Measured runs beside their prediction, series by series: times, speed-ups, throughput, staleness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from fedasync.report.agreement import total_variation
from fedasync.report.arrangement import Arrangement, Cell, Target, arrange
from fedasync.report.measures import times_s
from fedasync.report.paired import Missed, Time
from fedasync.report.spec import Report
from fedasync.report.statistics import pooled_staleness
from fedasync.runs.run import Run

if TYPE_CHECKING:
    import polars as pl

SPEEDUP, UPDATES, STALENESS = "speed-up", "updates a second", "mean staleness"


@dataclass(frozen=True)
class Over:
    """A number of some runs: its mean (of ratios the geometric one) and its least and greatest value, over ``seeds``.

    None stands where no run, or not every run, has it.
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0

    def __str__(self) -> str:
        if self.mean is None:
            return ""
        spread = "" if self.seeds < 2 else f" ({self.low:.3g} … {self.high:.3g})"
        return f"{self.mean:.4g}{spread}"


@dataclass(frozen=True)
class Predicted:
    """One quantity of one series.

    error: predicted/measured − 1; None where either is missing or 0 was measured.
    within: whether the error is within the tolerance; None where there is none, and for what was fitted.
    total_variation: of staleness only: the share of contributions with another staleness.
    note: ``fitted`` for runs that the clients were fitted to; why something is missing.
    """

    series: str
    quantity: str
    unit: str
    measured: Over
    predicted: Over
    error: float | None
    within: bool | None
    total_variation: float | None = None
    note: str = ""


def predictions(
    measured: Sequence[Run], predicted: Sequence[Run], report: Report, base: str, tolerance: float
) -> list[Predicted]:
    """Every quantity of every series. Clients were fitted to the measured runs of ``base``, which speed-ups refer to.

    Seeds are paired in speed-ups. Raises ValueError for runs without ``base``, and for several facets.
    """
    real, simulated = arrange(measured, report), arrange(predicted, report)
    for shown in (real, simulated):
        if base not in shown.series:
            raise ValueError(f"prediction: no run has the label {base!r}; there are: {', '.join(shown.series)}")
        if len(shown.facets) > 1:
            raise ValueError("prediction: the runs differ in more than their series; one axis would do")
    target = real.target()
    rows: list[Predicted] = []
    for label in real.series:
        cells = [shown.at(label, shown.facets[0]) for shown in (real, simulated)]
        fitted = label == base
        found = _times(label, real, simulated, target, base)
        rows += [_row(label, *one, fitted, tolerance) for one in found]
        rates = [_over([run.summary["consumed"] / run.summary["time_s"] for run in cell.values()]) for cell in cells]
        rows.append(_row(label, UPDATES, "1/s", rates[0], rates[1], "", fitted, tolerance))
        rows.append(_staleness(label, cells[0], cells[1], fitted, tolerance))
    return rows


def _times(
    label: str, real: Arrangement, simulated: Arrangement, target: Target | None, base: str
) -> list[tuple[str, str, Over, Over, str]]:
    """Time to the target (else per update) and the speed-up: quantity, unit, measured, predicted, what is missing."""
    what = f"time to {target}" if target else "time per update"
    sides = [(times_s(x, label, x.facets[0], target), times_s(x, base, x.facets[0], target)) for x in (real, simulated)]
    missing = [
        f"{name}: {said}"
        for name, (own, _) in zip(("measured", "predicted"), sides, strict=True)
        if (said := _missing(own))
    ]
    times = [_over_all(list(own.values()), fmean) for own, _ in sides]
    found = [(what, "s", times[0], times[1], "; ".join(missing))]
    if label != base:
        ratios = [
            _over_all([_ratio(others.get(seed), time) for seed, time in own.items()], geometric_mean)
            for own, others in sides
        ]
        found.append((SPEEDUP, "×", ratios[0], ratios[1], "" if all(r.mean for r in ratios) else "a time is missing"))
    return found


def _missing(times: Mapping[int, Time]) -> str:
    lost = sum(time is None or isinstance(time, Missed) for time in times.values())
    return f"{lost} of {len(times)} seeds did not reach it" if lost else ""


def _ratio(base: Time, own: Time) -> float | None:
    """None where either is not known, or took no time."""
    if isinstance(base, float) and isinstance(own, float) and base > 0 and own > 0:
        return base / own
    return None


def _over_all(values: Sequence[Time], mean: Callable[[list[float]], float]) -> Over:
    """Nothing where a seed lacks it: a mean over the others would flatter."""
    known = [value for value in values if isinstance(value, float)]
    return _over(known, mean) if known and len(known) == len(values) else Over()


def _over(values: Sequence[float], mean: Callable[[list[float]], float] = fmean) -> Over:
    return Over(mean(list(values)), min(values), max(values), len(values)) if values else Over()


def _row(
    series: str,
    quantity: str,
    unit: str,
    measured: Over,
    predicted: Over,
    note: str,
    fitted: bool,
    tolerance: float,
    distance: float | None = None,
) -> Predicted:
    error = None
    if measured.mean and predicted.mean is not None:
        error = predicted.mean / measured.mean - 1
    within = None if error is None or fitted else abs(error) <= tolerance
    said = "; ".join(filter(None, ["fitted" if fitted else "", note]))
    return Predicted(series, quantity, unit, measured, predicted, error, within, distance, said)


def _staleness(label: str, real: Cell, simulated: Cell, fitted: bool, tolerance: float) -> Predicted:
    means = [
        _over([m for run in cell.values() if (m := run.summary["staleness"]["mean"]) is not None])
        for cell in (real, simulated)
    ]
    one, other = (
        pooled_staleness(run.summary["staleness"]["histogram"] for run in cell.values()) for cell in (real, simulated)
    )
    distance = total_variation(one, other) if one and other else None
    return _row(label, STALENESS, "versions", means[0], means[1], "", fitted, tolerance, distance)


def prediction_table(rows: Sequence[Predicted]) -> pl.DataFrame:
    """For programs: a row a series and quantity; ``low`` and ``high`` are the least and greatest over seeds."""
    import polars as pl

    numbers = {
        f"{side}_{f.name}": [getattr(getattr(row, side), f.name) for row in rows]
        for side in ("measured", "predicted")
        for f in fields(Over)
    }
    kinds = {name: pl.Int64 if name.endswith("seeds") else pl.Float64 for name in numbers}
    return pl.DataFrame(
        {
            "series": [row.series for row in rows],
            "quantity": [row.quantity for row in rows],
            "unit": [row.unit for row in rows],
            **{name: pl.Series(values, dtype=kinds[name]) for name, values in numbers.items()},
            "error": pl.Series([row.error for row in rows], dtype=pl.Float64).round(6),
            "within": pl.Series([row.within for row in rows], dtype=pl.Boolean),
            "total_variation": pl.Series([row.total_variation for row in rows], dtype=pl.Float64),
            "note": [row.note for row in rows],
        }
    )


def error_text(error: float) -> str:
    """``+12 %``, ``−3.4 %``, ``0 %``."""
    percent = f"{100 * abs(error):.1f}".removesuffix(".0")
    return "0 %" if percent == "0" else f"{'+' if error > 0 else '−'}{percent} %"


def readable_predictions(rows: Sequence[Predicted], tolerance: float) -> pl.DataFrame:
    """For people: means, and (least … greatest) over seeds."""
    import polars as pl

    verdict = {True: "yes", False: "NO", None: ""}
    return pl.DataFrame(
        {
            "series": [row.series for row in rows],
            "quantity": [f"{row.quantity} ({row.unit})" for row in rows],
            "measured": [str(row.measured) or "–" for row in rows],
            "predicted": [str(row.predicted) or "–" for row in rows],
            "error": ["–" if row.error is None else error_text(row.error) for row in rows],
            f"within {100 * tolerance:g} %": [verdict[row.within] or row.note or "–" for row in rows],
            "total variation": [None if row.total_variation is None else f"{row.total_variation:.2f}" for row in rows],
        }
    )


LEGEND = (
    "Means (of speed-ups geometric ones, paired by seed), and least … greatest over seeds; error: predicted/measured "
    "− 1; fitted: the clients were fitted to these runs; total variation: the share of contributions with another "
    "staleness."
)
