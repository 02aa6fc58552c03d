"""Simulate one run: a strategy on a population, with or without a model that learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.core import Cohort, Strategy
from fedasync.runs.measures import (
    event_table,
    last_and_best,
    last_version_s,
    lease_table,
    staleness,
    targets,
    utilisation,
)
from fedasync.runs.run import Run
from fedasync.runs.verdicts import verdicts
from fedasync.simulation.closed_forms import closed_forms
from fedasync.simulation.federated import Evaluations, FederatedSimulation, Settings
from fedasync.simulation.learning import Learner, WorkloadError
from fedasync.simulation.population import Clients, Population

if TYPE_CHECKING:
    import polars as pl

    from fedasync.workloads.protocol import Workload


class BrokenLawError(AssertionError):
    """A run's log contradicts a law that holds for every run: a fault of the simulator, never of its input."""


def simulate(
    strategy: Strategy,
    population: Population,
    workload: Workload | None = None,
    settings: Settings | None = None,
    *,
    seed: int = 0,
    target: Mapping[str, float] | None = None,
    name: str | None = None,
    study: str = "",
    labels: Mapping[str, str] | None = None,
    config: dict[str, Any] | None = None,
    **limits: Any,
) -> Run:
    """Run a strategy under the virtual clock.

    Without a workload only times are simulated. ``target`` maps metrics to the values whose first crossing is looked
    for. Instead of ``settings`` its fields may be given as keywords (``time_s=600, evaluate_every_s=10``). The same
    arguments give the same log and the same weights, byte for byte.

    Raises ValueError when the parts do not fit together, WorkloadError when the workload raises, and
    NothingAcceptedError when the run can make no progress.
    """
    if settings is not None and limits:
        raise TypeError(f"give settings, or {', '.join(limits)} as keywords, not both")
    settings = Settings(**limits) if settings is None else settings
    clients = realise(population, workload, seed)
    check(strategy, clients, settings, target or {}, learns=workload is not None)
    with nullcontext() if workload is None else _one_thread():
        learner = None if workload is None else Learner(strategy, workload, seed)
        simulation = FederatedSimulation(strategy, clients, settings, seed, learner, target)
        end_s = simulation.run()
    events, metrics = event_table(simulation.log), metric_table(simulation.evaluations)
    leases = lease_table(events, end_s)
    coordinator = simulation.coordinator
    ledger = coordinator.ledger.as_dict()
    slots = strategy.admission.most_in_flight
    last, best = last_and_best(metrics)
    summary: dict[str, Any] = {
        "run_id": name or f"{strategy.name}-seed{seed}",
        "study": study,
        "seed": seed,
        "labels": dict(labels or {}),
        "strategy": strategy.name,
        "timing_only": workload is None,
        "time_s": end_s,
        "ended": simulation.ended,
        "versions": coordinator.version,
        "admitted": coordinator.ledger.admitted,
        "consumed": coordinator.ledger.consumed,
        "ledger": ledger,
        "verdicts": [asdict(v) for v in verdicts(events, leases, ledger, end_s, slots, strategy.max_staleness)],
        "staleness": staleness(events),
        "utilisation": utilisation(leases, slots, end_s, simulation.server_busy_s),
        "targets": targets(metrics, events, target or {}),
        "final": last,
        "best": best,
        "unfit": [asdict(unfit) for unfit in simulation.unfit],
        "unfit_total": simulation.unfit_total,
        "last_version_s": last_version_s(events),
    }
    if broken := [f"{v['name']}: {v['detail']}" for v in summary["verdicts"] if not v["holds"]]:
        raise BrokenLawError(f"the run breaks its own laws: {'; '.join(broken)}")
    found = closed_forms(strategy, clients, settings, workload, summary, metrics)
    summary["closed_forms"] = [asdict(form) for form in found]
    model = None if learner is None else learner.server.model
    resolved = config if config is not None else _describe(strategy, population, workload, settings, target, seed)
    return Run(resolved, summary, {"events": events, "metrics": metrics}, model)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums of many threads depend on their number, and models this small only wait for each other on more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def metric_table(evaluations: Evaluations) -> pl.DataFrame:
    """The evaluations as a table: time_s, version, name, value."""
    import polars as pl

    return pl.DataFrame(
        {
            "time_s": np.array(evaluations.time_s, np.float64),
            "version": np.array(evaluations.version, np.int64),
            "name": pl.Series(evaluations.name, dtype=pl.String),
            "value": np.array(evaluations.value, np.float64),
        }
    )


