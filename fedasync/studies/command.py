"""What the commands ``sim``, ``list`` and ``plot`` do."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedasync.report import brief_tables, ranking_tables, readable_rollouts, rich_table
from fedasync.report.published import readable_published
from fedasync.report.tightness import look
from fedasync.runs.run import Run
from fedasync.studies import store
from fedasync.studies.calibration import ROOM, calibrated, calibration_text
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import EARLY, Backend, Job, LostWorkerError, Outcome, execute, groups, jobs
from fedasync.studies.out_folder import check_out
from fedasync.studies.problem_tables import refuse_clients_row
from fedasync.studies.publish import STUDY, describe, finished_runs, load_runs, publish, recall, remember
from fedasync.studies.shipped import files, find
from fedasync.studies.study import SeedsUntil, Study, load

MOST_LINES = 5
"""Failures told one by one; the rest is counted."""


def run_study(
    name: str,
    changes: Sequence[str],
    processes: int | None,
    seeds: int | None,
    out: Path | None,
    backend: Backend = "local",
) -> int:
    """Run and publish a study; the exit status: 0, or 1 when a run failed or met something unfit.

    Raises StudyError, with status 130 after Ctrl-C and 1 when the machine does not let it go on.
    """
    console, complaints = console_for_tables(), Console(stderr=True, soft_wrap=True)
    path = find(name, "sims", "study")
    study = load(path, changes, seeds)
    folder = out or Path("results") / study.name
    check_out(folder, study)
    for plan in study.plans() if "task" in study.base else ():
        refuse_clients_row(plan.config, str(path))
    if study.calibrations:
        study = _calibrated(study, folder, processes, console, backend)
    all_jobs = jobs(study, folder)
    store.sweep(folder / "runs")
    command = _command(name, changes, seeds)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"[bold]{escape(study.header.title)}[/bold]  ({_extent(study, all_jobs)})")
    warn((line for job in all_jobs for line in job.warnings), complaints)
    try:
        description, errors = _make_all(study, all_jobs, folder, command, processes, console, backend)
        runs = _show(folder, description, console) if len(errors) < len(description["runs"]) else []
        for reason in dict.fromkeys(run.summary["not_batched"] for run in runs if run.summary["not_batched"]):
            console.print(f"Results were computed one by one: {reason}", markup=False, highlight=False)
        odd = [line for run in runs if (line := _oddity(run))]
        tell(errors + odd, complaints)
    except (KeyboardInterrupt, OSError, BrokenProcessPool, LostWorkerError) as error:
        store.sweep(folder / "runs")
        why, status = why_ended(error, folder)
        begun = recall(folder) if (folder / STUDY).is_file() else {"runs": []}
        finished = len(finished_runs(folder, begun))
        raise StudyError(
            f"{why}; {finished} of {len(begun['runs'])} runs are finished, and the same command goes on from there",
            status,
        ) from None
    return 1 if errors or odd else 0


def _calibrated(study: Study, folder: Path, processes: int | None, console: Console, backend: Backend) -> Study:
    """Fit what the study leaves free, and say what was fitted to what. Raises StudyError."""
    store.sweep(folder / ROOM)
    try:
        study = calibrated(study, folder, lambda waiting: list(execute(waiting, processes, backend)))
    except (KeyboardInterrupt, OSError, BrokenProcessPool, LostWorkerError) as error:
        store.sweep(folder / ROOM)
        why, status = why_ended(error, folder)
        raise StudyError(f"{why}, while parameters were fitted; the same command goes on from there", status) from None
    console.print(calibration_text(study), markup=False, highlight=False, soft_wrap=True)
    return study


def _make_all(
    study: Study,
    all_jobs: Sequence[Job],
    folder: Path,
    command: str,
    processes: int | None,
    console: Console,
    backend: Backend,
) -> tuple[dict[str, Any], list[str]]:
    """Make the study's runs: its description, and what went wrong, a line a run.

    Where the intervals decide on the number of seeds, whole seeds are added one by one, the same for every
    configuration. A round looks at the runs of its own seeds alone, so a study that was interrupted, or finds more
    seeds in its folder, stops where an undisturbed one does.
    """
    rule = study.header.seeds
    lengths = range(rule.at_least, rule.at_most + 1) if isinstance(rule, SeedsUntil) else [len(study.header.seed_list)]
    tight_in_a_row = 0
    for seeds in lengths:
        chosen = study.header.seed_list[:seeds]
        made = [job for job in all_jobs if job.plan.seed in chosen]
        description = describe(study, [job.folder for job in made], command)
        remember(folder, description)
        errors = _make(made, processes, console, backend)
        if not isinstance(rule, SeedsUntil):
            break
        if errors:
            description["seeds"] = f"stopped at {seeds} seeds: a run failed, so others have no partner"
        else:
            runs, report = load_runs(folder, description)
            try:
                found = look(runs, report, rule.until, seeds, rule.at_most, tight_in_a_row)
            except ValueError as error:  # the report names what no run has
                raise StudyError(f"{folder}: {error}") from None
            tight_in_a_row = found.tight_in_a_row
            console.print(found.said, markup=False, highlight=False, soft_wrap=True)
            description["seeds"] = found.stop
        if description["seeds"]:
            console.print(description["seeds"], markup=False, highlight=False, soft_wrap=True)
            remember(folder, description)
            break
    return description, errors


def _make(made: Sequence[Job], processes: int | None, console: Console, backend: Backend) -> list[str]:
    """Make the runs that are not there yet; what went wrong, a line a run."""
    unfinished = {job.folder for job in made if not store.is_finished(job.folder)}
    together = [[job for job in group if job.folder in unfinished] for group in groups(made)]
    waiting = [group for group in together if group]
    outcomes = execute_all(waiting, processes, console, backend) if waiting else []
    return [outcome.error for outcome in outcomes if outcome.error]


def draw(folder: Path) -> None:
    """Write table and figures of a study's folder again."""
    _show(folder, recall(folder), console_for_tables())


