"""From a run's configuration to the objects that run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedasync.core import Strategy
from fedasync.simulation import Population, Settings
from fedasync.simulation.cluster import Cluster, ClusterSettings, Faults, Prompts
from fedasync.strategies import STRATEGIES
from fedasync.studies import federated_ppo
from fedasync.studies.errors import StudyError, parse
from fedasync.studies.named import named, without
from fedasync.studies.problem_tables import PROBLEM, build_problem, problem_sources, refuse_unevaluated
from fedasync.workloads import (
    DatasetFolder,
    Digits,
    FashionMnist,
    Mnist,
    Quadratic,
    Shakespeare,
    Tabular,
    Workload,
)

if TYPE_CHECKING:
    from fedasync.rl.problem import Problem
    from fedasync.simulation.cluster.learning import Learning

__all__ = ["ClusterParts", "Parts", "WorldParts", "build", "build_problem"]

POPULATION, CLUSTER = ("population", "workload"), ("cluster", "prompts", "faults", *PROBLEM)
"""Tables of a run on federated clients, and of one on a cluster, where a policy may learn."""

WORKLOADS: dict[str, Callable[..., Any]] = {
    "digits": Digits,
    "quadratic": Quadratic,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "shakespeare": Shakespeare,
    "tabular": Tabular,
    "hf_datasets": DatasetFolder,
    "federated_ppo": federated_ppo.federated_ppo,
}
"""``kind`` in a study file → class, or function."""


@dataclass(frozen=True)
class WorldParts:
    """Who works, and on what; ``workload`` as in ``Parts``."""

    population: Population
    workload: Callable[[], Workload] | None
    sources: tuple[object, ...]
    """The workload's function or class."""


@dataclass(frozen=True)
class Parts:
    """What ``simulate`` takes; ``workload`` makes a workload for the run's seed, or is None for timing only."""

    strategy: Strategy
    population: Population
    settings: Settings
    workload: Callable[[], Workload] | None
    sources: tuple[object, ...]
    """The functions or classes that a user may have written: the strategy's and the workload's."""


@dataclass(frozen=True)
class ClusterParts:
    """What ``simulate_cluster`` takes; ``sources`` as in ``Parts``.

    ``problem`` is what is learnt, and ``learning`` makes its learner for the run's seed; None for timing only.
    """

    strategy: Strategy
    cluster: Cluster
    prompts: Prompts
    faults: Faults
    settings: ClusterSettings
    sources: tuple[object, ...]
    problem: Problem | None = None
    learning: Callable[[], Learning] | None = None


def build(config: dict[str, Any], where: str) -> Parts | ClusterParts:
    """Read a run's configuration, of federated clients or of a cluster. Raises StudyError."""
    return build_cluster(config, where) if is_cluster(config, where) else build_federated(config, where)


def is_cluster(config: Mapping[str, Any], where: str) -> bool:
    """Whether a run is one of a cluster. Raises StudyError for a mixture."""
    of_cluster = [table for table in CLUSTER if table in config]
    of_clients = [table for table in POPULATION if table in config]
    if of_cluster and of_clients:
        raise StudyError(
            f"{where}: [{of_clients[0]}] and [{of_cluster[0]}] in one run: a run has federated clients or a cluster; "
            f"either without {_listed(of_cluster)}, or without {_listed(of_clients)}, would do"
        )
    return bool(of_cluster)


def _listed(tables: list[str]) -> str:
    return ", ".join(f"[{table}]" for table in tables)


def build_federated(config: dict[str, Any], where: str) -> Parts:
    """Read the configuration of a run on a population. Raises StudyError; a workload is checked when it is made."""
    _demand_tables(config, ("strategy", "population", "run"), where)
    row, strategy = build_strategy_row(config, where)
    world = build_world(config, where)
    settings = parse(Settings, config["run"], f"{where}: run")
    return Parts(strategy, world.population, settings, world.workload, (row, *world.sources))


def build_cluster(config: dict[str, Any], where: str) -> ClusterParts:
    """Read the configuration of a run on a cluster. Raises StudyError; a policy is made when it is to learn."""
    _demand_tables(config, ("strategy", "cluster", "prompts", "run"), where)
    row, strategy = build_strategy_row(config, where)
    problem = _problem(config, where)
    cluster, prompts, faults = build_cluster_world(config, where, problem)
    settings = parse(ClusterSettings, config["run"], f"{where}: run")
    if problem is None:
        return ClusterParts(strategy, cluster, prompts, faults, settings, (row,))
    refuse_unevaluated(problem, config.get("targets", {}), settings.evaluate_every, where)
    if (refusal := problem.refusal(prompts.answers)) is not None:
        raise StudyError(f"{where}: {refusal}")
    if "seed" not in config:
        raise StudyError(f"{where}: seed: this key is missing")
    sources = (row, *problem_sources(config, where))
    learning = _learning(problem, config["seed"], prompts.answers, settings.evaluation_prompts)
    return ClusterParts(strategy, cluster, prompts, faults, settings, sources, problem, learning)


