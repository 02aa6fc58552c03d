"""Run a study: in parallel processes, each run once, with the same bytes for any number of processes."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from fedasync.federated.one_thread import one_thread
from fedasync.runs.run import Run, write
from fedasync.simulation import Clients, RunRequest, simulate_together
from fedasync.simulation.cluster import simulate_cluster
from fedasync.simulation.cluster.refusals import check as check_cluster
from fedasync.simulation.refusals import check, realise
from fedasync.studies import store
from fedasync.studies.build import ClusterParts, Parts, build
from fedasync.studies.errors import StudyError
from fedasync.studies.problem_tables import demand_installed
from fedasync.studies.study import RunPlan, Study
from fedasync.workloads import Classification, Workload

if TYPE_CHECKING:
    from fedasync.simulation.cluster.learning import Learning

Backend = Literal["local", "ray"]

MOST_TOGETHER = 10
"""Runs that advance side by side: enough to fill batches, few enough to keep all processes at work."""


EARLY = ("nothing", "diverged", "stalled")
"""How ``ended`` begins of runs that came to no good end."""


class LostWorkerError(RuntimeError):
    """A process that made runs ended without a word."""


@dataclass(frozen=True)
class Job:
    """One run to be made, and the folder it is to become: all of it, or only its ``summary`` and configuration."""

    plan: RunPlan
    study: str
    where: str
    folder: Path
    keep: Literal["all", "summary"] = "all"
    warnings: tuple[str, ...] = ()
    """What a user should know before it is made."""


@dataclass(frozen=True)
class Outcome:
    """How a job went: ``error`` is one line for the user, None for a finished run."""

    folder: Path
    error: str | None = None


def jobs(study: Study, folder: Path) -> list[Job]:
    """Every run of a study with its folder, checked as far as can be without making it.

    Where the number of seeds is not fixed, that is every run that may be made.

    Raises StudyError for the first configuration that cannot run.
    """
    found: list[Job] = []
    worlds: dict[str, Clients | None] = {}
    strategies: dict[str, None] = {}
    for plan in study.plans():
        labels = ", ".join(f"{axis} = {label}" for axis, label in plan.labels.items())
        where = f"{study.path} ({labels})" if labels else str(study.path)
        parts = checked(plan, where, worlds)
        strategies[parts.strategy.name] = None
        inputs = store.inputs(plan.config, *parts.sources)
        run_id = store.run_id(plan.labels, plan.seed, plan.config, inputs)
        learnt = parts.problem if isinstance(parts, ClusterParts) else None
        warnings = () if learnt is None else tuple(learnt.warnings())
        found.append(Job(plan, study.name, where, folder / "runs" / run_id, warnings=warnings))
    if len({job.folder for job in found}) < len(found):
        raise StudyError(f"{study.path}: two points of the axes are one and the same run; give them different values")
    _check_report(study, list(strategies))
    return found


def checked(plan: RunPlan, where: str, worlds: dict[str, Clients | None]) -> Parts | ClusterParts:
    """The parts of a run, checked as far as can be without making it; ``worlds`` keeps those that were drawn for it.

    Raises StudyError for what cannot run.
    """
    try:
        parts = build(plan.config, where)
    except SystemExit as error:  # a user's module or strategy
        raise StudyError(f"{where}: the user's code raised SystemExit: {error}") from None
    if isinstance(parts, ClusterParts):
        if parts.problem is not None:
            demand_installed(plan.config)
        _refuse_cluster(parts, where)
    else:
        _refuse(parts, plan, where, worlds)
    return parts


def _check_report(study: Study, strategies: Sequence[str]) -> None:
    """Where no axis is called ``strategy``, the names of the strategies are its labels, as in the report."""
    axes = {name: [point.labels[name] for point in axis] for axis in study.axes for name in axis[0].labels}
    try:
        study.report.check({"strategy": strategies, **axes})
    except ValueError as error:
        raise StudyError(f"{study.path}: {error}") from None


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


class _Foreseen(NamedTuple):
    """All that is asked of a learner before it is made."""

    answers: int


def _refuse_cluster(parts: ClusterParts, where: str) -> None:
    learning = None if parts.learning is None else cast("Learning", _Foreseen(parts.prompts.answers))
    try:
        check_cluster(parts.strategy, parts.cluster, parts.prompts, parts.settings, parts.faults, learning)
    except ValueError as error:
        raise StudyError(f"{where}: {error}") from None


def _world(parts: Parts, seed: int) -> Clients | None:
    """The clients of a run; None when a user's workload raises, which the run will meet again and report."""
    try:
        return realise(parts.population, parts.workload and parts.workload(), seed)
    except ValueError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001
        return None