def list_studies() -> None:
    """Print the studies that can be named."""
    table = Table("name", "runs", "title", "file")
    for path in files("sims").values():
        try:
            study = load(path)
            most, rule = sum(1 for _ in study.plans()), study.header.seeds
            runs = f"{most // rule.at_most * rule.at_least}–{most}" if isinstance(rule, SeedsUntil) else str(most)
            table.add_row(study.name, runs, escape(study.header.title), str(path))
        except StudyError as error:
            table.add_row(path.stem, "?", escape(str(error)), str(path))
    console_for_tables().print(table)


def execute_all(
    waiting: Sequence[Sequence[Job]], processes: int | None, console: Console, backend: Backend
) -> list[Outcome]:
    """Make groups of runs under a bar of progress."""
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
    )
    outcomes = []
    with (
        Progress(*columns, console=console) as progress,
        warnings.catch_warnings(),
        closing(execute(waiting, processes, backend)) as running,
    ):
        warnings.filterwarnings("ignore", module="joblib")  # it complains when it is closed early, after Ctrl-C
        task = progress.add_task("runs", total=sum(map(len, waiting)))
        for outcome in running:
            outcomes.append(outcome)
            progress.advance(task)
    return outcomes


def why_ended(error: BaseException, folder: Path) -> tuple[str, int]:
    """Why a study ended early, and the exit status for it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or folder}", 1
    if isinstance(error, LostWorkerError):
        return str(error), 1
    return "a process that made a run was killed, perhaps for want of memory (--jobs 1 takes the least)", 1


def _extent(study: Study, all_jobs: Sequence[Job]) -> str:
    """How many runs there are, and how many of them are there already."""
    finished = sum(store.is_finished(job.folder) for job in all_jobs)
    done = f"{finished} finished before" if finished else "none finished before"
    rule = study.header.seeds
    if not isinstance(rule, SeedsUntil):
        return f"{len(all_jobs)} runs, {done}"
    each = len(all_jobs) // rule.at_most
    return f"{each} runs a seed, {rule.at_least} to {rule.at_most} seeds, {done}"


def tell(lines: Sequence[str], complaints: Console) -> None:
    """Print what went wrong, a line each, and beyond some their number."""
    for line in lines[:MOST_LINES]:
        complaints.print(f"fedasync: {line}", markup=False, highlight=False)
    if len(lines) > MOST_LINES:
        complaints.print(f"fedasync: and {len(lines) - MOST_LINES} more runs with errors or warnings")


def warn(lines: Iterable[str], complaints: Console) -> None:
    """Print what a user should know before runs are made, each line once."""
    for line in dict.fromkeys(lines):
        complaints.print(f"fedasync: {line}", markup=False, highlight=False)


def console_for_tables() -> Console:
    """Wide enough for the tables when nobody's window says otherwise."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _show(folder: Path, description: Mapping[str, Any], console: Console) -> list[Run]:
    """Publish, and print what was published; the runs."""
    runs, report, written = publish(folder, description)
    for table in brief_tables(runs, report):
        console.print(table)
    if folder / "rollouts.csv" in written:
        console.print(rich_table(readable_rollouts(runs, report), "rollouts and trainer, without the warm-up"))
    if "ranking" in report.figures:
        for table in ranking_tables(runs, report):
            console.print(table)
    if folder / "published.csv" in written:
        console.print(rich_table(readable_published(runs, report), "predicted beside published"))
    for name in ("settings", "closed_forms", "claims"):
        if folder / f"{name}.csv" in written:
            console.print(rich_table(pl.read_csv(folder / f"{name}.csv"), name.replace("_", " ")))
    names = ", ".join(str(path.relative_to(folder)) for path in written if path.suffix != ".svg")
    console.print(f"{folder}: {names}", markup=False, highlight=False, soft_wrap=True)
    return runs


