"""What the command ``run`` does: a study on processes of this machine, Flower's or rollout workers and a trainer."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedasync.flower.configuration import EXPERIMENT
from fedasync.flower.keeper import FAILURES
from fedasync.report import brief_tables
from fedasync.runs.run import Run
from fedasync.studies import store
from fedasync.studies.command import console_for_tables, tell, unfit_line, why_ended
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import EARLY
from fedasync.studies.experiment_file import Experiment, load
from fedasync.studies.experiment_prediction import predict
from fedasync.studies.flower_run import FailedRunError, LostFederationError, keep_log, local_federation, make_run
from fedasync.studies.measurements import Measurement, any_finished, measurements
from fedasync.studies.out_folder import check_out
from fedasync.studies.publish import describe, publish, remember
from fedasync.studies.shipped import find
from fedasync.studies.study import Study
from fedasync.studies.trainer_file import is_trainer

FEDERATION, PREDICTED = "federation", "predicted"
"""Folders beside the runs: logs of Flower's processes, and what was simulated."""


def run_experiment(file: str, changes: Sequence[str] = (), seeds: int | None = None, out: Path | None = None) -> int:
    """Make an experiment's runs one after the other, publish them, and hold them against their prediction.

    The exit status: 0, or 1 when a run failed or came to no good end. Finished runs are not made again. Raises
    StudyError, with status 130 after Ctrl-C, 143 after SIGTERM, and 1 when the machine does not let it go on; whatever
    was started has ended by then.
    """
    path = find(file, "experiments", "experiment")
    if is_trainer(path):
        from fedasync.studies.trainer_experiment import run_trainer_experiment

        return run_trainer_experiment(path, command_line(file, changes, seeds), changes, seeds, out)
    console, complaints = console_for_tables(), Console(stderr=True, soft_wrap=True)
    experiment = load(path, changes, seeds)
    study = experiment.study
    folder = out or Path("results") / study.name
    check_out(folder, study)
    runs = measurements(experiment, folder)
    command = command_line(file, changes, seeds)
    return carry_out(
        study,
        runs,
        folder,
        command,
        lambda: _make_all(experiment, runs, folder, console, complaints),
        oddity,
        None
        if experiment.prediction is None
        else lambda: predict(experiment, runs, folder, folder / PREDICTED, command, console),
        (console, complaints),
    )


def carry_out(
    study: Study,
    runs: Sequence[Measurement],
    folder: Path,
    command: str,
    make_all: Callable[[], list[str]],
    oddity: Callable[[Run], str | None],
    predict: Callable[[], object] | None,
    consoles: tuple[Console, Console],
) -> int:
    """Make the runs that are not there yet, publish all, and hold them against their prediction; the exit status.

    ``make_all`` returns what went wrong, a line a run; ``oddity`` what a finished run met. ``consoles`` are for tables,
    and for complaints. Raises StudyError for whatever stops it, which says that the same command goes on.
    """
    console, complaints = consoles
    store.sweep(folder / "runs")
    finished = sum(store.is_finished(one.folder) for one in runs)
    console.print(
        f"[bold]{escape(study.header.title)}[/bold]  ({len(runs)} runs, {finished or 'none'} finished before)"
    )
    try:
        description = describe(study, [one.folder for one in runs], command)
        remember(folder, description)
        errors = make_all()
        made = show_published(folder, description, console) if any_finished(runs) else []
        odd = [line for run in made if (line := oddity(run))]
        tell(odd, complaints)
        if predict is not None:
            unmade = [one for one in runs if not store.is_finished(one.folder)]
            if unmade:
                complaints.print(f"fedasync: nothing is predicted: {len(unmade)} of {len(runs)} runs are missing")
            else:
                predict()
    except (KeyboardInterrupt, SystemExit, OSError) as error:
        store.sweep(folder / "runs")
        why, status = why_stopped(error, folder)
        there = sum(store.is_finished(one.folder) for one in runs)
        raise StudyError(
            f"{why}; {there} of {len(runs)} runs are finished, and the same command goes on from there", status
        ) from None
    return 1 if errors or odd else 0


