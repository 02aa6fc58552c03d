"""How far the trained policy is from the one that generated, told before anything is clipped, capped or masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedasync.rl.corrections import LOG_RATIO_LIMIT, ratio


class Divergences(NamedTuple):
    """Estimators of KL(μ ‖ π) at ρ = π / μ, per token (Schulman 2020, "Approximating KL divergence")."""

    k1: Tensor
    """−log ρ: unbiased."""
    k2: Tensor
    """½ log² ρ: biased, little variance."""
    k3: Tensor
    """ρ − 1 − log ρ: unbiased, never negative."""


def divergences(log_ratio: Tensor) -> Divergences:
    """k1, k2 and k3 of log-ratios log π − log μ."""
    return Divergences(-log_ratio, 0.5 * log_ratio.square(), ratio(log_ratio) - 1 - log_ratio)


def effective_share(weights: Tensor) -> Tensor:
    """Effective sample size over the number of weights: (Σ w)² / (n Σ w²)."""
    return weights.sum().square() / (weights.numel() * weights.square().sum())


class Staleness(NamedTuple):
    """Of each sequence [N], in versions, NaN where nothing was generated."""

    oldest: Tensor
    newest: Tensor
    mean: Tensor
    """Over its tokens."""
    span: Tensor
    """Versions that its tokens come from, first to last: 1 where no new weights came in between."""


def staleness(token_versions: Tensor, mask: Tensor, version: int) -> Staleness:
    """How old the tokens [N, T] of each sequence are for a learner at ``version``."""
    age = torch.where(mask, version - token_versions, torch.nan).double()
    some = mask.any(-1)
    oldest = torch.where(some, age.nan_to_num(-torch.inf).amax(-1), torch.nan)
    newest = torch.where(some, age.nan_to_num(torch.inf).amin(-1), torch.nan)
    return Staleness(oldest, newest, age.nanmean(-1), oldest - newest + 1)


def ratio_stats(log_ratio: Tensor, known: Tensor, mask: Tensor) -> dict[str, float]:
    """Raw ratios of the trainer's policy to the behaviour's, over the ``known`` tokens of ``mask``; raw but for the
    limit of ±20 on their logarithms.

    ``tokens``, ``missing_tokens`` (no log-probability came), ``ratio_min``, ``ratio_mean``, ``ratio_max``,
    ``ratio_squared_mean``, ``ess`` (effective share), ``k1``, ``k2``, ``k3``, ``m2`` (mean log-ratio²). Where no token
    is known, the first two only.
    """
    logs = log_ratio.detach()[known & mask].double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tokens = int(mask.sum())
    stats: dict[str, float] = {"tokens": tokens, "missing_tokens": tokens - logs.numel()}
    if not logs.numel():
        return stats
    ratios = ratio(logs)
    k1, k2, k3 = (each.mean() for each in divergences(logs))
    told = {
        "ratio_min": ratios.min(),
        "ratio_mean": ratios.mean(),
        "ratio_max": ratios.max(),
        "ratio_squared_mean": ratios.square().mean(),
        "ess": effective_share(ratios),
        "k1": k1,
        "k2": k2,
        "k3": k3,
        "m2": logs.square().mean(),
    }
    return stats | dict(zip(told, torch.stack(list(told.values())).tolist(), strict=True))


_OF_KNOWN = ("ratio_mean", "ratio_squared_mean", "k1", "k2", "k3", "m2")


def combined(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One of several micro-batches' stats, as if they had been one.

    ``*tokens`` add up, ``*_min`` and ``*_max`` go on, ``ess`` is told again from the moments, and the rest is weighed
    by the tokens that it was told of.
    """
    together: dict[str, float] = {}
    for name in dict.fromkeys(name for each in stats for name in each):
        having = [each for each in stats if name in each]
        values = [each[name] for each in having]
        if name.endswith("tokens"):
            together[name] = sum(values)
        elif name.endswith("_min"):
            together[name] = min(values)
        elif name.endswith("_max"):
            together[name] = max(values)
        elif name != "ess":
            known = [each["tokens"] - (each["missing_tokens"] if name in _OF_KNOWN else 0) for each in having]
            together[name] = sum(v * n for v, n in zip(values, known, strict=True)) / max(sum(known), 1)
    if "ratio_squared_mean" in together:
        together["ess"] = together["ratio_mean"] ** 2 / together["ratio_squared_mean"]
    return together