def build_cluster_world(
    config: dict[str, Any], where: str, problem: Problem | None = None
) -> tuple[Cluster, Prompts, Faults]:
    """Read what a cluster is, what it is asked and what goes wrong in it, whatever its strategy. Raises StudyError.

    Where a policy learns, the prompts are those of its task.
    """
    _demand_tables(config, ("cluster", "prompts"), where)
    problem = problem or _problem(config, where)
    prompts = config["prompts"] if problem is None else _of_task(config["prompts"], problem.environment.prompts, where)
    return (
        parse(Cluster, config["cluster"], f"{where}: cluster"),
        parse(Prompts, prompts, f"{where}: prompts"),
        parse(Faults, config.get("faults", {}), f"{where}: faults"),
    )


def _problem(config: dict[str, Any], where: str) -> Problem | None:
    """What is learnt; None where no table speaks of it."""
    return build_problem(config, where) if any(table in config for table in PROBLEM) else None


def _of_task(table: dict[str, Any], count: int | None, where: str) -> dict[str, Any]:
    """[prompts] with the number of the task's prompts, which is told once."""
    if "prompt_tokens" in table:
        raise StudyError(f"{where}: prompts.prompt_tokens is what the task says, where a policy learns; leave it out")
    if "count" in table and table["count"] != count:
        there = "prompts without end" if count is None else f"{count} prompts"
        raise StudyError(f"{where}: prompts.count: got {table['count']!r}, and the task has {there}; leave it out")
    return table if count is None else {**table, "count": count}


def _learning(problem: Problem, seed: int, answers: int, evaluation_prompts: int) -> Callable[[], Learning]:
    def learning() -> Learning:
        from fedasync.rl.virtual import VirtualLearner

        return VirtualLearner(problem, seed, answers, evaluation_prompts=evaluation_prompts)

    return learning


def build_strategy_row(config: dict[str, Any], where: str) -> tuple[Callable[..., Any], Strategy]:
    """The function of the strategy table, or the user's own, and the strategy that it makes."""
    row = named(config["strategy"].get("name"), STRATEGIES, f"{where}: strategy.name")
    return row, _strategy(row, without(config["strategy"], "name"), f"{where}: strategy")


def build_world(config: dict[str, Any], where: str) -> WorldParts:
    """Read what a run's clients are, whatever its strategy. Raises StudyError; a workload is checked when made."""
    _demand_tables(config, ("population",), where)
    population = parse(Population, config["population"], f"{where}: population")
    if "workload" not in config:
        return WorldParts(population, None, ())
    kind = named(config["workload"].get("kind"), WORKLOADS, f"{where}: workload.kind")
    workload = _workload(kind, without(config["workload"], "kind"), config["seed"], f"{where}: workload")
    learnt = (
        federated_ppo.sources(config["workload"], f"{where}: workload") if kind is WORKLOADS["federated_ppo"] else ()
    )
    return WorldParts(population, workload, (kind, *learnt))


def build_strategy(config: dict[str, Any], where: str) -> Strategy:
    """Read a run's strategy. Raises StudyError."""
    return build_strategy_row(config, where)[1]


def build_workload(config: dict[str, Any], where: str) -> Callable[[], Workload] | None:
    """Read what a run's clients train, without the world around them; as in ``Parts``. Raises StudyError."""
    _demand_tables(config, (), where)
    if "workload" not in config:
        return None
    if "seed" not in config:
        raise StudyError(f"{where}: seed: this key is missing")
    kind = named(config["workload"].get("kind"), WORKLOADS, f"{where}: workload.kind")
    return _workload(kind, without(config["workload"], "kind"), config["seed"], f"{where}: workload")


def _demand_tables(config: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for table in names:
        if table not in config:
            raise StudyError(f"{where}: the table [{table}] is missing")
    for table, value in config.items():
        if table not in ("targets", "seed") and not isinstance(value, dict):
            raise StudyError(f"{where}: {table}: got {value!r}; a table would do")


def _strategy(make: Callable[..., Any], table: dict[str, Any], where: str) -> Strategy:
    try:
        strategy = parse(make, table, where)
    except StudyError:
        raise
    except Exception as error:
        raise StudyError(f"{where}: {make.__name__} raised {type(error).__name__}: {error}") from error
    if not isinstance(strategy, Strategy):
        raise StudyError(f"{where}: {make.__name__} returned {type(strategy).__name__}; a Strategy would do")
    return strategy


def _workload(make: Callable[..., Any], table: dict[str, Any], seed: int, where: str) -> Callable[[], Workload]:
    if "seed" in inspect.signature(make).parameters:
        table = {"seed": seed, **table}

    def workload() -> Workload:
        made: Workload = parse(make, table, where)
        missing = [name for name in ("client_samples", "initial_model", "train", "evaluate") if not hasattr(made, name)]
        if missing:
            raise StudyError(f"{where}: {make.__name__} is no workload: it has no {', no '.join(missing)}")
        return made

    return workload
