"""How good a policy is on prompts that it is not trained on, by its most likely answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedasync.core.bounds import check_integer
from fedasync.rl.engine import Request
from fedasync.rl.engines import answers, is_control
from fedasync.rl.episodes import Start
from fedasync.rl.sampling import Sampling

if TYPE_CHECKING:
    from fedasync.rl.environment import ControlEnvironment, Environment
    from fedasync.rl.policy import Policy

FULL_REWARD = 1 - 1e-6


def evaluate(
    policy: Policy,
    environment: Environment | ControlEnvironment,
    sampling: Sampling,
    prompts: int,
    *,
    max_running: int = 128,
    reward_timeout_s: float | None = None,
) -> dict[str, float]:
    """``reward``: the mean over the first held-out prompts, at most ``prompts`` of them, answered greedily; ``exact``:
    the share that earned 1 or more (language tasks only).

    Answers that failed enter neither, and their share is ``failed``, which is left out where it is 0. Raises
    ValueError where there are no held-out prompts, or all failed.
    """
    check_integer("evaluation: prompts", prompts, 1)
    count = min(prompts, environment.held_out)
    if count < 1:
        raise ValueError("evaluation: the environment holds no prompts out; held_out ≥ 1 would do")
    found = answers(
        policy,
        [Start(Request(prompt, prompt, 0, 0)) for prompt in range(count)],
        0,
        environment,
        sampling,
        0,
        max_running=max_running,
        reward_timeout_s=reward_timeout_s,
        greedy=True,
        held_out=True,
    )
    rewards = [each.trajectory.reward for each in found if each.trajectory is not None]
    if not rewards:
        raise ValueError(f"evaluation: all {count} held-out prompts failed, the first with: {found[0].failure}")
    told = {"reward": sum(rewards) / len(rewards)}
    if not is_control(environment):
        told["exact"] = sum(reward >= FULL_REWARD for reward in rewards) / len(rewards)
    failed = len(found) - len(rewards)
    return told | ({"failed": failed / count} if failed else {})
