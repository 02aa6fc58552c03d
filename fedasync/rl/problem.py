"""What is learnt, whoever generates and trains: a task, a policy, how tokens are drawn, what is minimised and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.rl.environment import ControlEnvironment, Environment
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser
from fedasync.rl.sampling import Sampling

if TYPE_CHECKING:
    from fedasync.rl.models import PolicySpec
    from fedasync.rl.policy import Policy


@dataclass(frozen=True)
class Problem:
    """``[task]``, ``[policy]``, ``[sampling]``, ``[objective]`` and ``[optimiser]`` of a configuration."""

    environment: Environment | ControlEnvironment
    policy: PolicySpec
    sampling: Sampling
    objective: Objective
    optimiser: Optimiser

    def make_policy(self, seed: int) -> Policy:
        """Version 0: a function of the seed."""
        return self.policy.make(self.environment, seed)

    def refusal(self, answers: int) -> str | None:
        """Why nothing can be learnt from groups of so many answers; None where something can."""
        if answers > 1 or self.objective.advantages in ("reward", "gae"):
            return None
        return (
            f"prompts: answers = 1 with advantages = {self.objective.advantages!r}, which compares the answers of a "
            "group: every advantage would be 0; 2 or more, or advantages = 'reward' or 'gae', would do"
        )

    def warnings(self) -> list[str]:
        """What a user should know before a run: options that cannot do what they say."""
        optimiser = self.optimiser
        told = (self.sampling.warning, self.objective.warning(optimiser.minibatches, optimiser.epochs))
        return [line for line in told if line is not None]
