"""What a learner tells of a version: of the batch, and of its steps together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.rl.diagnostics import combined

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.objective import Objective
    from fedasync.rl.trajectory import Trajectory


def about(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """What is known of a batch before it is trained on; ``version`` is the learner's then."""
    rewards = np.array([each.reward for each in trajectories])
    generated = np.array([each.generated_tokens for each in trajectories])
    ages = np.concatenate([version - each.versions[each.generated] for each in trajectories])
    return {
        "answers": float(len(trajectories)),
        "tokens": float(sum(map(len, trajectories))),
        "response_tokens_mean": float(generated.mean()),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "token_staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "token_staleness_max": float(ages.max()) if len(ages) else 0.0,
    }


def about_critic(returns: Tensor, values: Tensor) -> dict[str, float]:
    """How well values [n] foretold returns [n] before the version: 1 − Var(returns − values) / Var(returns).

    ``explained_variance`` is not told where all returns are the same.
    """
    told = {"return_mean": float(returns.mean()), "value_mean": float(values.mean())}
    spread = float(returns.var(correction=0))
    if spread > 0:
        told["explained_variance"] = 1 - float((returns - values).var(correction=0)) / spread
    return told


def joined(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a version's steps: means of the steps' own, the last learning rate, and the ratios' combined."""
    own = ("loss", "grad_norm", "learning_rate", "entropy")
    ratios = combined([{name: each for name, each in step.items() if name not in own} for step in steps])
    means = {name: float(np.mean([step[name] for step in steps])) for name in own}
    ratios["generated_tokens"] = ratios.pop("tokens")
    return ratios | means | {"learning_rate": steps[-1]["learning_rate"]}


def stat_names(objective: Objective) -> list[str]:
    """What ``Objective.token_losses`` tells of a micro-batch in which something was generated."""
    import torch

    from fedasync.rl.terms import Terms

    one = torch.zeros(1, 1)
    yes, version = one == 0, torch.zeros(1, 1, dtype=torch.long)
    of_reference = one if objective.needs_reference and objective.option("kl_in") == "loss" else None
    terms = Terms(
        one, one, one, yes, one, token_versions=version, version=0, entropy=one, reference=of_reference, selected=yes
    )
    return list(objective.token_losses(terms).stats)
