"""The comparisons that a report prints: each paired by seed within one facet, and judged among those beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fedasync.report.arrangement import COUNTED, Arrangement, Facet, Target
from fedasync.report.measures import diverged, speedup_at, value_at
from fedasync.report.paired import Difference, Speedup, Verdict, holm, paired_difference, verdicts

C = TypeVar("C", Speedup, Difference)

FALLING = ("loss", "distance", "error", "perplexity")
"""Last words of the names of metrics whose lower values are the better ones."""


@dataclass(frozen=True)
class Judged(Generic[C]):
    """A comparison, its p-value after Holm's adjustment among the facet's, and what follows."""

    found: C
    p_holm: float | None
    verdict: Verdict


def judged(compared: Mapping[str, C]) -> dict[str, Judged[C]]:
    """Comparisons of one facet, by series, judged together."""
    found: Sequence[C] = list(compared.values())
    adjusted = holm([one.p for one in found])
    told = zip(compared, found, adjusted, verdicts(found), strict=True)
    return {label: Judged(one, p, verdict) for label, one, p, verdict in told}


def speedups(shown: Arrangement, facet: Facet, over: str, target: Target | None) -> dict[str, Judged[Speedup]]:
    """Speed-up of every other series that the facet has, over one of them."""
    others = [label for label in shown.series if label != over and shown.at(label, facet)]
    return judged({label: speedup_at(shown, label, facet, over, target) for label in others})


@dataclass(frozen=True)
class Standing:
    """The values of a metric in one facet at one virtual time, by series and seed.

    time_s: when the first of the facet's runs ended that did not diverge: until then these were at work.
    diverged: the seeds of each series in which it diverged, by its end or by the metric. A run that ended before
    ``time_s`` stands with its last finite value, so what is made of the values has to tell how many these are.
    """

    time_s: float
    values: Mapping[str, Mapping[int, float | None]]
    diverged: Mapping[str, tuple[int, ...]]


def standing(shown: Arrangement, facet: Facet, metric: str) -> Standing:
    """Where every series stood at the latest virtual time that all runs of the facet saw, but for diverged ones.

    Where all runs diverged, it is when the first of them did.
    """
    cells = {label: shown.at(label, facet) for label in shown.series if shown.at(label, facet)}
    runs = [run for cell in cells.values() for run in cell.values()]
    time_s = min(float(run.summary["time_s"]) for run in [run for run in runs if not diverged(run)] or runs)
    return Standing(
        time_s,
        {label: {seed: value_at(run, metric, time_s) for seed, run in cell.items()} for label, cell in cells.items()},
        {label: tuple(seed for seed, run in cell.items() if diverged(run, metric)) for label, cell in cells.items()},
    )


def differences(at: Standing, over: str) -> dict[str, Judged[Difference]]:
    """Difference of every other series' value from one series', at one virtual time."""
    base = at.values.get(over, {})
    lost = len(at.diverged.get(over, ()))
    found = {label: paired_difference(own, base) for label, own in at.values.items() if label != over}
    return judged(
        {label: replace(one, baseline_diverged=lost, baseline_seeds=len(base)) for label, one in found.items()}
    )


def lower_is_better(shown: Arrangement, metric: str) -> bool:
    """As the report says, else by the metric's name."""
    if shown.report.better is not None:
        return shown.report.better == "lower"
    return metric not in COUNTED and metric.replace("-", "_").split("_")[-1] in FALLING
