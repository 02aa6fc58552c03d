"""What can never run is refused before anything does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedasync.core import Cohort, Strategy
from fedasync.simulation.availability import ByLabels
from fedasync.simulation.learning import WorkloadError
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.settings import Settings

if TYPE_CHECKING:
    from fedasync.workloads.protocol import Workload


def realise(population: Population, workload: Workload | None, seed: int) -> Clients:
    """The clients of a run. Raises ValueError when population and workload do not fit, WorkloadError when it raises."""
    if workload is None:
        return Clients(population, seed)
    try:
        samples = workload.client_samples()
        labels = None
        if isinstance(population.availability, ByLabels) and hasattr(workload, "client_labels"):
            labels = workload.client_labels()
        model_bytes = None
        if population.has_network and population.model_bytes is None:
            model = workload.initial_model(seed)
            carried = 0 if model.integers is None else model.integers.nbytes
            model_bytes = int(model.values.nbytes + carried)
    except Exception as error:
        raise WorkloadError(f"the workload raised {type(error).__name__}: {error}") from error
    return Clients(population, seed, samples, model_bytes, labels)


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