def groups(all_jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that advance side by side in one process and share batches: neighbours that learn on the same workload.

    A run of a cluster, which learns on none, is by itself. The rule looks at the study alone, neither at the number of
    processes nor at what is finished.
    """
    most = MOST_TOGETHER if len(all_jobs) >= 2 * MOST_TOGETHER else -(-len(all_jobs) // 2)
    found: list[list[Job]] = []
    open_groups: dict[str, list[Job]] = {}
    for job in all_jobs:
        workload = job.plan.config.get("workload")
        by_itself = workload is None or job.plan.config.get("run", {}).get("training") == "one_by_one"
        group = open_groups.get(repr(workload))
        if by_itself or group is None or len(group) >= most:
            group = open_groups[repr(workload)] = []
            found.append(group)
        group.append(job)
    return found


def execute(
    waiting: Sequence[Sequence[Job]], processes: int | None, backend: Backend = "local"
) -> Generator[Outcome, None, None]:
    """Make groups of runs in ``processes`` processes (None: one a processor); outcomes come as they finish.

    A run that fails leaves its traceback in ``<run>.error.log`` beside the run folders; the others go on.
    """
    if backend == "ray":
        from fedasync.studies.ray_backend import over_ray

        yield from over_ray(waiting, processes)
        return
    processes = processes or processes_by_default()
    if processes == 1 or len(waiting) <= 1:
        for jobs_together in waiting:
            yield from perform(jobs_together)
    else:
        yield from _over_joblib(waiting, processes)


def _over_joblib(waiting: Sequence[Sequence[Job]], processes: int) -> Generator[Outcome, None, None]:
    from joblib import Parallel, delayed

    workers = Parallel(n_jobs=min(processes, len(waiting)), return_as="generator_unordered", batch_size=1)
    with _interrupts_held_back():
        here = Path.cwd()
        outcomes = workers(delayed(_perform_all)(jobs_together, here) for jobs_together in waiting)
    for several in outcomes:
        yield from several


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


def _perform_all(jobs_together: Sequence[Job], here: Path) -> list[Outcome]:
    os.chdir(here)  # joblib keeps its processes for the next study, which may be elsewhere
    return list(perform(jobs_together))


def perform(jobs_together: Sequence[Job], into: Path | None = None) -> Iterator[Outcome]:
    """Make runs side by side and keep each as it ends, in its place or (by its name) in the folder ``into``.

    Raises OSError when one cannot be written, which ends the study.
    """
    workloads: dict[tuple[str, int], Workload] = {}
    requests: list[RunRequest] = []
    asked: list[Job] = []
    for job in jobs_together:
        try:
            parts = build(job.plan.config, job.where)
            if isinstance(parts, ClusterParts):
                run = _on_cluster(job, parts)
            else:
                requests.append(_request(job, parts, workloads))
                asked.append(job)
                continue
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may raise anything; the study goes on
            yield _failed(job, error, into)
            continue
        yield _kept(job, run, into)
    for place, made in simulate_together(requests):
        job = asked[place]
        yield _failed(job, made, into) if isinstance(made, BaseException) else _kept(job, made, into)


def _kept(job: Job, run: Run, into: Path | None) -> Outcome:
    folder = (into or job.folder.parent) / job.folder.name
    if job.keep == "all":
        store.keep(run, folder)
    else:
        store.keep_summary(run, folder)
    error_log(folder).unlink(missing_ok=True)
    return Outcome(job.folder)


def _failed(job: Job, error: BaseException, into: Path | None) -> Outcome:
    folder = (into or job.folder.parent) / job.folder.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(error_log(folder), "".join(traceback.format_exception(error)).encode())
    return Outcome(job.folder, f"run {job.folder.name}: {_one_line(error)} (traceback: {error_log(job.folder)})")


def error_log(folder: Path) -> Path:
    """Where the traceback of a run lies that was to become ``folder``."""
    return folder.with_name(f"{folder.name}.{store.ERROR}")


def _on_cluster(job: Job, parts: ClusterParts) -> Run:
    """A run of a cluster, by itself: it trains no model, or a policy of its own, so it has no batch to share."""
    with nullcontext() if parts.learning is None else one_thread():
        return simulate_cluster(
            parts.strategy,
            parts.cluster,
            parts.prompts,
            parts.settings,
            faults=parts.faults,
            seed=job.plan.seed,
            target=job.plan.config["targets"],
            name=job.folder.name,
            study=job.study,
            labels=job.plan.labels,
            config=_recorded(job),
            learning=None if parts.learning is None else parts.learning(),
        )


def _recorded(job: Job) -> dict[str, Any]:
    """What a run's folder says was asked for."""
    return {**job.plan.config, "versions": store.versions(store.learns(job.plan.config))}


def _request(job: Job, parts: Parts, workloads: dict[tuple[str, int], Workload]) -> RunRequest:
    """The run to be made; runs of one seed on one workload share its data."""
    kind = repr(job.plan.config.get("workload"))
    key = (kind, job.plan.seed)
    if parts.workload is not None and key not in workloads:
        made = parts.workload()
        alike = [workload for (other, _), workload in workloads.items() if other == kind]
        if alike and isinstance(made, Classification) and isinstance(alike[0], Classification):
            made.follow(alike[0])
        workloads[key] = made
    return RunRequest(
        parts.strategy,
        parts.population,
        workloads.get(key),
        parts.settings,
        seed=job.plan.seed,
        target=job.plan.config["targets"],
        name=job.folder.name,
        study=job.study,
        labels=job.plan.labels,
        config=_recorded(job),
    )


def _one_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif isinstance(error, SystemExit):
        text = f"the workload raised SystemExit: {text}"
    elif not isinstance(error, (ValueError, RuntimeError)):  # those of fedasync speak for themselves
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.split())


def processes_by_default() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
