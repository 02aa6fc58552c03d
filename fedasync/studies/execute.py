"""Run a study: in parallel processes, each run once, with the same bytes for any number of processes."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedasync.runs.run import Run, write
from fedasync.simulation import simulate
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
    """How a job went: ``error`` is one line for the user; ``warning`` marks a finished run that met something odd."""

    folder: Path
    error: str | None = None
    warning: str | None = None


def jobs(study: Study, folder: Path) -> list[Job]:
    """Every run of a study with its folder, checked as far as can be without making it.

    Raises StudyError for the first configuration that cannot run.
    """
    found: list[Job] = []
    workloads: dict[str, int] = {}
    for plan in study.plans():
        labels = ", ".join(f"{axis} = {label}" for axis, label in plan.labels.items())
        where = f"{study.path} ({labels})" if labels else str(study.path)
        parts = build(plan.config, where)
        _check(parts, plan, where, workloads)
        inputs = store.inputs(plan.config, *parts.sources)
        run_id = store.run_id(plan.labels, plan.seed, plan.config, inputs)
        found.append(Job(plan, study.name, where, folder / "runs" / run_id))
    if len({job.folder for job in found}) < len(found):
        raise StudyError(f"{study.path}: two points of the axes are one and the same run; give them different values")
    return found


def _check(parts: Parts, plan: RunPlan, where: str, workloads: dict[str, int]) -> None:
    """Refuse a strategy that its population can never serve, before anything runs."""
    clients = parts.population.clients
    if parts.workload is not None:
        key = repr(plan.config["workload"])
        if key not in workloads:
            workloads[key] = _clients_of(parts, where)
        if clients not in (None, workloads[key]):
            raise StudyError(
                f"{where}: population.clients = {clients}, but the workload has {workloads[key]} clients; "
                f"{workloads[key]} would do, or leave population.clients out"
            )
        clients = workloads[key]
    if clients is not None and (refusal := parts.strategy.refusal(clients)) is not None:
        raise StudyError(f"{where}: {refusal}")


def _clients_of(parts: Parts, where: str) -> int:
    assert parts.workload is not None
    workload = parts.workload()
    try:
        return len(workload.client_samples())
    except Exception as error:
        raise StudyError(f"{where}: workload: client_samples raised {type(error).__name__}: {error}") from error


def execute(waiting: Sequence[Job], processes: int) -> Iterator[Outcome]:
    """Make runs in ``processes`` processes; outcomes come as they finish.

    A run that fails leaves its traceback in ``<run>.error.log`` beside the run folders; the others go on.
    """
    from joblib import Parallel, delayed

    if processes == 1 or len(waiting) == 1:
        yield from map(perform, waiting)
        return
    workers = Parallel(n_jobs=min(processes, len(waiting)), return_as="generator_unordered", batch_size=1)
    yield from workers(delayed(_perform_apart)(job) for job in waiting)


def _perform_apart(job: Job) -> Outcome:
    """In a worker process: Ctrl-C is the parent's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return perform(job)


def perform(job: Job) -> Outcome:
    """Make one run and keep it."""
    log = job.folder.with_name(f"{job.folder.name}.{store.ERROR}")
    try:
        run = _simulate(job)
        store.keep(run, job.folder)
        log.unlink(missing_ok=True)
    except Exception as error:  # noqa: BLE001  a user's code may raise anything; the study reports it and goes on
        line = f"run {job.folder.name}: {_one_line(error)}"
        try:
            job.folder.parent.mkdir(parents=True, exist_ok=True)
            write(log, "".join(traceback.format_exception(error)).encode())
        except OSError:  # the disk that failed the run is too full for its traceback as well
            return Outcome(job.folder, line)
        return Outcome(job.folder, f"{line} (traceback: {log})")
    return Outcome(job.folder, warning=_oddity(run, job.folder))


def _simulate(job: Job) -> Run:
    parts = build(job.plan.config, job.where)
    workload = None
    if parts.workload is not None:
        import torch

        torch.set_num_threads(1)  # sums of many threads depend on their number
        workload = parts.workload()
    run = simulate(
        parts.strategy,
        parts.population,
        workload,
        parts.settings,
        seed=job.plan.seed,
        target=job.plan.config["targets"],
        name=job.folder.name,
        study=job.study,
        labels=job.plan.labels,
        config={**job.plan.config, "versions": store.versions()},
    )
    broken = [v for v in run.summary["verdicts"] if not v["holds"]]
    if broken:
        raise AssertionError(
            f"the run breaks its own laws: {'; '.join(v['name'] + ': ' + v['detail'] for v in broken)}"
        )
    return run


def _oddity(run: Run, folder: Path) -> str | None:
    summary = run.summary
    if summary["unfit_total"]:
        first = summary["unfit"][0]
        return (
            f"run {folder.name}: {summary['unfit_total']} contributions were not fit for use; the first, of client "
            f"{first['client']}, lease {first['lease']}, at {first['time_s']:g} s: {first['reason']}, {first['detail']}"
        )
    if summary["ended"].startswith("nothing"):
        return f"run {folder.name}: {summary['ended']}"
    return None


def _one_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(text.split())


def processes_by_default() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
