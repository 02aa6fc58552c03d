"""Where each run stands in a report: series, facet and seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedasync.report.spec import Report, listed
from fedasync.runs.run import Run

Runs = Sequence[Run] | Mapping[str, Run | Sequence[Run]]
"""Runs with their study's labels, or runs under labels of one's own: ``{"FedFa": run, "FedBuff": [run, run]}``."""

Facet = tuple[str, ...]
Cell = Mapping[int, Run]
"""The runs of one point: seed → run."""

COUNTED = {"updates": "consumed", "versions": "committed"}
"""Metrics that every run has, counted in its log: name → kind of event."""


@dataclass(frozen=True)
class Target:
    """A level of a metric and when it was reached.

    ``values`` are the levels met in the runs; more than one where facets have targets of their own.
    """

    metric: str
    values: tuple[float, ...]
    chosen: float | None = None

    def entry(self, run: Run) -> dict[str, Any] | None:
        """The run's own record of the target, or None where it was not measured."""
        for entry in run.summary["targets"]:
            if entry["metric"] == self.metric and self.chosen in (None, entry["value"]):
                return dict(entry)
        return None

    def __str__(self) -> str:
        return f"{spoken(self.metric)} {' / '.join(f'{value:g}' for value in self.values)}"


@dataclass(frozen=True)
class Arrangement:
    """Runs by series and facet, in the study's order."""

    report: Report
    series: tuple[str, ...]
    facet_axes: tuple[str, ...]
    facets: tuple[Facet, ...]
    cells: Mapping[tuple[str, Facet], Cell]

    def at(self, series: str, facet: Facet) -> Cell:
        """The runs of a point, by seed; empty where the study has none."""
        return self.cells.get((series, facet), {})

    @property
    def runs(self) -> list[Run]:
        return [run for cell in self.cells.values() for run in cell.values()]

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for cell in self.cells.values() for seed in cell})

    @property
    def clock(self) -> str:
        """What time is in these runs: ``virtual time``, or ``wall-clock time`` where all were made for real."""
        return "wall-clock time" if all(run.summary.get("runtime") for run in self.runs) else "virtual time"

    def facet_title(self, facet: Facet) -> str:
        """The facet in words, leaving out axes that do not vary; a label that is more than a number needs no axis."""
        varying = [len({other[i] for other in self.facets}) > 1 for i in range(len(facet))]
        named = zip(self.facet_axes, facet, varying, strict=True)
        return ", ".join(
            label if re.search(r"[^\W\d]", label) else f"{spoken(axis)} = {label}"
            for axis, label, varies in named
            if varies
        )

    def target(self) -> Target | None:
        """The target that times are measured to: of the report's metric if it has one, else the first recorded.

        Raises ValueError when the report names a level that no run recorded.
        """
        recorded: list[tuple[str, float]] = [
            (entry["metric"], entry["value"]) for run in self.runs for entry in run.summary["targets"]
        ]
        if not recorded:
            if self.report.target is not None:
                raise ValueError(f"report.target: no target {self.report.target:g}; the runs recorded none")
            return None
        asked = self.report.metric
        metric = asked if asked is not None and asked in dict(recorded) else recorded[0][0]
        levels = tuple(dict.fromkeys(value for name, value in recorded if name == metric))
        if self.report.target is None:
            firsts = dict.fromkeys(entry["value"] for run in self.runs if (entry := Target(metric, ()).entry(run)))
            return Target(metric, tuple(firsts))
        if self.report.target not in levels:
            there = ", ".join(f"{level:g}" for level in levels)
            raise ValueError(
                f"report.target: no target {self.report.target:g} of {metric!r}; the runs recorded: {there}"
            )
        return Target(metric, (self.report.target,), self.report.target)

    def metric(self) -> str:
        """The metric of curves and table. Raises ValueError when no run has it."""
        evaluated = dict.fromkeys(name for run in self.runs for name in run.summary["final"])
        asked = self.report.metric
        if asked is None:
            target = self.target()
            usual = "tokens_per_second" if "tokens_per_second" in evaluated else next(iter(evaluated), "updates")
            return target.metric if target else usual
        there = [*evaluated, *COUNTED]
        if asked not in there:
            raise ValueError(f"report.metric: no metric {asked!r} in these runs; there are: {listed(there)}")
        return asked

    def baseline(self) -> str:
        """The label that speed-ups refer to. Raises ValueError when the report has none."""
        if self.report.baseline is None:
            raise ValueError(f"report.baseline: a speed-up needs one; give one of the labels {listed(self.series)}")
        return self.report.baseline


def arrange(runs: Runs, report: Report | None = None, **changes: Any) -> Arrangement:
    """Sort runs into series × facets × seeds; ``changes`` that are not None replace fields of the report.

    Raises ValueError in one line for no runs, for names that do not exist, and for two runs in one place.
    """
    report = replace(report or Report(), **{name: v for name, v in changes.items() if v is not None})
    if isinstance(runs, Mapping):
        labelled = [
            ({**run.labels, report.series: label}, run)
            for label, given in runs.items()
            for run in ([given] if isinstance(given, Run) else given)
        ]
    else:
        labelled = [({"strategy": str(run.summary["strategy"]), **run.labels}, run) for run in runs]
    if not labelled:
        raise ValueError("report: no runs to report on; finish one first")
    axes: dict[str, dict[str, None]] = {}
    for labels, _ in labelled:
        for axis, label in labels.items():
            axes.setdefault(axis, {})[label] = None
    report.check({axis: list(labels) for axis, labels in axes.items()})

    rest = [axis for axis in axes if axis not in (report.series, *report.facets)]
    kept = (report.x_axis,)
    if isinstance(runs, Mapping):
        # Labels of one's own stand for all that tells the series apart; only what varies inside one makes panels.
        rest = [axis for axis in rest if axis in kept or _varies_within(labelled, report.series, axis)]
    elif not any("strategy" in run.labels for _, run in labelled):
        # Every run has a strategy; where the study has no such axis it makes no panels.
        rest = [axis for axis in rest if axis != "strategy" or axis in kept]
    facet_axes = (*report.facets, *rest)

    cells: dict[tuple[str, Facet], dict[int, Run]] = {}
    for labels, run in labelled:
        facet = tuple(labels.get(axis, "–") for axis in facet_axes)
        cell = cells.setdefault((labels[report.series], facet), {})
        if run.seed in cell:
            place = ", ".join(f"{axis}={label}" for axis, label in labels.items())
            raise ValueError(f"report: two runs of seed {run.seed} at {place}; give each a label or a seed of its own")
        cell[run.seed] = run
    return Arrangement(
        report,
        tuple(axes[report.series]),
        facet_axes,
        tuple(_in_study_order({facet for _, facet in cells}, [list(axes[axis]) for axis in facet_axes])),
        {place: dict(sorted(cell.items())) for place, cell in cells.items()},
    )


def spoken(name: str) -> str:
    """A name of the log or of an axis as it stands in a figure."""
    return name.replace("_", " ")


def _varies_within(labelled: Sequence[tuple[dict[str, str], Run]], series: str, axis: str) -> bool:
    seen = {(labels[series], labels.get(axis)) for labels, _ in labelled}
    return len(seen) > len({label for label, _ in seen})


def _in_study_order(facets: set[Facet], orders: Sequence[Sequence[str]]) -> list[Facet]:
    ranks = [{label: i for i, label in enumerate(order)} for order in orders]
    return sorted(facets, key=lambda facet: tuple(r.get(x, -1) for r, x in zip(ranks, facet, strict=True)))
