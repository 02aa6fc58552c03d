"""The engine of a problem, and whole answers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from fedasync.rl.engine import Engine, Finished
from fedasync.rl.episodes import EpisodeError, Guard, Start
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from fedasync.rl.control_engine import ControlEngine
    from fedasync.rl.control_policy import ControlPolicy
    from fedasync.rl.environment import ControlEnvironment, Environment
    from fedasync.rl.generation import LanguageEngine
    from fedasync.rl.language_policy import LanguagePolicy
    from fedasync.rl.policy import Policy
    from fedasync.rl.problem import Problem


class GenerationError(ValueError):
    """An answer failed where all were asked for."""


def engine_of(
    problem: Problem,
    policy: Policy,
    seed: int,
    *,
    max_running: int = 64,
    reward_timeout_s: float | None = None,
) -> Engine:
    """What generates a problem's answers with this policy, whose module it writes new weights into."""
    return any_engine(
        policy,
        problem.environment,
        problem.sampling,
        seed=seed,
        max_running=max_running,
        reward_timeout_s=reward_timeout_s,
    )


def any_engine(
    policy: Policy,
    environment: Environment | ControlEnvironment,
    sampling: Sampling,
    **settings: Any,
) -> LanguageEngine | ControlEngine:
    """By what the environment is; ``settings`` are the engine's."""
    if is_control(environment):
        from fedasync.rl.control_engine import ControlEngine

        return ControlEngine(
            cast("ControlPolicy", policy), cast("ControlEnvironment", environment), sampling, **settings
        )
    from fedasync.rl.generation import LanguageEngine

    return LanguageEngine(cast("LanguagePolicy", policy), cast("Environment", environment), sampling, **settings)


def is_control(environment: Environment | ControlEnvironment) -> bool:
    """It speaks observations and actions, not text."""
    return hasattr(environment, "observation_size")


def answers(
    policy: Policy,
    starts: Sequence[Start],
    version: int,
    environment: Environment | ControlEnvironment,
    sampling: Sampling,
    seed: int,
    *,
    max_running: int | None = None,
    **settings: Any,
) -> list[Finished]:
    """Whole answers under the policy's present weights, in the order of ``starts``.

    What exists of an answer is kept as it is; new tokens are those that an engine of the same seed gives under the same
    weights, and carry ``version``. All run at once, or ``max_running`` of them.
    """
    if not starts:
        return []
    engine = any_engine(
        policy,
        environment,
        sampling,
        seed=seed,
        version=version,
        max_running=len(starts) if max_running is None else max_running,
        **settings,
    )
    engine.resume(starts)
    found: dict[int, Finished] = {}
    while engine.running or engine.waiting:
        found |= {each.answer: each for each in engine.step()}
    return [found[start.request.answer] for start in starts]


def generate(
    policy: Policy,
    starts: Sequence[Start],
    version: int,
    environment: Environment | ControlEnvironment,
    sampling: Sampling,
    seed: int,
    *,
    max_running: int | None = None,
    reward_timeout_s: float | None = None,
) -> list[Trajectory]:
    """The trajectories of ``answers``. Raises GenerationError where one fails."""
    found = answers(
        policy,
        starts,
        version,
        environment,
        sampling,
        seed,
        max_running=max_running,
        reward_timeout_s=reward_timeout_s,
    )
    trajectories = []
    for start, each in zip(starts, found, strict=True):
        if each.trajectory is None:
            raise GenerationError(f"answer {each.answer} to prompt {start.request.prompt}: {each.failure}")
        trajectories.append(each.trajectory)
    return trajectories


def prompt_tokens(policy: LanguagePolicy, environment: Environment, prompt: int) -> int:
    """Tokens of a prompt; 0 where it cannot be made or encoded (to generate an answer then tells why)."""
    try:
        _, told = Guard().start(environment, prompt, False)
        return len(policy.encode_prompt(told))
    except (EpisodeError, TypeError, ValueError, KeyError):
        return 0
