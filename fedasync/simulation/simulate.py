"""Simulate one run: a strategy on a population, with or without a model that learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fedasync.core import EventLog, Strategy
from fedasync.federated.one_thread import one_thread
from fedasync.federated.result import summarise
from fedasync.runs.record import LogWriteError, Record
from fedasync.runs.run import Run
from fedasync.simulation.closed_forms import closed_forms
from fedasync.simulation.federated import FederatedSimulation, fewer_collections
from fedasync.simulation.learning import Learner, compute_together
from fedasync.simulation.population import Population
from fedasync.simulation.refusals import check, realise
from fedasync.simulation.settings import Settings

if TYPE_CHECKING:
    from fedasync.workloads.protocol import Workload


MOST_SHARED_PARAMETERS = 1_000_000
"""Runs of larger models advance one after the other."""


@dataclass(frozen=True)
class RunRequest:
    """What a run is to be: the arguments of ``simulate``."""

    strategy: Strategy
    population: Population
    workload: Workload | None
    settings: Settings
    seed: int = 0
    target: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    study: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None


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
    request = RunRequest(
        strategy, population, workload, settings, seed, dict(target or {}), name, study, dict(labels or {}), config
    )
    ((_, run),) = simulate_together([request])
    if isinstance(run, BaseException):
        raise run
    return run


def simulate_together(requests: Sequence[RunRequest]) -> Iterator[tuple[int, Run | BaseException]]:
    """Runs side by side, each under its own clock: (place among the requests, run or what it raised), as they end.

    When runs pause for results, these are computed in one call for all whose workloads can share it, which makes
    larger batches than any of them has by itself. A run's results do not depend on its company.

    Raises LogWriteError when a log finds no room on the disk.
    """
    together: dict[int, _Begun] = {}
    for place, request in enumerate(requests):
        try:
            with _quietly(learns=request.workload is not None):
                begun = _Begun(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001  handed to whoever asked for the run
            yield place, error
            continue
        if begun.shares_batches and len(requests) > 1:
            together[place] = begun
        else:
            yield from _advance({place: begun})
    yield from _advance(together)


def _advance(begun: dict[int, _Begun]) -> Iterator[tuple[int, Run | BaseException]]:
    while begun:
        ended: list[tuple[int, Run | BaseException]] = []
        with _quietly(learns=any(run.learner is not None for run in begun.values())):
            paused: list[tuple[Learner, float]] = []
            for place, run in begun.items():
                try:
                    finished = run.goes_on()
                except LogWriteError:
                    raise
                except (Exception, SystemExit) as error:  # noqa: BLE001  handed to whoever asked for the run
                    ended.append((place, error))
                    continue
                if finished is not None:
                    ended.append((place, finished))
                elif run.learner is not None:
                    paused.append((run.learner, run.simulation.useful))
            compute_together(paused)
        for place, run_or_error in ended:
            del begun[place]
            yield place, run_or_error


class _Begun:
    """A run on its way. Raises ValueError when its parts do not fit together, WorkloadError when the workload does."""

    def __init__(self, request: RunRequest) -> None:
        strategy, settings, seed, workload = request.strategy, request.settings, request.seed, request.workload
        self.request = request
        self.clients = realise(request.population, workload, seed)
        check(strategy, self.clients, settings, request.target, learns=workload is not None)
        self.learner = None if workload is None else Learner(strategy, workload, seed, settings)
        self.record = Record()
        log = EventLog(self.record.write)
        self.simulation = FederatedSimulation(strategy, self.clients, settings, seed, self.learner, request.target, log)
        self._steps = self.simulation.advance()

    @property
    def shares_batches(self) -> bool:
        """Worth advancing beside others: a large model fills a batch by itself, and many would fill the memory."""
        learner = self.learner
        return (
            learner is not None
            and learner.batched is not None
            and learner.server.model.values.numel() <= MOST_SHARED_PARAMETERS
        )

    def goes_on(self) -> Run | None:
        """Simulate until results must be computed (None), or to the end."""
        for _ in self._steps:
            return None
        return self._finish()

    def _finish(self) -> Run:
        """The run with its tables and its verdict on itself."""
        request, simulation, learner = self.request, self.simulation, self.learner
        strategy, settings, workload = request.strategy, request.settings, request.workload
        record = self.record
        record.complete(simulation.log)
        summary, metrics = summarise(
            simulation.driver,
            record,
            simulation.evaluations,
            end_s=simulation.now,
            server_busy_s=simulation.server_busy_s,
            targets=request.target,
            seed=request.seed,
            name=request.name,
            study=request.study,
            labels=request.labels,
            timing_only=workload is None,
        )
        summary["not_batched"] = None if learner is None else learner.not_batched
        found = closed_forms(strategy, self.clients, settings, workload, summary, metrics)
        summary["closed_forms"] = [asdict(form) for form in found]
        model = None if learner is None else learner.server.model
        config = request.config
        if config is None:
            config = _describe(strategy, request.population, workload, settings, request.target, request.seed)
        return Run(config, summary, {"metrics": metrics}, model, record=record)


@contextmanager
def _quietly(*, learns: bool) -> Iterator[None]:
    """Few garbage collections, and one thread of torch: sums of many threads depend on their number."""
    with fewer_collections(), one_thread() if learns else nullcontext():
        yield


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