def _make_all(
    experiment: Experiment, runs: Sequence[Measurement], folder: Path, console: Console, complaints: Console
) -> list[str]:
    """Make the runs that are not there yet, one after the other; what went wrong, a line a run, told as it happens.

    Where a process of the federation dies, the next run gets a new federation.
    """
    waiting = [one for one in runs if not store.is_finished(one.folder)]
    errors: list[str] = []
    while waiting:
        console.print(f"starting {experiment.federation.clients} clients; logs: {folder / FEDERATION / 'logs'}")
        with local_federation(folder / FEDERATION, experiment.federation) as federation:
            while waiting:
                one = waiting.pop(0)
                place = f"run {runs.index(one) + 1} of {len(runs)}: {one.labels}"
                began_s = monotonic()
                try:
                    run = make_run(federation, deployed(one), one.folder, place, console)
                    took = timedelta(seconds=round(monotonic() - began_s))
                    console.print(f"{place}: {_said(run)} (took {took})", markup=False, highlight=False)
                except FailedRunError as error:
                    log = keep_log(one.folder, error.log)
                    errors.append(f"run {one.folder.name}: {error} (log: {log})")
                except LostFederationError as error:
                    errors.append(f"run {one.folder.name}: {error}")
                    tell(errors[-1:], complaints)
                    break
                else:
                    if deaths := federation.deaths():
                        tell(deaths, complaints)
                        break
                    continue
                tell(errors[-1:], complaints)
    return errors


def deployed(one: Measurement) -> dict[str, Any]:
    """The configuration of a run as Flower's apps read it, but for its folder."""
    place = {"study": one.study, "name": one.folder.name, "labels": dict(one.plan.labels)}
    return {**one.plan.config, EXPERIMENT: place}


def _said(run: Run) -> str:
    """What a run came to, in a few words."""
    summary = run.summary
    ended = {"time": "time limit", "target": "target reached"}.get(summary["ended"], summary["ended"])
    final = [f"{name} {value:.4g}" for name, value in summary["final"].items() if value is not None]
    return ", ".join([f"{ended} at {summary['time_s']:.1f} s", f"version {summary['versions']}", *final])


def show_published(folder: Path, description: dict[str, Any], console: Console) -> list[Run]:
    """Publish the measured runs, and print what was published."""
    runs, report, written = publish(folder, description)
    for table in brief_tables(runs, report):
        console.print(table)
    names = ", ".join(str(path.relative_to(folder)) for path in written if path.suffix != ".svg")
    console.print(f"{folder}: {names}", markup=False, highlight=False, soft_wrap=True)
    return runs


def oddity(run: Run) -> str | None:
    """What a finished run met that its user should know of."""
    summary = run.summary
    if line := unfit_line(summary):
        return line
    if failed := summary["ledger"]["failed"]:
        lost = ", ".join(f"{count} {reason}" for reason, count in failed.items())
        told = run.folder and run.folder / FAILURES
        first = told.read_text("utf-8").splitlines()[:1] if told and told.is_file() else []
        return "; ".join([f"run {summary['run_id']}: tasks failed: {lost}", *first])
    if summary["ended"].startswith(EARLY):
        return f"run {summary['run_id']}: {summary['ended']}"
    return None


def why_stopped(error: BaseException, folder: Path) -> tuple[str, int]:
    """Why it ended early, and the exit status for it; a SystemExit is told by a signal."""
    if isinstance(error, SystemExit):
        return f"ended by signal {int(error.code or 128) - 128}", int(error.code or 1)
    return why_ended(error, folder)


def command_line(file: str, changes: Sequence[str], seeds: int | None) -> str:
    """The command that does it again."""
    words = ["fedasync", "run", file]
    for change in changes:
        words += ["--set", change]
    if seeds is not None:
        words += ["--seeds", str(seeds)]
    return shlex.join(words)
