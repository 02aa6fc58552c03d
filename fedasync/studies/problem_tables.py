"""From the tables [task], [policy], [sampling], [objective] and [optimiser] to the problem that is learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.studies.errors import StudyError, parse
from fedasync.studies.named import named, without

if TYPE_CHECKING:
    from fedasync.rl.environment import ControlEnvironment, Environment
    from fedasync.rl.models import PolicySpec
    from fedasync.rl.problem import Problem

PROBLEM = ("task", "policy", "sampling", "objective", "optimiser")
"""Tables that say what is learnt."""
NEEDED = ("task", "policy", "sampling", "optimiser")
EVALUATED = ("reward", "exact")
"""Metrics of an evaluation on held-out prompts."""


def build_problem(config: Mapping[str, Any], where: str) -> Problem:
    """Read what is learnt. Raises StudyError: file, key, what it got, what would be accepted."""
    from fedasync.rl.objective import Objective
    from fedasync.rl.optimiser import Optimiser
    from fedasync.rl.problem import Problem
    from fedasync.rl.sampling import Sampling

    _demand_tables(config, where)
    refuse_clients_row(config, where)
    problem = Problem(
        _environment(config["task"], where),
        _policy(config["policy"], where),
        parse(Sampling, config["sampling"], f"{where}: sampling"),
        parse(Objective, config.get("objective", {}), f"{where}: objective"),
        parse(Optimiser, config["optimiser"], f"{where}: optimiser"),
    )
    _refuse(problem, where)
    return problem


def problem_sources(config: Mapping[str, Any], where: str) -> tuple[object, ...]:
    """The functions and classes that a user may have written: the task's, the policy's, and those that a task names."""
    from fedasync.rl.models import POLICIES
    from fedasync.rl.tasks import TASKS

    task = config["task"]
    found = [
        named(task.get("kind"), TASKS, f"{where}: task.kind"),
        named(config["policy"].get("kind"), POLICIES, f"{where}: policy.kind"),
    ]
    reward = task.get("reward")  # of the task "function": a function by its dotted path
    if isinstance(reward, str) and "." in reward:
        found.append(named(reward, {}, f"{where}: task.reward"))
    return tuple(found)


def refuse_clients_row(config: Mapping[str, Any], where: str) -> None:
    """Refuse a row that says how clients' models become one: what it says would never be used on a policy's steps."""
    from fedasync.strategies import FEDERATED, ROLLOUTS

    strategy = config.get("strategy")
    name = strategy.get("name") if isinstance(strategy, Mapping) else None
    if name in [row.__name__ for row in FEDERATED]:
        raise StudyError(
            f"{where}: strategy.name: {name!r} says how models of federated clients become one, and here one policy is "
            f"trained on answers to prompts; {', '.join(row.__name__ for row in ROLLOUTS)} would do"
        )


def demand_installed(config: Mapping[str, Any]) -> None:
    """Raise StudyError where a library is missing without which nothing is learnt."""
    for library in ("torch", "transformers") if config["policy"].get("kind") != "mlp" else ("torch",):
        if find_spec(library) is None:
            raise StudyError(f"{library} is not installed; pip install 'fedasync[rl]' would do")


def demand_tracker(config: Mapping[str, Any], where: str) -> None:
    """Raise StudyError for a tracker of metrics that is none, or is not installed."""
    from fedasync.rl.trackers import tracker_refusal

    processes = config.get("processes")
    tracker = processes.get("tracker") if isinstance(processes, Mapping) else None
    if isinstance(tracker, str) and (refusal := tracker_refusal(tracker)) is not None:
        raise StudyError(f"{where}: processes: {refusal}")


def refuse_unevaluated(problem: Problem, targets: Mapping[str, float], evaluate_every: int | None, where: str) -> None:
    """Refuse a target that no evaluation measures, and evaluations without prompts for them."""
    if evaluate_every is not None and problem.environment.held_out < 1:
        raise StudyError(
            f"{where}: run.evaluate_every = {evaluate_every}, and the task holds no prompts out; held_out ≥ 1 in "
            "[task], or no evaluate_every, would do"
        )
    for name in EVALUATED:
        if name in targets and evaluate_every is None:
            raise StudyError(f"{where}: targets.{name} is measured by evaluations; run.evaluate_every = 5 would do")


def _demand_tables(config: Mapping[str, Any], where: str) -> None:
    for table in NEEDED:
        if table not in config:
            raise StudyError(f"{where}: the table [{table}] is missing")
    for table in PROBLEM:
        if table in config and not isinstance(config[table], dict):
            raise StudyError(f"{where}: {table}: got {config[table]!r}; a table would do")


def _environment(table: Mapping[str, Any], where: str) -> Environment | ControlEnvironment:
    from fedasync.rl.tasks import TASKS

    make = named(table.get("kind"), TASKS, f"{where}: task.kind")
    made: Environment | ControlEnvironment = _made(make, table, f"{where}: task")
    if missing := [name for name in ("prompts", "held_out", "start") if not hasattr(made, name)]:
        raise StudyError(f"{where}: task: {make.__name__} is no environment: it has no {', no '.join(missing)}")
    return made


def _policy(table: Mapping[str, Any], where: str) -> PolicySpec:
    from fedasync.rl.models import POLICIES

    make = named(table.get("kind"), POLICIES, f"{where}: policy.kind")
    made: PolicySpec = _made(make, table, f"{where}: policy")
    if not hasattr(made, "make"):
        raise StudyError(f"{where}: policy: {make.__name__} is no policy: it has no make(environment, seed)")
    return made


def _made(make: Callable[..., Any], table: Mapping[str, Any], where: str) -> Any:
    """What a class or a function makes of its table, whatever it raises."""
    try:
        return parse(make, without(table, "kind"), where)
    except StudyError:
        raise
    except Exception as error:
        raise StudyError(f"{where}: {make.__name__} raised {type(error).__name__}: {error}") from error


def _refuse(problem: Problem, where: str) -> None:
    """What fits together only by its types."""
    from fedasync.rl.models import POLICIES, Folder, Mlp, check_folder

    if isinstance(problem.policy, Folder):
        try:
            check_folder(Path(problem.policy.path))
        except ValueError as error:
            raise StudyError(f"{where}: {error}") from None
    chooses_actions = hasattr(problem.environment, "observation_size")
    is_mlp, is_ours = isinstance(problem.policy, Mlp), type(problem.policy) in POLICIES.values()
    if is_mlp and not chooses_actions:
        speaking = ", ".join(repr(kind) for kind in POLICIES if kind != "mlp")
        raise StudyError(f"{where}: policy.kind: 'mlp' chooses among actions, and this task speaks text; {speaking} do")
    if is_ours and not is_mlp and chooses_actions:
        raise StudyError(f"{where}: policy.kind: this task has actions and observations, no text; 'mlp' would do")
    critic = getattr(problem.policy, "critic", None)
    if critic is False and problem.objective.needs_values:
        raise StudyError(
            f"{where}: objective.advantages: 'gae' needs a critic, and this policy has none; policy.critic = true, or "
            "advantages = 'grpo', 'dr_grpo', 'rloo', 'opo' or 'reward', would do"
        )
    if critic and not problem.objective.needs_values:
        raise StudyError(
            f"{where}: policy.critic: a critic is for objective.advantages = 'gae', got "
            f"{problem.objective.advantages!r}; leave it out"
        )
