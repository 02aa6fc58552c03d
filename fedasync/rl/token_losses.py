"""From an objective and the tensors of a micro-batch to the loss of each token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedasync.rl import corrections, losses
from fedasync.rl.corrections import ratio
from fedasync.rl.diagnostics import divergences, ratio_stats
from fedasync.rl.objective import Objective
from fedasync.rl.terms import Terms, TokenLosses


class _Seen(NamedTuple):
    """Log-probabilities [N, T] as losses may take them: finite, and 0 with A = 0 where nothing is counted."""

    log_probs: Tensor
    behaviour: Tensor
    """Where it is not known, the proximal or the trained policy's, so that the behaviour's ratio is 1."""
    proximal: Tensor
    """The trained policy's, detached, in losses without one."""
    advantages: Tensor
    mask: Tensor
    known: Tensor


def token_losses(objective: Objective, terms: Terms) -> TokenLosses:
    """See ``Objective.token_losses``."""
    _check(objective, terms)
    seen = _seen(objective, terms)
    kept = _kept(objective, terms, seen)
    loss, clipped = _policy_loss(objective, seen, kept)
    loss, truncated = _weighted(objective, seen, loss)
    loss = torch.where(kept, loss, 0.0)
    if objective.entropy_bonus and terms.entropy is not None:
        loss = loss - objective.entropy_bonus * torch.where(seen.mask, terms.entropy, 0.0)
    stats = _stats(objective, terms, seen, clipped, truncated, kept)
    if terms.reference is not None:
        divergence = _from_reference(objective, seen, terms.reference)
        loss = loss + objective.kl_coefficient * torch.where(kept, divergence, 0.0)
        stats["kl_reference"] = float(divergence.detach().sum()) / max(stats["tokens"], 1)
    return TokenLosses(loss, seen.mask, stats)


def value_losses(objective: Objective, values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor) -> Tensor:
    """See ``Objective.value_losses``."""
    values, returns, old_values = (torch.where(mask, each, 0.0) for each in (values, returns, old_values))
    clip = objective.option("value_clip")
    return torch.where(
        mask, objective.option("value_coefficient") * losses.value(values, returns, old_values, clip), 0.0
    )


def selected(objective: Objective, behaviour: Tensor, proximal: Tensor, mask: Tensor) -> Tensor | None:
    """See ``Objective.selected``."""
    if not objective.needs_selection:
        return None
    known = mask & behaviour.isfinite()
    drift = torch.where(known, proximal.detach() - behaviour, 0.0)
    # Over what is known: a drift of 0 that nobody measured would make room for one that is too large.
    return (mask & ~known) | corrections.m2_kept(drift, known, objective.option("m2_bound"))


def _check(objective: Objective, terms: Terms) -> None:
    if objective.needs_proximal and terms.proximal is None:
        raise ValueError(
            f"objective: loss = {objective.loss!r} needs the proximal policy's log-probabilities, got none"
        )
    if objective.needs_versions and (terms.token_versions is None or terms.version is None):
        raise ValueError(
            "objective: max_token_staleness and proximal = 'loglinear' or 'linear' need token_versions and version, "
            "got none"
        )
    if objective.needs_reference and objective.option("kl_in") == "loss" and terms.reference is None:
        raise ValueError(
            f"objective: kl_coefficient = {objective.kl_coefficient:g} needs the reference policy's log-probabilities, "
            "got none"
        )
    if objective.entropy_bonus and terms.entropy is None:
        raise ValueError(f"objective: entropy_bonus = {objective.entropy_bonus:g} needs the entropy, got none")


def _seen(objective: Objective, terms: Terms) -> _Seen:
    mask = terms.mask
    log_probs = torch.where(mask, terms.log_probs, 0.0)
    dtype = log_probs.dtype
    known = mask & terms.behaviour.isfinite()
    trained = log_probs.detach()
    proximal = trained
    if terms.proximal is not None:
        proximal = torch.where(mask, terms.proximal.detach(), 0.0).to(dtype)
    neutral = proximal if objective.needs_proximal else trained
    behaviour = torch.where(known, terms.behaviour.detach().to(dtype), neutral)
    how = objective.option("proximal")
    if how == "behaviour":
        proximal = behaviour
    elif how in ("loglinear", "linear"):
        assert terms.token_versions is not None
        assert terms.version is not None
        estimated = corrections.estimated_proximal(trained, behaviour, terms.token_versions, terms.version, how)
        proximal = torch.where(mask, estimated, 0.0)
    advantages = torch.where(mask, terms.advantages.detach(), 0.0).to(dtype)
    return _Seen(log_probs, behaviour, proximal, advantages, mask, known)