def unfit_line(summary: Mapping[str, Any]) -> str | None:
    """How many contributions were not fit for use, and what was wrong with the first; None where all were."""
    if not summary["unfit_total"]:
        return None
    first = summary["unfit"][0]
    who = f"client {first['client']}, lease {first['lease']}, at {first['time_s']:g} s"
    return (
        f"run {summary['run_id']}: {summary['unfit_total']} contributions were not fit for use; the first, of {who}: "
        f"{first['reason']}, {first['detail']}"
    )


def _oddity(run: Run) -> str | None:
    """What a finished run met that its user should know of."""
    summary = run.summary
    if line := unfit_line(summary):
        return line
    if summary["versions"] == 0 and "rollouts" in summary:
        return f"run {summary['run_id']}: no version was made in {summary['time_s']:g} s, ended: {summary['ended']}"
    if summary["versions"] == 0:
        ledger = summary["ledger"]
        no_version = f"run {summary['run_id']}: no version was made in {summary['time_s']:g} s"
        if ledger["admitted"] == 0:
            return f"{no_version}: nobody was ever online"
        interval_s = run.config["strategy"].get("interval_s")  # a buffer that is consumed by the clock
        shorter = "a smaller buffer" if interval_s is None else f"an interval_s shorter than {interval_s:g}"
        lost = ", ".join(
            f"{n} {why}" for kind in ("rejected", "failed", "cancelled") for why, n in ledger[kind].items()
        )
        return (
            f"{no_version}: {ledger['buffered']} contributions wait in the buffer, {ledger['in_flight']} are in "
            f"flight, lost: {lost or 'none'}; {shorter} or more time would do"
        )
    if summary["ended"].startswith(EARLY):
        return f"run {summary['run_id']}: {summary['ended']}"
    return None


def _command(name: str, changes: Sequence[str], seeds: int | None) -> str:
    words = ["fedasync", "sim", name]
    for change in changes:
        words += ["--set", change]
    if seeds is not None:
        words += ["--seeds", str(seeds)]
    return shlex.join(words)
