"""``[workload] kind = "federated_ppo"``: from its tables to the workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedasync.studies.errors import StudyError
from fedasync.studies.problem_tables import build_problem, demand_installed, problem_sources
from fedasync.workloads.protocol import Workload

HERE = "federated_ppo"


def federated_ppo(
    task: dict[str, Any],
    policy: dict[str, Any],
    sampling: dict[str, Any],
    optimiser: dict[str, Any],
    objective: dict[str, Any] | None = None,
    client_tasks: list[dict[str, Any]] | None = None,
    clients: int = 8,
    prompts_per_client: int | list[int] = 64,
    batch: int = 8,
    answers: int = 8,
    local_steps: int = 4,
    rollouts_every: int = 1,
    evaluation_prompts: int = 128,
    reward_timeout_s: float | None = None,
    seed: int = 0,
) -> Workload:
    """``client_tasks`` are keys of [workload.task] that clients have otherwise, client i those of table i mod their
    number; the rest is ``FederatedPpo``'s. Raises StudyError, ValueError."""
    from fedasync.rl.federated_ppo import FederatedPpo

    tables = {
        "task": task,
        "policy": policy,
        "sampling": sampling,
        "optimiser": optimiser,
        "objective": objective or {},
    }
    demand_installed(tables)
    try:
        problem = build_problem(tables, HERE)
        own = None if client_tasks is None else [_task(tables, each) for each in client_tasks]
    except StudyError as error:  # whoever reads the table says where it stands
        raise StudyError(str(error).removeprefix(f"{HERE}: ")) from None
    return FederatedPpo(
        problem,
        clients=clients,
        prompts_per_client=prompts_per_client,
        batch=batch,
        answers=answers,
        local_steps=local_steps,
        rollouts_every=rollouts_every,
        environments=own,
        evaluation_prompts=evaluation_prompts,
        reward_timeout_s=reward_timeout_s,
        seed=seed,
    )


def sources(table: Mapping[str, Any], where: str) -> tuple[object, ...]:
    """What a user may have written of it; none where its tables cannot be read, which is told when it is made."""
    tables = [table.get(name) for name in ("task", "policy")]
    return problem_sources(table, where) if all(isinstance(each, dict) for each in tables) else ()


def _task(tables: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    return build_problem({**tables, "task": {**tables["task"], **other}}, HERE).environment
