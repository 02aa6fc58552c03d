"""What a rollout worker generates with, from what its controller tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from fedasync.studies.errors import StudyError
from fedasync.studies.signals import SignalExit

if TYPE_CHECKING:
    from fedasync.rl.engine import Engine
    from fedasync.rl.language_policy import LanguagePolicy
    from fedasync.trainer.child_settings import ChildSettings


def engine(settings: ChildSettings) -> Engine:
    """Of the problem that the settings describe.

    Raises ValueError for one that cannot be, StudyError also where a user's code raises SystemExit; ServerError.
    """
    try:
        return _engine(settings)
    except SignalExit:
        raise
    except SystemExit as error:
        raise StudyError(f"{settings.where}: the user's code raised SystemExit: {error}") from None


def _engine(settings: ChildSettings) -> Engine:
    from fedasync.rl.engines import engine_of
    from fedasync.studies.build import build_problem

    problem = build_problem(dict(settings.problem), settings.where)
    policy = cast("LanguagePolicy", problem.make_policy(settings.seed))  # or a ControlPolicy: the environment tells
    options: dict[str, Any] = {"max_running": settings.max_running, "reward_timeout_s": settings.reward_timeout_s}
    if settings.engine is None:
        return engine_of(problem, policy, settings.seed, **options)
    from fedasync.rl.openai_settings import server_of
    from fedasync.rl.openai_start import openai_engine_of

    return openai_engine_of(problem, policy, server_of(settings.engine), settings.seed, **options)
