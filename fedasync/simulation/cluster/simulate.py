"""Simulate one run of a strategy on a cluster of rollout servers and a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedasync.core import EventLog, Strategy
from fedasync.federated.result import BrokenLawError
from fedasync.runs.record import Record
from fedasync.runs.rollout_summary import broken_laws, rollout_summary
from fedasync.runs.rollouts import rollouts_frame
from fedasync.runs.run import Run
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.faults import Faults
from fedasync.simulation.cluster.learning import Learning
from fedasync.simulation.cluster.prompts import Prompts
from fedasync.simulation.cluster.refusals import check
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.federated import fewer_collections


@dataclass(frozen=True)
class ClusterRequest:
    """What a run is to be: the arguments of ``simulate_cluster``."""

    strategy: Strategy
    cluster: Cluster
    prompts: Prompts
    settings: ClusterSettings
    faults: Faults = Faults()
    seed: int = 0
    target: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    study: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    learning: Learning | None = None
    """What is learnt (`VirtualLearner`); None: timing only."""

    def make(self) -> Run:
        """Run it. Raises ValueError when the parts do not fit together."""
        check(self.strategy, self.cluster, self.prompts, self.settings, self.faults, self.learning)
        record = Record()
        simulation = ClusterSimulation(
            self.strategy,
            self.cluster,
            self.prompts,
            self.settings,
            self.faults,
            self.seed,
            EventLog(record.write),
            self.learning,
        )
        with fewer_collections():
            simulation.run()
        record.complete(simulation.log)
        return _finished(self, simulation, record)


def simulate_cluster(
    strategy: Strategy,
    cluster: Cluster,
    prompts: Prompts,
    settings: ClusterSettings | None = None,
    *,
    faults: Faults | None = None,
    seed: int = 0,
    target: Mapping[str, float] | None = None,
    name: str | None = None,
    study: str = "",
    labels: Mapping[str, str] | None = None,
    config: dict[str, Any] | None = None,
    learning: Learning | None = None,
    **limits: Any,
) -> Run:
    """Run a strategy on a cluster under the virtual clock. Without ``learning`` nothing is trained, only time is spent.

    Instead of ``settings`` its fields may be given as keywords (``versions=100, warm_up_versions=5``). ``target`` maps
    metrics of a step to values whose first crossing is looked for. The same arguments give the same log, byte for byte.

    Raises ValueError when the parts do not fit together.
    """
    if settings is not None and limits:
        raise TypeError(f"give settings, or {', '.join(limits)} as keywords, not both")
    settings = ClusterSettings(**limits) if settings is None else settings
    asked = (faults or Faults(), seed, dict(target or {}), name, study, dict(labels or {}), config, learning)
    return ClusterRequest(strategy, cluster, prompts, settings, *asked).make()


def _finished(request: ClusterRequest, simulation: ClusterSimulation, record: Record) -> Run:
    """The run with its tables and its verdict on itself."""
    settings, prompts, coordinator = request.settings, request.prompts, simulation.coordinator
    metrics = simulation.trainer.times.table()
    rollouts = rollouts_frame(simulation.answers.columns(simulation.rollouts.servers))
    if settings.warm_up_versions and coordinator.version <= settings.warm_up_versions:
        simulation.note(
            f"the run made {coordinator.version} versions, and its warm-up takes {settings.warm_up_versions}: "
            "throughput, staleness and shares of time are not measured"
        )
    summary: dict[str, Any] = {
        "run_id": request.name or f"{request.strategy.name}-seed{request.seed}",
        "study": request.study,
        "seed": request.seed,
        "labels": dict(request.labels),
        "timing_only": request.learning is None,
        **rollout_summary(
            coordinator,
            record,
            rollouts,
            metrics,
            end_s=simulation.now,
            ended=simulation.ended,
            training_s=simulation.trainer.times.training_s,
            warm_up_versions=settings.warm_up_versions,
            prompts=prompts.count,
            epochs=prompts.epochs,
            target=request.target,
            incidents=[asdict(incident) for incident in simulation.incidents],
        ),
        "shares": simulation.trainer.use.shares(),
        "gpus": request.cluster.gpus,
        "usd_per_hour": request.cluster.gpus * request.cluster.hardware.usd_per_hour,
    }
    if broken := broken_laws(summary):
        raise BrokenLawError(f"the run breaks its own laws: {'; '.join(broken)}")
    config = _describe(request) if request.config is None else request.config
    tables = {"metrics": metrics, **({"rollouts": rollouts} if settings.keep_rollouts else {})}
    return Run(config, summary, tables, record=record)


def _describe(request: ClusterRequest) -> dict[str, Any]:
    """What was asked for, for a run that comes from no file."""
    return {
        "strategy": request.strategy.identity,
        "cluster": asdict(request.cluster),
        "prompts": asdict(request.prompts),
        "faults": asdict(request.faults),
        "run": asdict(request.settings),
        "targets": dict(request.target),
        "seed": request.seed,
    }
