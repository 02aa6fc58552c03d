"""Measured runs on prompts beside their prediction, series by series: step times, speed-ups, rates, idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean

from fedasync.report.agreement import total_variation
from fedasync.report.prediction import SPEEDUP, Over, Predicted
from fedasync.report.rollout_numbers import RATE, SERVERS, STALENESS, STEP, TRAINER, UNITS, numbers
from fedasync.report.statistics import pooled_staleness
from fedasync.runs.run import Run

LEGEND = (
    "Means (of speed-ups geometric ones, paired by seed), and least … greatest over seeds, after the warm-up; error: "
    "predicted/measured − 1; fitted: the cluster was fitted to these runs; total variation: the share of trained "
    "groups with another staleness. Idle shares have no tolerance: their difference is in points."
)

BySeed = Mapping[int, Mapping[str, float | None]]


def rollout_predictions(
    measured: Sequence[Run], predicted: Sequence[Run], axis: str, base: str, tolerance: float
) -> list[Predicted]:
    """Every quantity of every series. The cluster was fitted to measured runs of ``base``, which speed-ups refer to.

    Series are the labels of ``axis``. Raises ValueError for runs without ``base``.
    """
    labels = list(dict.fromkeys(run.labels[axis] for run in measured))
    if base not in labels:
        raise ValueError(f"prediction: no run has the label {base!r}; there are: {', '.join(labels)}")
    sides = [
        {label: {run.seed: numbers(run) for run in runs if run.labels[axis] == label} for label in labels}
        for runs in (measured, predicted)
    ]
    rows = []
    for label in labels:
        own: tuple[BySeed, BySeed] = (sides[0][label], sides[1][label])
        fitted = label == base
        rows.append(_row(label, STEP, *own, tolerance=None if fitted else tolerance, fitted=fitted))
        if not fitted:
            ratios = [_ratios(side[base], side[label]) for side in sides]
            rows.append(_told(label, SPEEDUP, "×", _over(ratios[0], True), _over(ratios[1], True), tolerance))
        rows.append(_row(label, RATE, *own, tolerance=None if fitted else tolerance, fitted=fitted))
        rows += [_row(label, name, *own, tolerance=None, fitted=fitted) for name in (TRAINER, SERVERS)]
        histograms = [
            pooled_staleness(run.summary["staleness"]["histogram"] for run in runs if run.labels[axis] == label)
            for runs in (measured, predicted)
        ]
        distance = total_variation(histograms[0], histograms[1]) if all(histograms) else None
        rows.append(_row(label, STALENESS, *own, tolerance=None, fitted=fitted, distance=distance))
    return rows


def _row(
    label: str,
    name: str,
    real: BySeed,
    sim: BySeed,
    *,
    tolerance: float | None,
    fitted: bool,
    distance: float | None = None,
) -> Predicted:
    one, other = (_over([found[name] for found in side.values()]) for side in (real, sim))
    note = "fitted" if fitted else ""
    if UNITS[name] == "share" and one.mean is not None and other.mean is not None:
        points = 100 * (other.mean - one.mean)
        note = "; ".join(filter(None, [note, f"{'−' if points < 0 else '+'}{abs(points):.1f} points"]))
    return _told(label, name, UNITS[name], one, other, tolerance, note, distance)


def _told(
    label: str,
    name: str,
    unit: str,
    one: Over,
    other: Over,
    tolerance: float | None,
    note: str = "",
    distance: float | None = None,
) -> Predicted:
    error = None
    if unit != "share" and one.mean and other.mean is not None:
        error = other.mean / one.mean - 1
    within = None if error is None or tolerance is None else abs(error) <= tolerance
    return Predicted(label, name, unit, one, other, error, within, distance, note)


def _ratios(base: BySeed, own: BySeed) -> list[float | None]:
    found: list[float | None] = []
    for seed, numbers_of in own.items():
        over, step_s = base.get(seed, {}).get(STEP), numbers_of[STEP]
        found.append(over / step_s if over and step_s else None)
    return found


def _over(values: Sequence[float | None], ratios: bool = False) -> Over:
    """Nothing where a seed lacks it."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return Over()
    return Over(geometric_mean(known) if ratios else fmean(known), min(known), max(known), len(known))
