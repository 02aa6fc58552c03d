"""An experiment's prediction: clients fitted to some of its runs, every series simulated with them, and the error."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fedasync.flower.settings import DeploymentSettings
from fedasync.report import markdown, rich_table, save, write_table
from fedasync.report.prediction import (
    LEGEND,
    Predicted,
    error_text,
    prediction_table,
    predictions,
    readable_predictions,
)
from fedasync.report.prediction_figure import prediction_figure
from fedasync.runs.run import Run
from fedasync.simulation import Clients
from fedasync.studies import store
from fedasync.studies.calibrate_clients import PREDICTED, calibrate
from fedasync.studies.errors import StudyError, parse
from fedasync.studies.execute import Job, checked, perform
from fedasync.studies.experiment_file import Experiment, Prediction
from fedasync.studies.measurements import Measurement
from fedasync.studies.publish import describe, load_runs, remember
from fedasync.studies.study import RunPlan

PREDICTION = "prediction"


def predict(
    experiment: Experiment, runs: Sequence[Measurement], folder: Path, room: Path, command: str, console: Console
) -> list[Predicted]:
    """Fit, simulate, and say how far the prediction is from what was measured.

    ``room`` gets the calibration and the simulated runs, ``folder`` prediction.csv, prediction.md and a figure. Raises
    StudyError for runs that nothing can be fitted to, and for a simulation that fails.
    """
    prediction, report = experiment.prediction, experiment.study.report
    assert prediction is not None  # asked for
    fitted_to = [one.folder for one in runs if one.plan.labels[report.series] == prediction.calibrate_on]
    calibrate(fitted_to, room)
    every = predicted_jobs(experiment, runs, room / PREDICTED, room)
    simulated = _simulated(experiment, every, room, command)
    measured = [Run.load(one.folder) for one in runs]
    try:
        rows = predictions(measured, simulated, report, prediction.calibrate_on, prediction.tolerance)
    except ValueError as error:
        raise StudyError(f"{folder}: {error}") from None
    shown = readable_predictions(rows, prediction.tolerance)
    title = f"{experiment.study.header.title}: predicted beside measured"
    page = f"# {title}\n\n{markdown(shown)}\n{LEGEND}\n\n`{command}`\n"
    written = write_table(prediction_table(rows), folder, PREDICTION, page)
    figure = prediction_figure(rows, prediction.calibrate_on, prediction.tolerance, command)
    written += save(figure, folder / "figures", PREDICTION)
    console.print(rich_table(shown, "predicted beside measured"))
    console.print(LEGEND)
    for line in verdicts(rows, prediction):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    names = ", ".join(str(path.relative_to(folder)) for path in written if path.suffix != ".svg")
    console.print(f"{escape(str(folder))}: {names}", highlight=False, soft_wrap=True)
    return rows


def predicted_jobs(experiment: Experiment, runs: Sequence[Measurement], calibrated: Path, room: Path) -> list[Job]:
    """Each measured run under the virtual clock, with its own strategy and seed, and the clients of ``calibrated``.

    A client that nobody waits for any more goes on to its end: Flower cannot stop one. Raises StudyError.
    """
    population = tomllib.loads(calibrated.read_text(encoding="utf-8"))["population"]
    found = []
    worlds: dict[str, Clients | None] = {}
    for one in runs:
        asked = one.plan.config
        config = {table: asked[table] for table in ("strategy", "workload", "run", "targets", "seed")}
        config["population"] = population
        config["run"] = {**asked["run"], "cancelled_clients": "finish"}
        if population.get("crash_probability") and "lease_timeout_s" not in asked["strategy"]:
            settings: DeploymentSettings = parse(DeploymentSettings, asked["deployment"], f"{calibrated}: deployment")
            config["strategy"] = {**asked["strategy"], "lease_timeout_s": settings.task_timeout_s}
        plan = RunPlan(one.plan.labels, one.plan.seed, config)
        where = f"{experiment.study.path}, predicted ({one.labels})"
        parts = checked(plan, where, worlds)
        run_id = store.run_id(plan.labels, plan.seed, config, store.inputs(config, *parts.sources))
        found.append(Job(plan, one.study, where, room / "runs" / run_id))
    return found


def _simulated(experiment: Experiment, every: Sequence[Job], room: Path, command: str) -> list[Run]:
    """The simulated runs, in this process; those of the same clients are not made again."""
    title = f"Predicted: {experiment.study.header.title}"
    study = replace(experiment.study, header=replace(experiment.study.header, title=title))
    store.sweep(room / "runs")
    description = describe(study, [job.folder for job in every], command)
    remember(room, description)
    for outcome in perform([job for job in every if not store.is_finished(job.folder)]):
        if outcome.error:
            raise StudyError(f"{room}: {outcome.error}", 1)
    return load_runs(room, description)[0]


def verdicts(rows: Sequence[Predicted], prediction: Prediction) -> list[str]:
    """A sentence for each time and speed-up that was predicted."""
    lines = []
    for row in rows:
        if row.within is None or row.unit not in ("s", "×"):
            continue
        where = f"{'within' if row.within else 'NOT within'} {100 * prediction.tolerance:g} %"
        lines.append(
            f"{row.series}, {row.quantity}: predicted {row.predicted.mean:.3g} {row.unit}, measured "
            f"{row.measured.mean:.3g} {row.unit}: {error_text(row.error or 0.0)}, {where}"
        )
    return lines
