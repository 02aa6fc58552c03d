"""What is done about tokens that another policy generated: ratios, weights, and which tokens are left out.

Tensors are [N, T], a row for each sequence; ``mask`` (bool) marks the tokens of a sequence. Logarithms of ratios are
taken within ±20 before ``exp``, so that every ratio is finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedasync.rl.objective import Level, Proximal

LOG_RATIO_LIMIT = 20.0


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, which is clamped to ±20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """The log-ratio of each token ("token"), or of its sequence at each of its tokens: the sum of its tokens'
    ("product"), or their mean ("geometric"), which does not shrink or grow with the length."""
    if level == "token":
        return log_ratio
    within_limit = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    total = torch.where(mask, within_limit, 0.0).sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return total.expand_as(log_ratio)


def behaviour_weight(
    log_ratio: Tensor, mask: Tensor, level: Level, floor: float | None = None, cap: float | None = None
) -> Tensor:
    """sg(w), between ``floor`` and ``cap``: what μ generated weighs (Fu et al. 2025, Eq. 5; TIS, Yao et al. 2025).

    Detached: with a gradient through w, log π · ∇w would be added to the policy's gradient.
    """
    weight = ratio(sequence_log_ratio(log_ratio.detach(), mask, level))
    return weight if floor is None and cap is None else weight.clamp(floor, cap)


def within(log_ratio: Tensor, mask: Tensor, level: Level, low: float | None, high: float | None) -> Tensor:
    """Bool: where low ≤ w ≤ high, w of the token or of its sequence (IcePop; sequence masks). None: no bound."""
    of = ratio(sequence_log_ratio(log_ratio.detach(), mask, level))
    kept = torch.ones_like(mask)
    if low is not None:
        kept = kept & (of >= low)
    if high is not None:
        kept = kept & (of <= high)
    return kept


def m2_kept(log_ratio: Tensor, mask: Tensor, bound: float) -> Tensor:
    """Bool: what is left when the largest log-ratios² are dropped until their mean is ≤ ``bound`` (M2PO)."""
    squares = log_ratio.detach()[mask].double().square()
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device)
    # Means of ascending squares never fall, so those within the bound are the first ones.
    within_bound = torch.zeros_like(squares, dtype=torch.bool)
    within_bound[order] = means <= bound
    kept = torch.zeros_like(mask)
    kept[mask] = within_bound
    return kept


def opsm_kept(log_probs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Bool: not where A < 0 and mean_t(log μ − log π) > δ in the sequence. DeepSeek-AI 2025 (V3.2)."""
    drift = sequence_log_ratio(behaviour - log_probs.detach(), mask, "geometric")
    return ~((advantages < 0) & (drift > delta))


def fresh(token_versions: Tensor, version: int, most: int) -> Tensor:
    """Bool: tokens of at most ``most`` versions ago."""
    return version - token_versions <= most


def estimated_proximal(
    log_probs: Tensor, behaviour: Tensor, token_versions: Tensor, version: int, how: Proximal
) -> Tensor:
    """log π_prox without a forward pass, from log μ and log π (detached). A-3PO, arXiv 2512.06547.

    α = (v_prox − v_μ) / (v_π − v_μ) with v_prox = ``version`` and v_π = ``version`` + 1, within [0, 1], and 0 for a
    token without a version. "loglinear": log μ + α (log π − log μ); "linear": log((1 − α) μ + α π + 1e-10);
    "behaviour": log μ.
    """
    if how == "behaviour":
        return behaviour
    age = (version - token_versions).clamp(min=0)
    alpha = torch.where(token_versions >= 0, age / (age + 1), 0.0).to(behaviour.dtype)
    trained = log_probs.detach()
    if how == "loglinear":
        return behaviour + alpha * (trained - behaviour)
    return torch.where(alpha > 0, ((1 - alpha) * behaviour.exp() + alpha * trained.exp() + 1e-10).log(), behaviour)
