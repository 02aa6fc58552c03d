"""An experiment of rollout workers and a trainer: its runs, one after the other, and what is published of them."""

from __future__ import annotations

import os
import re
import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from fedasync.runs.run import Run, write
from fedasync.studies import store
from fedasync.studies.command import console_for_tables, tell, warn
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import EARLY, error_log
from fedasync.studies.experiment import PREDICTED, carry_out
from fedasync.studies.measurements import Measurement
from fedasync.studies.out_folder import check_out
from fedasync.studies.problem_tables import demand_tracker, refuse_clients_row
from fedasync.studies.run_progress import shown
from fedasync.studies.signals import left_on_signals
from fedasync.studies.trainer_file import TrainerExperiment, load
from fedasync.studies.trainer_parts import TrainerParts, build_trainer
from fedasync.studies.trainer_progress import TOLD, TrainerProgress
from fedasync.trainer.keys import KEY_FILE
from fedasync.trainer.run import FAILURES, POLICY, TrainerRequest
from fedasync.trainer.run_state import CHECKPOINTS, STATE

PROGRESS, LOGS, LOCK, TRACKER = "progress", "logs", "lock", "tracker"
"""The folder beside the runs in which one is made, and there its processes' logs, who makes it, a tracker's files."""
OF_LEASES = r"\d+ in flight|a free slot |no lease is given out|the server applies |the next time limit "
"""How clauses begin, of those that say who waits for whom, that tell of leases what answers and processes tell too."""


class UnfinishedError(RuntimeError):
    """A run came to no good end: it stalled, trains on nothing or diverged. It can go on from its newest checkpoint."""


@dataclass(frozen=True)
class Planned:
    """A run that is to be made, with its parts."""

    one: Measurement
    parts: TrainerParts
    where: str

    @property
    def progress(self) -> Path:
        """Where it is made; what an interrupted run goes on from lies there."""
        return self.one.folder.parent.parent / PROGRESS / self.one.folder.name


def run_trainer_experiment(
    path: Path, command: str, changes: Sequence[str], seeds: int | None, out: Path | None
) -> int:
    """Make an experiment's runs one after the other, publish them, and hold them against their prediction.

    As ``run_experiment``. A run that is interrupted goes on from its newest checkpoint.
    """
    console, complaints = console_for_tables(), Console(stderr=True, soft_wrap=True)
    experiment = load(path, changes, seeds)
    study = experiment.study
    folder = out or Path("results") / study.name
    check_out(folder, study)
    plans = planned(experiment, folder)
    runs = [each.one for each in plans]
    warnings = [line for each in plans for line in each.parts.problem.warnings()]

    def make_all() -> list[str]:
        warn(warnings, complaints)
        with left_on_signals():
            return _make_all(plans, console, complaints)

    def predict() -> None:
        from fedasync.studies.predict_rl import predict_rl

        predict_rl(experiment, runs, folder, folder / PREDICTED, command, console)

    foreseen = None if experiment.prediction is None else predict
    return carry_out(study, runs, folder, command, make_all, oddity, foreseen, (console, complaints))


def planned(experiment: TrainerExperiment, folder: Path) -> list[Planned]:
    """Every run in the order in which it is made: all points of the axes with one seed before any with the next.

    Checked as far as can be without making it. Raises StudyError for the first that cannot run.
    """
    study, found = experiment.study, []
    for seed in study.header.seed_list:
        for plan in study.plans([seed]):
            labels = ", ".join(f"{axis} = {label}" for axis, label in plan.labels.items())
            where = f"{study.path} ({labels})" if labels else str(study.path)
            refuse_clients_row(plan.config, where)
            demand_tracker(plan.config, where)
            try:
                parts = build_trainer(plan.config, where)
            except SystemExit as error:  # a user's module, task or strategy
                raise StudyError(f"{where}: the user's code raised SystemExit: {error}") from None
            inputs = store.inputs(plan.config, *parts.sources)
            asked = {**plan.config, "processes": without_addresses(plan.config["processes"])}
            run_id = store.run_id(plan.labels, plan.seed, asked, inputs, *store.OF_PROCESSES)
            found.append(Planned(Measurement(plan, study.name, folder / "runs" / run_id), parts, where))
    if len({each.one.folder for each in found}) < len(found):
        raise StudyError(f"{study.path}: two points of the axes are one and the same run; give them different values")
    if len(found) > 1 and any((each.parts.processes.listen or "").endswith(":0") for each in found):
        raise StudyError(
            f"{study.path}: processes.listen: port 0 is another one in each of {len(found)} runs, and workers know "
            "one; a port of your own would do"
        )
    return found


def without_addresses(processes: Mapping[str, Any]) -> dict[str, Any]:
    """[processes] without where this machine listens: a run is the same one at another address."""
    return {key: value for key, value in processes.items() if key not in ("listen", "weights_port")}


