"""From a deployment's configuration to what Flower's server serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.core import Strategy, Tiers
from fedasync.federated.arrays import WorkloadError
from fedasync.federated.limits import Limits
from fedasync.flower.configuration import EXPERIMENT, OUT, RESUME, without_ours
from fedasync.flower.settings import DeploymentSettings
from fedasync.strategies.rollouts import PolicyStep
from fedasync.studies import store
from fedasync.studies.build import build_strategy, build_workload
from fedasync.studies.errors import StudyError, parse

if TYPE_CHECKING:
    from fedasync.flower.serving import Deployment


@dataclass(frozen=True)
class StudyPlace:
    """What a run belongs to: its study, its name there, and where it stands on the study's axes."""

    study: str = ""
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeploymentParts:
    """What a deployment's tables say, but for its workload."""

    strategy: Strategy
    limits: Limits
    settings: DeploymentSettings
    targets: Mapping[str, float]
    seed: int


def build_parts(config: dict[str, Any], where: str) -> DeploymentParts:
    """Read a deployment's tables. Raises StudyError."""
    for table in ("strategy", "workload", "run"):
        if table not in config:
            raise StudyError(f"{where}: the table [{table}] is missing")
    if isinstance(config.get("seed"), bool) or not isinstance(config.get("seed"), int):
        raise StudyError(f"{where}: seed: got {config.get('seed')!r}; an integer ≥ 0 would do")
    strategy, limits = build_strategy(config, where), parse(Limits, config["run"], f"{where}: run")
    if isinstance(strategy.update, PolicyStep):
        raise StudyError(f"{where}: strategy {strategy.name!r} is a row for clusters, and trains no model of clients")
    targets = parse(dict[str, float], config.get("targets", {}), f"{where}: targets")
    if targets and limits.evaluate_every_s is None:
        raise StudyError(
            f"{where}: targets are looked for at evaluations, and run.evaluate_every_s is missing: without it there is"
            " one, at the end"
        )
    settings = parse(DeploymentSettings, config.get("deployment", {}), f"{where}: deployment")
    return DeploymentParts(strategy, limits, settings, targets, config["seed"])


def build_deployment(config: dict[str, Any], where: str) -> Deployment:
    """Read a deployment's configuration, the run's folder and its place in a study included. Raises StudyError."""
    from fedasync.flower.serving import Deployment

    asked = without_ours(config)
    parts = build_parts(asked, where)
    make = build_workload(asked, where)
    assert make is not None  # a [workload] is there
    place = parse(StudyPlace, config.get(EXPERIMENT, {}), f"{where}: {EXPERIMENT}")
    out, resume = config.get(OUT), config.get(RESUME, False)
    if not isinstance(out, str) or not out:
        raise StudyError(f"{where}: {OUT}: got {out!r}; the folder of the run, on the server's machine, would do")
    if not isinstance(resume, bool):
        raise StudyError(f"{where}: {RESUME}: got {resume!r}; true or false would do")
    return Deployment(
        parts.strategy,
        make(),
        parts.limits,
        parts.settings,
        parts.seed,
        parts.targets,
        Path(out),
        resume,
        place.name,
        place.study,
        place.labels,
        {**asked, "versions": store.versions()},
    )


def clients_of(config: dict[str, Any], where: str) -> int:
    """How many clients hold the workload's data. Raises StudyError."""
    make = build_workload({"workload": config["workload"], "seed": config["seed"]}, where)
    assert make is not None  # a [workload] is there
    try:
        return len(make().client_samples())
    except StudyError:
        raise
    except (ValueError, WorkloadError) as error:
        raise StudyError(f"{where}: workload: {error}") from error


def demand_settings(parts: DeploymentParts, clients: int, where: str) -> None:
    """Raise StudyError for settings that do not fit the number of clients."""
    settings = parts.settings
    for name in ("work_s_by_client", "profile_s"):
        listed = getattr(settings, name)
        if listed is not None and len(listed) != clients:
            raise StudyError(f"{where}: deployment.{name}: got {len(listed)} numbers for {clients} clients")
    if settings.least_clients is not None and settings.least_clients > clients:
        raise StudyError(f"{where}: deployment.least_clients = {settings.least_clients}, and there are {clients}")
    if isinstance(parts.strategy.admission, Tiers) and settings.profile_s is None:
        raise StudyError(
            f"{where}: strategy {parts.strategy.name!r} sorts clients by speed: deployment.profile_s, the seconds that "
            "each client's task is expected to take, is missing"
        )
