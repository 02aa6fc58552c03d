"""Run a study: in parallel processes, each run once, with the same bytes for any number of processes."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from fedasync.runs.run import Run, write
from fedasync.simulation import Clients, simulate
from fedasync.simulation.simulate import check, realise
from fedasync.studies import store
from fedasync.studies.build import Parts, build
from fedasync.studies.errors import StudyError
from fedasync.studies.study import RunPlan, Study


@dataclass(frozen=True)
class Job:
    """One run to be made, and the folder it is to become."""

    plan: RunPlan
    study: str
    where: str
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """How a job went: ``error`` is one line for the user, None for a finished run."""

    folder: Path
    error: str | None = None


def jobs(study: Study, folder: Path) -> list[Job]:
    """Every run of a study with its folder, checked as far as can be without making it.

    Raises StudyError for the first configuration that cannot run.
    """
    found: list[Job] = []
    worlds: dict[str, Clients | None] = {}
    for plan in study.plans():
        labels = ", ".join(f"{axis} = {label}" for axis, label in plan.labels.items())
        where = f"{study.path} ({labels})" if labels else str(study.path)
        parts = build(plan.config, where)
        _refuse(parts, plan, where, worlds)
        inputs = store.inputs(plan.config, *parts.sources)
        run_id = store.run_id(plan.labels, plan.seed, plan.config, inputs)
        found.append(Job(plan, study.name, where, folder / "runs" / run_id))
    if len({job.folder for job in found}) < len(found):
        raise StudyError(f"{study.path}: two points of the axes are one and the same run; give them different values")
    return found


def _refuse(parts: Parts, plan: RunPlan, where: str, worlds: dict[str, Clients | None]) -> None:
    """Refuse what can never run, before anything does."""
    key = repr((plan.config["population"], plan.config.get("workload")))
    try:
        if key not in worlds:
            worlds[key] = _world(parts, plan.seed)
        clients = worlds[key]
        if clients is not None:
            targets = plan.config["targets"]
            check(parts.strategy, clients, parts.settings, targets, learns=parts.workload is not None)
    except StudyError:
        raise
    except ValueError as error:
        raise StudyError(f"{where}: {error}") from None


def _world(parts: Parts, seed: int) -> Clients | None:
    """The clients of a run; None when a user's workload raises, which the run will meet again and report."""
    try:
        return realise(parts.population, parts.workload and parts.workload(), seed)
    except ValueError:
        raise
    except Exception:  # noqa: BLE001
        return None


def execute(waiting: Sequence[Job], processes: int) -> Generator[Outcome, None, None]:
    """Make runs in ``processes`` processes; outcomes come as they finish.

    A run that fails leaves its traceback in ``<run>.error.log`` beside the run folders; the others go on.
    """
    from joblib import Parallel, delayed

    if processes == 1 or len(waiting) <= 1:
        yield from map(perform, waiting)
        return
    workers = Parallel(n_jobs=min(processes, len(waiting)), return_as="generator_unordered", batch_size=1)
    with _interrupts_held_back():
        outcomes = workers(delayed(perform)(job) for job in waiting)
    yield from outcomes


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C comes only afterwards, and never to processes started meanwhile: they inherit the mask."""
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows, where Ctrl-C reaches every process
        yield
        return
    resource_tracker.ensure_running()  # starting, it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def perform(job: Job) -> Outcome:
    """Make one run and keep it. Raises OSError when it cannot be written, which ends the study."""
    log = job.folder.with_name(f"{job.folder.name}.{store.ERROR}")
    try:
        run = _simulate(job)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may raise anything; the study goes on
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        write(log, "".join(traceback.format_exception(error)).encode())
        return Outcome(job.folder, f"run {job.folder.name}: {_one_line(error)} (traceback: {log})")
    store.keep(run, job.folder)
    log.unlink(missing_ok=True)
    return Outcome(job.folder)


def _simulate(job: Job) -> Run:
    parts = build(job.plan.config, job.where)
    return simulate(
        parts.strategy,
        parts.population,
        None if parts.workload is None else parts.workload(),
        parts.settings,
        seed=job.plan.seed,
        target=job.plan.config["targets"],
        name=job.folder.name,
        study=job.study,
        labels=job.plan.labels,
        config={**job.plan.config, "versions": store.versions()},
    )


def _one_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif not isinstance(error, (ValueError, RuntimeError)):  # those of fedasync speak for themselves
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.split())


def processes_by_default() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
