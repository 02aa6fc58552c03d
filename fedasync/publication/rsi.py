"""One number for a publication rule over several tasks: publications saved where reward was kept."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log

from fedasync.core.bounds import check_real


def switching_improvement(
    rewards: Sequence[float],
    publications: Sequence[float],
    unrestricted_rewards: Sequence[float],
    unrestricted_publications: Sequence[float],
    sigma: float = 0.2,
) -> float:
    """RSI, the reward-threshold-based switching improvement of the low-switching-cost work, as recalled.

    Mean over tasks k of 1[R_k > (1 − sign(R̂_k)·σ)·R̂_k] · ln max(Ĉ_k/C_k, 1), where R is the reward and C ≥ 1 the
    count of publications, and a hat marks the learner that publishes every version: nothing for a task whose reward
    fell by the share σ or more. Publishing every version gives 0. The form and the base of the logarithm are not
    confirmed.

    Raises ValueError for sequences of different lengths or none, rewards that are not finite, and counts < 1.
    """
    check_real("sigma", sigma, 0, 1)
    columns = (rewards, publications, unrestricted_rewards, unrestricted_publications)
    if len({len(column) for column in columns}) != 1 or not rewards:
        raise ValueError(
            f"one number a task in each of the four, got {', '.join(str(len(column)) for column in columns)}"
        )
    total = 0.0
    for r, c, r_all, c_all in zip(*columns, strict=True):
        if not (isfinite(r) and isfinite(r_all)):
            raise ValueError(f"rewards must be finite, got {r} and {r_all}")
        check_real("publications", c, 1)
        check_real("publications", c_all, 1)
        sign = (r_all > 0) - (r_all < 0)
        if r > (1 - sign * sigma) * r_all:
            total += log(max(c_all / c, 1.0))
    return total / len(rewards)
