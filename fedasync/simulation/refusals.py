"""What can never run is refused before anything does."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

from fedasync.aggregation.mifa import LatestMean
from fedasync.core import Cohort, Periodic, Strategy
from fedasync.federated.arrays import WorkloadError
from fedasync.simulation.availability import Availability, ByLabels
from fedasync.simulation.outages import Outages
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.settings import Settings
from fedasync.strategies.rollouts import PolicyStep

if TYPE_CHECKING:
    from fedasync.workloads.protocol import Workload


MOST_INTERVALS = 10_000_000
"""Of a buffer that steps at fixed times, in one run."""


MOST_TURNS = 1_000_000
"""How often a client may come and go in a run (ours): more takes hours to follow, and tells nothing more."""


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
    if learns and isinstance(strategy.update, PolicyStep):
        raise ValueError(
            f"strategy {strategy.name!r} trains a policy on a simulated cluster and learns nothing here; timing only, "
            "without a workload, or a strategy for clients such as 'fedbuff' would do"
        )
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
    waits_for_all = isinstance(strategy.update, LatestMean) and strategy.update.wait_for_all
    if waits_for_all and settings.selection == "same_client" and strategy.admission.most_in_flight < clients.count:
        raise ValueError(
            f"strategy {strategy.name!r} moves nothing before every client has delivered, and with selection = "
            f"'same_client' only {strategy.admission.most_in_flight} of {clients.count} ever work; "
            "wait_for_all = false, or 'random_idle', would do"
        )
    if isinstance(strategy.buffer, Periodic):
        seconds = clients.mean_work_s(0) if settings.time_s is None else settings.time_s
        if seconds > MOST_INTERVALS * strategy.buffer.interval_s:
            raise ValueError(
                f"strategy {strategy.name!r}: interval_s = {strategy.buffer.interval_s:g} makes "
                f"{seconds / strategy.buffer.interval_s:.3g} intervals in {seconds:g} s; at most {MOST_INTERVALS:,} "
                "would do"
            )
    if strategy.publication.in_flight == "interrupt":
        raise ValueError(
            "a simulated client cannot take a new version in the middle of its work: continue or abort would do"
        )
    _check_measures(strategy, settings, learns=learns)
    check_turns(clients, settings.time_s)
    if settings.updates is None and settings.versions is None:
        _check_that_time_passes(strategy, clients, settings)


def _check_measures(strategy: Strategy, settings: Settings, *, learns: bool) -> None:
    """Where nothing learns, what the publication measures must be modelled."""
    wanted, divergence = strategy.publication.measures, settings.divergence
    if learns and divergence is not None:
        raise ValueError("divergence models what a workload measures: it is for timing-only runs, without a workload")
    if learns or not wanted:
        return
    where = (
        f"strategy {strategy.name!r}: publication {strategy.publication.kind!r} measures {', '.join(sorted(wanted))}"
    )
    if divergence is None:
        raise ValueError(f"{where}, which a timing-only run cannot; a workload, or divergence, would do")
    if (refusal := divergence.refusal(wanted)) is not None:
        raise ValueError(f"{where}: {refusal}")


def check_turns(clients: Clients, time_s: float | None) -> None:
    """Refuse clients or regions that come and go so often that a run would look at nothing else: ValueError.

    What is looked at is ``time_s``, and the work of a lease where that pauses or no time is given.
    """
    population = clients.population
    own: dict[str, Availability | Outages] = {"availability": population.availability}
    if population.outages is not None:
        own["outages"] = population.outages
    turning = {name: law for name, law in own.items() if law.turn_s(inf) < inf}
    if not turning:
        return
    looked_at = {} if time_s is None else {f"time_s = {time_s:g}": time_s}
    if time_s is None or population.when_offline == "pause":
        work_s = max(map(clients.mean_work_s, range(clients.count)))
        looked_at[f"a lease of {work_s:.3g} s"] = work_s
    for name, law in turning.items():
        for what, seconds in looked_at.items():
            if seconds > 0 and seconds > MOST_TURNS * (turn_s := law.turn_s(seconds)):
                raise ValueError(
                    f"{name}: coming and going takes {turn_s:.3g} s on average, too little for {what}: at most "
                    f"{MOST_TURNS:,} turns are followed"
                )


def _check_that_time_passes(strategy: Strategy, clients: Clients, settings: Settings) -> None:
    """Clients that take no time and never wait would keep a run at one instant for ever."""
    instant = clients.instant
    waits = settings.server_step_s > 0 and getattr(strategy.admission, "redispatch", "") != "before_step"
    somebody_waits = isinstance(strategy.admission, Cohort) and len(instant) < clients.count
    if instant and not waits and not somebody_waits:
        raise ValueError(instant_refusal(instant[0]))


def instant_refusal(client: int) -> str:
    """What is said of a run that only time ends, with a client that takes none."""
    return (
        f"the work of client {client} takes 0 s, so time_s may never be reached: "
        "give updates or versions as the run's end, or every client a duration > 0"
    )