def realise(population: Population, workload: Workload | None, seed: int) -> Clients:
    """The clients of a run. Raises ValueError when population and workload do not fit, WorkloadError when it raises."""
    if workload is None:
        return Clients(population, seed)
    try:
        samples = workload.client_samples()
        model_bytes = None
        if population.has_network and population.model_bytes is None:
            model = workload.initial_model(seed)
            carried = 0 if model.integers is None else model.integers.nbytes
            model_bytes = int(model.values.nbytes + carried)
    except Exception as error:
        raise WorkloadError(f"the workload raised {type(error).__name__}: {error}") from error
    return Clients(population, seed, samples, model_bytes)


def check(
    strategy: Strategy, clients: Clients, settings: Settings, target: Mapping[str, float], *, learns: bool
) -> None:
    """Refuse what could never make progress, never end, or never be seen: ValueError."""
    if settings.stop_at_target and not (target and learns and settings.evaluate_every_s):
        raise ValueError(
            "stop_at_target needs a target, a workload, and evaluate_every_s: without them none is ever seen"
        )
    if target and not learns:
        raise ValueError(f"target {min(target)!r} needs a workload: a timing-only run has no metrics")
    if (refusal := strategy.refusal(clients.count)) is not None:
        raise ValueError(refusal)
    if settings.updates is not None and settings.updates < strategy.first_step_needs:
        raise ValueError(
            f"strategy {strategy.name!r} makes its first version from {strategy.first_step_needs} contributions, "
            f"which a run of updates = {settings.updates} can never reach"
        )
    if clients.population.crash_probability > 0 and strategy.lease_timeout_s is None:
        raise ValueError(
            f"crash_probability = {clients.population.crash_probability}: a crashed client never answers, and strategy "
            f"{strategy.name!r} would wait for ever; give it a lease_timeout_s"
        )
    if strategy.publication.in_flight == "interrupt":
        raise ValueError(
            "a simulated client cannot take a new version in the middle of its work: continue or abort would do"
        )
    if settings.updates is None and settings.versions is None:
        _check_that_time_passes(strategy, clients, settings)


def _check_that_time_passes(strategy: Strategy, clients: Clients, settings: Settings) -> None:
    """Clients that take no time and never wait would keep a run at one instant for ever."""
    instant = clients.instant
    waits = settings.server_step_s > 0 and getattr(strategy.admission, "redispatch", "") != "before_step"
    somebody_waits = isinstance(strategy.admission, Cohort) and len(instant) < clients.count
    if instant and not waits and not somebody_waits:
        raise ValueError(
            f"the work of client {instant[0]} takes 0 s, so time_s may never be reached: "
            "give updates or versions as the run's end, or every client a duration > 0"
        )


def _describe(
    strategy: Strategy,
    population: Population,
    workload: Workload | None,
    settings: Settings,
    target: Mapping[str, float] | None,
    seed: int,
) -> dict[str, Any]:
    """What was asked for, for a run that comes from no file: knobs as values, one's own objects as text."""
    return {
        "strategy": strategy.identity,
        "population": asdict(population),
        "workload": None if workload is None else f"{type(workload).__module__}.{type(workload).__qualname__}",
        "run": asdict(settings),
        "targets": dict(target or {}),
        "seed": seed,
    }
