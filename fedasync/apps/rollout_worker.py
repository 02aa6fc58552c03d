"""A rollout worker's process: ``python -m fedasync.apps.rollout_worker``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fedasync.trainer.child import worker_process

if TYPE_CHECKING:
    from fedasync.rl.engine import Engine
    from fedasync.rl.language_policy import LanguagePolicy
    from fedasync.trainer.child_settings import ChildSettings


def engine(settings: ChildSettings) -> Engine:
    """Of the problem that the settings describe. Raises ValueError for one that cannot be."""
    from fedasync.rl.engines import engine_of
    from fedasync.studies.build import build_problem

    problem = build_problem(dict(settings.problem), settings.where)
    return engine_of(
        problem,
        cast("LanguagePolicy", problem.make_policy(settings.seed)),  # or a ControlPolicy: the environment tells
        settings.seed,
        max_running=settings.max_running,
        reward_timeout_s=settings.reward_timeout_s,
    )


if __name__ == "__main__":
    worker_process(engine)
