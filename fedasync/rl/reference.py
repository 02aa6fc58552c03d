"""Keeping near the policy that a run began with, by what each token is rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedasync.rl.corrections import LOG_RATIO_LIMIT
from fedasync.rl.diagnostics import divergences
from fedasync.rl.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.objective import Objective


def penalised(groups: Sequence[Group], reference: Tensor, objective: Objective) -> tuple[list[Group], float]:
    """Groups whose tokens' rewards are less by β · KL(μ ‖ π_ref), and the mean of KL over those tokens.

    ``reference`` [tokens] are log π_ref of all answers, end to end. Tokens whose log μ nobody knows are not penalised.
    Ouyang et al. 2022 (§3.1), with the estimator of the objective.
    """
    found, at, total, count = list[Group](), 0, 0.0, 0
    log_probs = reference.double().cpu().numpy()
    for group in groups:
        made = list[Trajectory]()
        for each in group.trajectories:
            own = each.log_probs.astype(np.float64)
            known = each.generated & np.isfinite(own)
            log_ratio = np.where(known, log_probs[at : at + len(each)] - np.where(known, own, 0.0), 0.0)
            estimates = divergences(torch.from_numpy(log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)))
            told = np.where(known, getattr(estimates, objective.option("kl_estimator")).numpy(), 0.0)
            made.append(
                replace(each, rewards=(each.rewards - objective.kl_coefficient * told).astype(each.rewards.dtype))
            )
            at, total, count = at + len(each), total + float(told.sum()), count + int(np.count_nonzero(known))
        found.append(replace(group, trajectories=tuple(made)))
    return found, total / max(count, 1)
