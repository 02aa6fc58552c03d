"""From the configuration of a real run on prompts to the objects that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from fedasync.core import Strategy
from fedasync.rl.partial_groups import AllowShort
from fedasync.rl.problem import Problem
from fedasync.simulation.cluster import Cluster, ClusterSettings, Faults, Prompts
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.learning import Learning
from fedasync.simulation.cluster.refusals import check
from fedasync.simulation.cluster.training import Trainer
from fedasync.studies.build import build_problem, build_strategy_row
from fedasync.studies.errors import StudyError, parse
from fedasync.studies.problem_tables import PROBLEM, demand_installed, problem_sources, refuse_unevaluated
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings


@dataclass(frozen=True)
class TrainerParts:
    """What a real run on prompts is made of; ``tables`` are those of its problem, which every process reads."""

    strategy: Strategy
    problem: Problem
    tables: dict[str, Any]
    prompts: PromptSettings
    processes: ProcessSettings
    settings: RunSettings
    engine: dict[str, Any] | None
    """The table [engine]: a completions server; None: workers generate themselves."""
    sources: tuple[object, ...]
    """The functions or classes that a user may have written: the strategy's, the task's, the policy's."""


class _Foreseen(NamedTuple):
    answers: int


def build_trainer(config: dict[str, Any], where: str) -> TrainerParts:
    """Read a run's configuration, checked as far as can be without making it. Raises StudyError."""
    for table in ("strategy", "prompts", "run"):
        if table not in config:
            raise StudyError(f"{where}: the table [{table}] is missing")
    row, strategy = build_strategy_row(config, where)
    problem = build_problem(config, where)
    parts = TrainerParts(
        strategy,
        problem,
        {table: config[table] for table in PROBLEM if table in config},
        parse(PromptSettings, config["prompts"], f"{where}: prompts"),
        parse(ProcessSettings, config.get("processes", {}), f"{where}: processes"),
        parse(RunSettings, config["run"], f"{where}: run"),
        _engine(config, where),
        (row, *problem_sources(config, where)),
    )
    refuse_unevaluated(problem, config.get("targets", {}), parts.settings.evaluate_every, where)
    demand_installed(config)
    try:
        _refuse(parts)
    except ValueError as error:
        raise StudyError(f"{where}: {error}") from None
    return parts


def _engine(config: dict[str, Any], where: str) -> dict[str, Any] | None:
    if "engine" not in config:
        return None
    from fedasync.rl.openai_settings import server_of

    try:
        server_of(config["engine"])
    except ValueError as error:
        raise StudyError(f"{where}: {error}") from None
    return dict(config["engine"])


def _refuse(parts: TrainerParts) -> None:
    """What a simulated run of the same strategy on the same prompts is refused for, in the same words."""
    prompts, processes, settings = parts.prompts, parts.processes, parts.settings
    count, least = parts.problem.environment.prompts, processes.partial_groups
    if prompts.epochs is not None and count is None:
        raise ValueError(f"prompts: epochs = {prompts.epochs} of a task without end; prompts in [task] would do")
    if (refusal := parts.problem.refusal(prompts.answers)) is not None:
        raise ValueError(refusal)
    if processes.remote_workers and parts.problem.optimiser.trainable != "all":
        raise ValueError(
            f"processes: remote_workers with optimiser.trainable = {parts.problem.optimiser.trainable}: frozen weights "
            "do not travel, and those of another machine may differ; trainable = 'all' would do"
        )
    if isinstance(least, AllowShort) and least.least > prompts.answers:
        raise ValueError(
            f"processes: allow_short with least = {least.least} of groups of {prompts.answers} answers "
            f"(prompts.answers) never delivers a short one; 1 to {prompts.answers} would do"
        )
    cluster = Cluster(
        generation_gpus=processes.all_workers,
        training_gpus=processes.ranks,
        decoding=FixedSpeed(1.0, max_running=min(processes.max_running, 1024)),
        trainer=Trainer(step_s=1.0),
    )
    world = Prompts(answers=prompts.answers, count=count, epochs=prompts.epochs)
    ends = ClusterSettings(settings.versions, settings.time_s, settings.updates, settings.warm_up_versions)
    check(parts.strategy, cluster, world, ends, Faults(), cast(Learning, _Foreseen(prompts.answers)))
