"""Simulate one run of a strategy on a cluster of rollout servers and a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedasync.core import EventLog, Strategy
from fedasync.federated.result import BrokenLawError
from fedasync.runs.cluster_measures import told_by_rollouts
from fedasync.runs.measures import last_and_best
from fedasync.runs.record import Record
from fedasync.runs.rollouts import rollouts_frame
from fedasync.runs.run import Run
from fedasync.runs.summary import told_by_the_log
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.faults import Faults
from fedasync.simulation.cluster.prompts import Prompts
from fedasync.simulation.cluster.refusals import check
from fedasync.simulation.cluster.runtime import ClusterSimulation, Incident
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.federated import fewer_collections

MOST_INCIDENTS = 100
"""Incidents that a summary tells one by one; all are counted."""


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

    def make(self) -> Run:
        """Run it. Raises ValueError when the parts do not fit together."""
        check(self.strategy, self.cluster, self.prompts, self.settings, self.faults)
        record = Record()
        simulation = ClusterSimulation(
            self.strategy, self.cluster, self.prompts, self.settings, self.faults, self.seed, EventLog(record.write)
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
    **limits: Any,
) -> Run:
    """Run a strategy on a cluster under the virtual clock; no model is trained, only its time is spent.

    Instead of ``settings`` its fields may be given as keywords (``versions=100, warm_up_versions=5``). ``target`` maps
    metrics of a step to values whose first crossing is looked for. The same arguments give the same log, byte for byte.

    Raises ValueError when the parts do not fit together.
    """
    if settings is not None and limits:
        raise TypeError(f"give settings, or {', '.join(limits)} as keywords, not both")
    settings = ClusterSettings(**limits) if settings is None else settings
    asked = (faults or Faults(), seed, dict(target or {}), name, study, dict(labels or {}), config)
    return ClusterRequest(strategy, cluster, prompts, settings, *asked).make()


def _finished(request: ClusterRequest, simulation: ClusterSimulation, record: Record) -> Run:
    """The run with its tables and its verdict on itself."""
    strategy, settings, prompts = request.strategy, request.settings, request.prompts
    coordinator = simulation.coordinator
    ledger = coordinator.ledger.as_dict()
    metrics = simulation.trainer.times.table()
    rollouts = rollouts_frame(simulation.answers.columns(simulation.rollouts.servers))
    last, best = last_and_best(metrics)
    shares: Mapping[str, Mapping[str, float | None]] = simulation.trainer.use.shares()
    if settings.warm_up_versions and coordinator.version <= settings.warm_up_versions:
        shares = {who: dict.fromkeys(parts) for who, parts in shares.items()}
        simulation.note(
            f"the run made {coordinator.version} versions, and its warm-up takes {settings.warm_up_versions}: "
            "throughput, staleness and shares of time are not measured"
        )
    told = told_by_the_log(
        record.chunks(),
        ledger,
        metrics,
        end_s=simulation.now,
        slots=strategy.admission.most_in_flight,
        max_staleness=strategy.max_staleness,
        server_busy_s=simulation.trainer.times.training_s,
        target=request.target,
    )
    by_answers = told_by_rollouts(
        record,
        rollouts,
        metrics,
        end_s=simulation.now,
        warm_up_versions=settings.warm_up_versions,
        prompts=prompts.count,
        epochs=prompts.epochs,
    )
    verdicts = [*told.pop("verdicts"), *by_answers.pop("verdicts")]
    summary: dict[str, Any] = {
        "run_id": request.name or f"{strategy.name}-seed{request.seed}",
        "study": request.study,
        "seed": request.seed,
        "labels": dict(request.labels),
        "strategy": strategy.name,
        "timing_only": True,
        "time_s": simulation.now,
        "ended": simulation.ended,
        "versions": coordinator.version,
        "admitted": coordinator.ledger.admitted,
        "consumed": coordinator.ledger.consumed,
        "ledger": ledger,
        "verdicts": verdicts,
        **told,
        "final": last,
        "best": best,
        "publications": coordinator.publications,
        "checks": coordinator.checks,
        "shares": shares,
        "rollouts": by_answers,
        "gpus": request.cluster.gpus,
        "usd_per_hour": request.cluster.gpus * request.cluster.hardware.usd_per_hour,
        "incidents": [asdict(incident) for incident in _told(simulation.incidents)],
        "incidents_total": len(simulation.incidents),
        "unfit": [],
        "unfit_total": 0,
        "not_batched": None,
        "closed_forms": [],
    }
    if broken := [f"{v['name']}: {v['detail']}" for v in verdicts if not v["holds"]]:
        raise BrokenLawError(f"the run breaks its own laws: {'; '.join(broken)}")
    config = _describe(request) if request.config is None else request.config
    tables = {"metrics": metrics, **({"rollouts": rollouts} if settings.keep_rollouts else {})}
    return Run(config, summary, tables, record=record)


def _told(incidents: list[Incident]) -> list[Incident]:
    """The first, and the last, which may say why nothing was measured."""
    return incidents if len(incidents) <= MOST_INCIDENTS else [*incidents[: MOST_INCIDENTS - 1], incidents[-1]]


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
