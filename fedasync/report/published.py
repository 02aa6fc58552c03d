"""Numbers that others published beside what a study's runs came to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from fedasync.report.arrangement import Runs, arrange
from fedasync.report.paired import spread
from fedasync.report.spec import Published, Report
from fedasync.report.statistics import Interval, mean_interval
from fedasync.report.table import number, plus_minus
from fedasync.runs.run import Run

if TYPE_CHECKING:
    import polars as pl

ALIKE = 0.005
"""Predictions that differ by no more than this share are one and the same for the order (ours)."""


def number_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """A number of a run's summary by its dotted path; None where there is none.

    A name without dots is one of ``rollouts.throughput``, where that has it. In a list of tables that have a ``kind``
    the path goes on with the kind. A table with a ``mean`` stands for it.
    """
    within = summary.get("rollouts", {}).get("throughput", {})
    found: Any = within if "." not in metric and metric in within else summary
    for key in metric.split("."):
        if isinstance(found, list):
            found = next((row for row in found if isinstance(row, dict) and row.get("kind") == key), None)
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        found = found.get("mean")
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


@dataclass(frozen=True)
class Beside:
    """A published number and what the runs came to: seed → value; ``half_width`` of the mean's 95 % t-interval."""

    point: Published
    by_seed: Mapping[int, float]
    half_width: float | None

    @property
    def predicted(self) -> float:
        """The mean over the seeds."""
        return sum(self.by_seed.values()) / len(self.by_seed)

    @property
    def error(self) -> float:
        """(predicted − published)/published."""
        return self.predicted / self.point.value - 1

    @property
    def verdict(self) -> str:
        """Fitted, or whether a prediction lies within what was asked of it."""
        if self.point.fitted:
            return "fitted"
        if self.point.tolerance is None:
            return "predicted"
        held = abs(self.error) <= self.point.tolerance
        return f"predicted, {'within' if held else 'MISSED:'} {100 * self.point.tolerance:g} %"


def beside(runs: Iterable[Run], published: Sequence[Published]) -> list[Beside]:
    """Each published number with what the runs of its labels came to; those without a run are left out.

    Raises ValueError where a run has no such number, or a point speaks of several runs of one seed.
    """
    runs = list(runs)
    found = []
    for point in published:
        values = _by_seed(runs, point.labels, point.metric)
        if point.over is not None:
            others = _by_seed(runs, point.over, point.metric)
            values = {seed: value / others[seed] for seed, value in values.items() if others.get(seed)}
        if values:
            values = {seed: value * point.times for seed, value in values.items()}
            found.append(Beside(point, values, mean_interval(values.values()).half_width))
    return found


def published_table(runs: Runs, report: Report) -> pl.DataFrame:
    """A row a published number: its runs, ``metric``, ``predicted`` with ``half_width`` (95 % t-interval over
    ``seeds``), ``published``, ``error`` (a share of the published), ``verdict``, ``source``, ``confidence``."""
    import polars as pl

    rows = [
        {
            "runs": labels_text(one.point.labels),
            "metric": metric_text(one.point),
            "predicted": one.predicted,
            "half_width": one.half_width,
            "seeds": len(one.by_seed),
            "published": one.point.value,
            "error": one.error,
            "verdict": one.verdict,
            "source": one.point.source,
            "confidence": one.point.confidence,
        }
        for one in beside(arrange(runs, report).runs, report.published)
    ]
    return pl.DataFrame(rows, schema_overrides={"half_width": pl.Float64}) if rows else pl.DataFrame()


def readable_published(runs: Runs, report: Report) -> pl.DataFrame:
    """The same as text for people."""
    import polars as pl

    rows = [
        {
            "runs": labels_text(one.point.labels),
            "metric": metric_text(one.point),
            "predicted": plus_minus(_interval(one)),
            "published": number(one.point.value),
            "error": f"{100 * one.error:+.1f} %",
            "": one.verdict,
            "source": one.point.source + (f" ({one.point.confidence})" if one.point.confidence else ""),
        }
        for one in beside(arrange(runs, report).runs, report.published)
    ]
    return pl.DataFrame(rows)


def _interval(one: Beside) -> Interval:
    """Seeds that agree up to rounding have no spread to show."""
    half = one.half_width
    alike = half is None or half <= 1e-9 * abs(one.predicted)
    return Interval(one.predicted, None if alike else half, len(one.by_seed))


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as words; one that is a bare number is led by its axis."""
    return ", ".join(
        label if any(letter.isalpha() for letter in label) else f"{axis} = {label}" for axis, label in labels.items()
    )


def metric_text(point: Published) -> str:
    """What a point's number is."""
    times = "" if point.times == 1 else f"{point.times:g} × "
    others = {axis: label for axis, label in (point.over or {}).items() if point.labels.get(axis) != label}
    over = f" over {labels_text(others)}" if others else ""
    return f"{times}{point.metric}{over}"


def order_text(found: Sequence[Beside]) -> str:
    """Whether predictions have the published order: pairs in it, in the other one, too near to tell, published ties.

    A pair is too near to tell where its predictions differ by no more than `ALIKE`, or no more than seeds do (95 %,
    paired).
    """
    counts = {"in the published order": 0, "in the other order": 0, "too near to tell": 0}
    apart: list[float] = []
    wrong: list[str] = []
    for one, other in combinations(found, 2):
        step = one.predicted - other.predicted
        if one.point.value == other.point.value:
            apart.append(abs(step) / max(one.predicted, other.predicted))
        elif _near(one, other):
            counts["too near to tell"] += 1
        elif (step > 0) == (one.point.value > other.point.value):
            counts["in the published order"] += 1
        else:
            counts["in the other order"] += 1
            wrong.append(f"{labels_text(one.point.labels)} and {labels_text(other.point.labels)}")
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if wrong:
        said += f" ({'; '.join(wrong)})"
    ties = f"; published as equal, predicted {100 * max(apart):.1f} % apart" if apart else ""
    return f"Order: of {sum(counts.values())} pairs {said}{ties}."


def _near(one: Beside, other: Beside) -> bool:
    steps = [value - other.by_seed[seed] for seed, value in one.by_seed.items() if seed in other.by_seed]
    if abs(one.predicted - other.predicted) <= ALIKE * max(abs(one.predicted), abs(other.predicted)) or not steps:
        return True
    found = spread(steps)
    return found.low is not None and found.high is not None and found.low <= 0 <= found.high


def _by_seed(runs: Sequence[Run], labels: Mapping[str, str], metric: str) -> dict[int, float]:
    values: dict[int, float] = {}
    for run in runs:
        own = {"strategy": run.summary["strategy"], **run.labels}
        if any(own.get(axis) != label for axis, label in labels.items()):
            continue
        value = number_of(run.summary, metric)
        if value is None:
            raise ValueError(
                f"published: run {run.summary['run_id']} has no number {metric!r} (ended: {run.summary['ended']})"
            )
        if run.seed in values:
            raise ValueError(
                f"published: {labels_text(labels)} is several runs of seed {run.seed}; more labels would do"
            )
        values[run.seed] = value
    return values
