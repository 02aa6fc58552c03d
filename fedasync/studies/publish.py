"""A study's folder: what it was, its table and its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.core import Cohort
from fedasync.report import Report, write_report
from fedasync.runs.run import Run, write
from fedasync.simulation import Always
from fedasync.simulation.closed_forms import speedup_ceiling
from fedasync.simulation.laws import Constant, Values
from fedasync.studies.build import build_federated, is_cluster
from fedasync.studies.calibration import calibration_text
from fedasync.studies.errors import StudyError, parse
from fedasync.studies.store import is_finished
from fedasync.studies.study import Study

if TYPE_CHECKING:
    import polars as pl

STUDY = "study.json"


def describe(study: Study, runs: Sequence[Path], command: str) -> dict[str, Any]:
    """What ``publish`` needs to draw a study again, without the file that it came from."""
    return {
        "name": study.name,
        "title": study.header.title,
        "description": study.header.description,
        "command": command,
        "report": {name: study.content[name] for name in ("published",) if name in study.content}
        | study.content.get("report", {}),
        "calibration": calibration_text(study),
        "runs": [folder.name for folder in runs],
    }


def remember(folder: Path, description: Mapping[str, Any]) -> None:
    """Keep the description in the study's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / STUDY, (json.dumps(description, indent=1) + "\n").encode())


def recall(folder: Path) -> dict[str, Any]:
    """The description in a study's folder. Raises StudyError when there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / STUDY).read_text())
    except (OSError, ValueError) as error:
        raise StudyError(f"{folder}: no study here: {STUDY}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict) or "runs" not in found:
        raise StudyError(f"{folder}: no study here: {STUDY} names no runs")
    return found


def finished_runs(folder: Path, description: Mapping[str, Any]) -> list[Path]:
    """The folders of the study's finished runs."""
    return [path for name in description["runs"] if is_finished(path := folder / "runs" / name)]


def load_runs(folder: Path, description: Mapping[str, Any]) -> tuple[list[Run], Report]:
    """The finished runs and the report asked for. Raises StudyError when there are none, or one cannot be read."""
    try:
        runs = [Run.load(path) for path in finished_runs(folder, description)]
    except ValueError as error:
        raise StudyError(str(error)) from None
    if not runs:
        raise StudyError(f"{folder}: no run has finished, so there is nothing to draw")
    report: Report = parse(Report, description["report"], f"{folder}: report")
    return runs, report


def publish(folder: Path, description: Mapping[str, Any]) -> tuple[list[Run], Report, list[Path]]:
    """Write table and figures of the finished runs; the runs, the report asked for, and the files written.

    Raises StudyError when no run has finished, or the report names what does not exist.
    """
    runs, report = load_runs(folder, description)
    tables = {"settings": settings_table(runs, report)}
    if "closed_forms" in report.figures:
        tables["closed_forms"] = closed_form_table(runs)
    try:
        written = write_report(
            runs,
            report,
            folder,
            description["command"],
            description["title"],
            ceilings=_ceilings(runs, report),
            extra_tables=tables,
            note=f"Seeds: {description['seeds']}." if description.get("seeds") else "",
            calibration=description.get("calibration", ""),
        )
    except ValueError as error:
        raise StudyError(f"{folder}: {error}") from None
    return runs, report, written


def closed_form_table(runs: Sequence[Run]) -> pl.DataFrame:
    """Predicted beside measured, a row a point and closed form: mean over seeds, and its relative error."""
    import polars as pl

    rows = [{**run.labels, **form, "seed": run.seed} for run in runs for form in run.summary["closed_forms"]]
    axes = list(dict.fromkeys(axis for run in runs for axis in run.labels))
    columns = [*axes, "name", "formula", "predicted"]
    if not rows:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
    return (
        pl.DataFrame(rows)
        .group_by(columns, maintain_order=True)
        .agg(
            measured=pl.col("measured").mean(),
            standard_error=pl.col("measured").std() / pl.len().sqrt(),
            seeds=pl.len(),
        )
        .with_columns(
            pl.col("standard_error").round(9), relative_error=(pl.col("measured") / pl.col("predicted") - 1).round(6)
        )
    )


def settings_table(runs: Sequence[Run], report: Report) -> pl.DataFrame:
    """The settings of every strategy that a study compares, a row each."""
    import polars as pl

    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for run in runs:
        strategy = dict(run.config["strategy"])
        labels = {report.series: run.labels.get(report.series, run.summary["strategy"])}
        settings = ", ".join(f"{key} = {_plain(value)}" for key, value in strategy.items() if key != "name")
        row = {**labels, "row": str(strategy["name"]), "settings": settings}
        rows[tuple(row.values())] = row
    return pl.DataFrame(list(rows.values()))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_plain(item)}' for key, item in value.items())}}}"
    return str(value)


def _ceilings(runs: Sequence[Run], report: Report) -> dict[str, float] | None:
    """E[max of n]/E[t] for each label of the x axis, where one law gives every lease's whole duration."""
    if report.x_axis is None or "speedup_by_axis" not in report.figures:
        return None
    found: dict[str, set[float]] = {}
    for run in runs:
        if run.labels.get(report.series) == report.baseline:
            found.setdefault(run.labels[report.x_axis], set()).add(_ceiling(run))
    # A label that stands for several laws (in other facets) has no one ceiling.
    return {label: min(values) for label, values in found.items() if len(values) == 1 and min(values) > 0}


def _ceiling(run: Run) -> float:
    """The ceiling over a synchronous run; 0 where none is known: clients that differ, leave, or have a network."""
    config = {key: value for key, value in run.config.items() if key != "versions"}
    if is_cluster(config, str(run.folder)):
        return 0.0
    parts = build_federated(config, str(run.folder))
    population, cohort = parts.population, parts.strategy.admission
    known = (
        isinstance(cohort, Cohort)
        and cohort.target == cohort.size
        and parts.strategy.lease_timeout_s is None
        and isinstance(population.slowness, Constant)
        and population.seconds_per_sample is None
        and not population.has_network
        and not population.classes
        and population.capacity is None
        and population.outages is None
        and isinstance(population.availability, Always)
        and population.dropout_probability == population.crash_probability == 0
        and population.duration_s is not None
        and not isinstance(population.duration_s, Values)
    )
    if not known or population.duration_s is None or not isinstance(cohort, Cohort):
        return 0.0
    return speedup_ceiling(population.duration_s, cohort.size)
