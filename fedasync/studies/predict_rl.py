"""The prediction of a real experiment on prompts: a cluster fitted to some runs, every series simulated with it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from fedasync.report import markdown, rich_table, save, write_table
from fedasync.report.prediction import SPEEDUP, Predicted, prediction_table, readable_predictions
from fedasync.report.prediction_figure import prediction_figure
from fedasync.report.rollout_numbers import STEP, workers_of
from fedasync.report.rollout_prediction import LEGEND, rollout_predictions
from fedasync.runs.run import Run
from fedasync.studies import store
from fedasync.studies.calibrate_rollouts import PREDICTED, calibrate_rollouts
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import Job, checked, perform
from fedasync.studies.experiment_prediction import verdicts
from fedasync.studies.measurements import Measurement
from fedasync.studies.publish import load_runs, remember
from fedasync.studies.rollout_calibration import run_table
from fedasync.studies.study import RunPlan

if TYPE_CHECKING:
    from fedasync.studies.trainer_file import TrainerExperiment

PREDICTION = "prediction"
FIXED = ("task", "policy", "sampling", "prompts")
"""Tables that a simulated cluster cannot follow an axis in: they decide how long answers are, or what they cost."""
COSTLY = ("objective", "optimiser")
"""Tables that may change what a step costs."""


def predict_rl(
    experiment: TrainerExperiment,
    runs: Sequence[Measurement],
    folder: Path,
    room: Path,
    command: str,
    console: Console,
    *,
    probes: bool = True,
) -> list[Predicted]:
    """Fit, simulate, and say how far the prediction is from what was measured.

    ``room`` gets contention.json (made by a probe unless it is there, or ``probes`` is false), the calibration and the
    simulated runs, ``folder`` prediction.csv, prediction.md and a figure. Raises StudyError.
    """
    prediction, report = experiment.prediction, experiment.study.report
    assert prediction is not None  # asked for
    base = [one for one in runs if one.plan.labels[report.series] == prediction.calibrate_on]
    if not base:
        raise StudyError(f"{folder}: no run has the label {prediction.calibrate_on!r}, which predictions are fitted to")
    for line in _differences(base[0], runs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    calibrate_rollouts([Run.load(one.folder) for one in base], room, command, probes=probes)
    simulated = _simulated(experiment, predicted_jobs(experiment, runs, room), room, command)
    measured = [Run.load(one.folder) for one in runs]
    try:
        rows = rollout_predictions(measured, simulated, report.series, prediction.calibrate_on, prediction.tolerance)
    except ValueError as error:
        raise StudyError(f"{folder}: {error}") from None
    shown = readable_predictions(rows, prediction.tolerance)
    title = f"{experiment.study.header.title}: predicted beside measured"
    page = f"# {title}\n\n{markdown(shown)}\n{LEGEND}\n\n`{command}`\n"
    written = write_table(prediction_table(rows), folder, PREDICTION, page)
    drawn = [row for row in rows if row.quantity in (STEP, SPEEDUP)]
    figure = prediction_figure(
        drawn, prediction.calibrate_on, prediction.tolerance, command, fitted="A simulated cluster was"
    )
    written += save(figure, folder / "figures", PREDICTION)
    console.print(rich_table(shown, "predicted beside measured"))
    for line in (LEGEND, *verdicts(rows, prediction)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    names = ", ".join(str(path.relative_to(folder)) for path in written if path.suffix != ".svg")
    console.print(f"{escape(str(folder))}: {names}", highlight=False, soft_wrap=True)
    return rows


def _differences(base: Measurement, runs: Sequence[Measurement]) -> list[str]:
    """What the simulator takes to cost the same. Raises StudyError for what it cannot follow."""
    told = []
    for one in runs:
        for table in (*FIXED, *COSTLY):
            if one.plan.config.get(table) == base.plan.config.get(table):
                continue
            if table in FIXED:
                raise StudyError(
                    f"prediction: [{table}] of {one.labels} is not that of {base.labels}, and no simulated cluster "
                    "knows what that changes; axes over [strategy], [processes] and [run] would do"
                )
            told.append(f"[{table}] of {one.labels} is not that of {base.labels}: a step is taken to cost the same")
    return list(dict.fromkeys(told))


def predicted_jobs(experiment: TrainerExperiment, runs: Sequence[Measurement], room: Path) -> list[Job]:
    """Each measured run under the virtual clock, with its own strategy, processes and seed. Raises StudyError."""
    fitted = tomllib.loads((room / PREDICTED).read_text(encoding="utf-8"))
    found = []
    for one in runs:
        asked = one.plan.config
        config = {
            "strategy": asked["strategy"],
            "run": run_table(Run(asked, {}), "evaluate_every" in fitted["run"]),
            "cluster": _cluster(fitted["cluster"], asked.get("processes", {})),
            "prompts": fitted["prompts"],
            "targets": {},
            "seed": one.plan.seed,
        }
        plan = RunPlan(one.plan.labels, one.plan.seed, config)
        where = f"{experiment.study.path}, predicted ({one.labels})"
        parts = checked(plan, where, {})
        run_id = store.run_id(plan.labels, plan.seed, config, store.inputs(config, *parts.sources))
        found.append(Job(plan, one.study, where, room / "runs" / run_id))
    return found


def _cluster(fitted: Mapping[str, Any], processes: Mapping[str, Any]) -> dict[str, Any]:
    """The fitted cluster with so many workers as an axis may say."""
    cluster = dict(fitted)
    if "workers" in processes or "remote_workers" in processes:
        cluster["generation_gpus"] = workers_of(processes)
    if "max_running" in processes:
        cluster["decoding"] = {**fitted["decoding"], "max_running": processes["max_running"]}
    if "kv" in processes:
        cluster["weights"] = {**fitted["weights"], "kv": processes["kv"]}
    return cluster


def _simulated(experiment: TrainerExperiment, every: Sequence[Job], room: Path, command: str) -> list[Run]:
    """The simulated runs, in this process; those of the same cluster are not made again."""
    study = experiment.study
    store.sweep(room / "runs")
    description = {
        "name": study.name,
        "title": f"Predicted: {study.header.title}",
        "description": study.header.description,
        "command": command,
        "report": {"series": study.report.series, "figures": []},
        "calibration": None,
        "runs": [job.folder.name for job in every],
    }
    remember(room, description)
    for outcome in perform([job for job in every if not store.is_finished(job.folder)]):
        if outcome.error:
            raise StudyError(f"{room}: {outcome.error}", 1)
    return load_runs(room, description)[0]