def _policy_loss(objective: Objective, seen: _Seen, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The loss before any behaviour weight, and where its clip acts."""
    low, high, dual = (objective.option(name) for name in ("clip_low", "clip_high", "dual_clip"))
    log_probs, advantages = seen.log_probs, seen.advantages
    whole = ratio(log_probs - seen.behaviour)
    match objective.loss:
        case "coupled":
            return losses.ppo(whole, advantages, low, high, dual), losses.clip_acts(whole, advantages, low, high, dual)
        case "cispo":
            return losses.cispo(log_probs, whole, advantages, low, high), (whole < 1 - low) | (whole > 1 + high)
        case "reinforce":
            return losses.reinforce(log_probs, whole, advantages, 1 + high), whole > 1 + high
        case "topr":
            return losses.topr(log_probs, whole, advantages), (advantages < 0) & (whole > 1)
        case "m2po":
            return losses.m2po(whole, advantages), torch.zeros_like(seen.mask)
        case "dppo":
            bound, penalty = objective.option("tv_bound"), objective.option("log_ratio_penalty")
            gone = losses.dppo_gone(log_probs, seen.behaviour, advantages, bound)
            return losses.dppo_tv(log_probs, seen.behaviour, whole, advantages, bound, penalty), gone
        case "gspo":
            # Over what is kept: a token that is left out has no gradient through its sequence's ratio either.
            of = ratio(corrections.sequence_log_ratio(log_probs - seen.proximal, kept, "geometric"))
            loss = losses.gspo(of, advantages, low, high, dual)
            return loss, losses.clip_acts(of, advantages, low, high, dual)
        case _:
            of = ratio(log_probs - seen.proximal)
            return losses.ppo(of, advantages, low, high, dual), losses.clip_acts(of, advantages, low, high, dual)


def _weighted(objective: Objective, seen: _Seen, loss: Tensor) -> tuple[Tensor, Tensor]:
    """The loss times the behaviour weight, and where that was truncated."""
    level = objective.option("weight")
    if level in (None, "none"):
        return loss, torch.zeros_like(seen.mask)
    drift = seen.proximal - seen.behaviour
    floor, cap = objective.option("weight_floor"), objective.option("weight_cap")
    weight = corrections.behaviour_weight(drift, seen.mask, level, floor, cap)
    raw = corrections.behaviour_weight(drift, seen.mask, level)
    return losses.weighted(loss, weight), weight != raw


def _kept(objective: Objective, terms: Terms, seen: _Seen) -> Tensor:
    """Bool: what no mask leaves out of the loss."""
    kept = seen.mask
    if objective.missing == "mask":
        kept = kept & seen.known
    level = objective.option("mask")
    if level not in (None, "none"):
        low, high = objective.option("mask_low"), objective.option("mask_high")
        kept = kept & corrections.within(seen.proximal - seen.behaviour, seen.mask, level, low, high)
    if objective.opsm_delta is not None:
        kept = kept & corrections.opsm_kept(
            seen.log_probs, seen.behaviour, seen.advantages, seen.mask, objective.opsm_delta
        )
    if objective.max_token_staleness is not None:
        assert terms.token_versions is not None
        assert terms.version is not None
        kept = kept & corrections.fresh(terms.token_versions, terms.version, objective.max_token_staleness)
    if objective.needs_selection:
        chosen = terms.selected
        if chosen is None:
            chosen = selected(objective, torch.where(seen.known, seen.behaviour, torch.nan), seen.proximal, seen.mask)
        assert chosen is not None
        kept = kept & chosen
    return kept


def _from_reference(objective: Objective, seen: _Seen, reference: Tensor) -> Tensor:
    """KL(π ‖ π_ref) of each token, with the gradient of log π."""
    log_ratio = torch.where(seen.mask, reference.detach().to(seen.log_probs.dtype), 0.0) - seen.log_probs
    within = log_ratio.clamp(-corrections.LOG_RATIO_LIMIT, corrections.LOG_RATIO_LIMIT)
    estimate: Tensor = getattr(divergences(within), objective.option("kl_estimator"))
    return torch.where(seen.mask, estimate, 0.0)


def _stats(
    objective: Objective, terms: Terms, seen: _Seen, clipped: Tensor, truncated: Tensor, kept: Tensor
) -> dict[str, float]:
    """Raw ratios of the trainer's policy (``proximal`` where it was given) to the behaviour's, and shares of tokens:
    on which the loss's clip acts, whose weight was truncated, left out, and either of the two (``modified``)."""
    trainer = seen.log_probs.detach() if terms.proximal is None else torch.where(seen.mask, terms.proximal, 0.0)
    stats = ratio_stats(trainer - torch.where(seen.known, terms.behaviour, 0.0), seen.known, seen.mask)
    if objective.loss in ("cispo", "reinforce", "topr"):
        truncated = clipped
    rejected = seen.mask & ~kept
    shares = {
        "clipped_share": clipped & kept,
        "truncated_share": truncated & kept,
        "rejected_share": rejected,
        "modified_share": (truncated | rejected) & seen.mask,
    }
    told = torch.stack([each.sum() for each in shares.values()]).double() / max(stats["tokens"], 1)
    stats |= dict(zip(shares, told.tolist(), strict=True))
    if terms.token_versions is not None and terms.version is not None and stats["tokens"]:
        age = (terms.version - terms.token_versions)[seen.mask].double()
        stats["token_staleness_mean"], stats["token_staleness_max"] = float(age.mean()), float(age.max())
    return stats