def _make_all(plans: Sequence[Planned], console: Console, complaints: Console) -> list[str]:
    """Make the runs that are not there yet; what went wrong, a line a run, told as it happens."""
    errors: list[str] = []
    for number, each in enumerate(plans, 1):
        if store.is_finished(each.one.folder):
            continue
        place = f"run {number} of {len(plans)}: {each.one.labels}"
        if (each.progress / CHECKPOINTS).is_dir():
            console.print(f"{place}: goes on from its last checkpoint", markup=False, highlight=False)
        began_s = monotonic()
        try:
            run = make(each, place, console)
        except UnfinishedError as error:
            errors.append(f"run {each.one.folder.name}: {brief(str(error))} ({_told_in(each.progress)})")
            tell(errors[-1:], complaints)
            continue
        except (RuntimeError, ValueError) as error:
            log = error_log(each.one.folder)
            log.parent.mkdir(parents=True, exist_ok=True)
            write(log, "".join(traceback.format_exception(error)).encode())
            told = f"{_told_in(each.progress)}; traceback: {log}"
            errors.append(f"run {each.one.folder.name}: {brief(str(error))} ({told})")
            tell(errors[-1:], complaints)
            continue
        took = timedelta(seconds=round(monotonic() - began_s))
        console.print(f"{place}: {_came_to(run)} (took {took})", markup=False, highlight=False)
    return errors


def make(planned: Planned, what: str, console: Console) -> Run:
    """Make one run and keep it in its place: whole, or absent; ``what`` names it while its progress is shown.

    Its folder has, beside the tables, the trained policy and what went wrong. Raises what ``TrainerRequest.make`` does,
    and UnfinishedError for an end that is none: then its progress stays, and the run is made from there the next time.
    """
    one, parts = planned.one, planned.parts
    request = TrainerRequest(
        strategy=parts.strategy,
        problem=parts.tables,
        task_prompts=parts.problem.environment.prompts,
        prompts=parts.prompts,
        processes=parts.processes,
        settings=parts.settings,
        seed=one.plan.seed,
        target=one.plan.config["targets"],
        name=one.folder.name,
        study=one.study,
        labels=one.plan.labels,
        config={**one.plan.config, "versions": store.versions(of_policies=True)},
        engine=parts.engine,
        where=planned.where,
        key_file=planned.progress.parent / KEY_FILE,  # one for all runs of the experiment
        say=lambda line: console.print(f"{what}: {line}", markup=False, highlight=False, soft_wrap=True),
    )
    progress = TrainerProgress(parts.settings.versions)
    with _alone(planned.progress):
        with shown(what, progress, console):
            run = request.make(planned.progress, progress.told)
        if (ended := run.summary["ended"]).startswith(EARLY):
            where = (
                "its newest checkpoint" if any(planned.progress.glob(f"{CHECKPOINTS}/*/{STATE}")) else "its beginning"
            )
            with (planned.progress / FAILURES).open("a", encoding="utf-8") as file:
                file.write(f"{run.summary['time_s']:.3f} s: ended: {ended}\n")
            raise UnfinishedError(f"{ended}; the same command goes on from {where}")
        store.keep(run, one.folder, [planned.progress / name for name in (POLICY, FAILURES, LOGS, TRACKER)])
        shutil.rmtree(planned.progress, ignore_errors=True)
    error_log(one.folder).unlink(missing_ok=True)
    return Run.load(one.folder)


def brief(why: str) -> str:
    """Why a run came to no good end and whom it waits for, without what the coordinator says of leases and limits."""
    parts = re.sub(r"[:;] version \d+(?=;|$)", "", " ".join(why.split())).split("; ")
    return "; ".join(part for part in parts if not re.match(OF_LEASES, part))


def _told_in(progress: Path) -> str:
    """Where more is told: what went wrong, a line each, and what each process wrote."""
    failures = progress / FAILURES
    if failures.is_file() and failures.stat().st_size:
        return f"more: {failures}, logs beside it"
    return f"logs: {progress / LOGS}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else makes the run of this folder. Raises StudyError where somebody does."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StudyError(f"{folder}: another command makes this run; it can be waited for, or ended", 1) from None
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _came_to(run: Run) -> str:
    """What a run came to, in a few words."""
    summary = run.summary
    final = [f"{words} {summary['final'][name]:.4g}" for name, words in TOLD.items() if name in summary["final"]]
    return ", ".join(
        [f"ended by {summary['ended']} at {summary['time_s']:.1f} s, version {summary['versions']}", *final]
    )


def oddity(run: Run) -> str | None:
    """What a finished run met that its user should know of. Answers that failed are told by its tables."""
    summary = run.summary
    if summary["versions"] == 0:
        return f"run {summary['run_id']}: no version was made in {summary['time_s']:g} s, ended: {summary['ended']}"
    return None
