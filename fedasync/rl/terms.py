"""What a loss is made of, and what it gives back: tensors [N, T], a row for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Terms(NamedTuple):
    """Tensors [N, T] of N sequences, padded to T. What stands where ``mask`` is false is never looked at."""

    log_probs: Tensor
    """log π of the tokens under the policy that is trained, with its gradient."""
    behaviour: Tensor
    """log μ, as the engine told it; NaN or ±inf where it told none."""
    advantages: Tensor
    mask: Tensor
    """Bool: tokens that the policy generated. They are the denominator."""
    proximal: Tensor | None = None
    """log π_prox: the trainer's log-probabilities at the beginning of the version, detached; where
    ``Objective.needs_proximal``. With one optimiser step per version, ``log_probs.detach()`` is the same."""
    token_versions: Tensor | None = None
    """Integers: the version that generated each token; where ``Objective.needs_versions``."""
    version: int | None = None
    """The version that the learner has at the beginning of the step: that of ``proximal``."""
    entropy: Tensor | None = None
    """Entropy of the policy at each token, with its gradient, in nats; where ``Objective.entropy_bonus`` > 0."""
    reference: Tensor | None = None
    """log π_ref, detached; where ``Objective.needs_reference`` and ``kl_in`` is the loss."""
    selected: Tensor | None = None
    """Bool: what ``Objective.selected`` kept of the whole minibatch; where ``Objective.needs_selection``."""


class TokenLosses(NamedTuple):
    """The loss of a minibatch is Σ w · ``losses``, with w from ``denominators.token_weights(counted, …)``."""

    losses: Tensor
    """[N, T], to be minimised; exactly 0, and without gradient, where nothing is counted."""
    counted: Tensor
    """Bool [N, T]: the tokens of the denominator. What a correction rejects stays in it."""
    stats: dict[str, float]
    """See ``diagnostics.ratio_stats``; of several micro-batches, ``diagnostics.combined`` makes one."""
