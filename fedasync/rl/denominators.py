"""What the sum of the tokens' losses is divided by: weights that are told before a minibatch is cut.

With them the loss of a minibatch is Σ w · loss however it is cut into micro-batches and wherever those are, and
a correction that rejects tokens does not change what it is divided by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedasync.core.bounds import check_choice, check_integer
from fedasync.rl.objective import Aggregate


def token_weights(
    counted: Tensor, how: Aggregate, constant_tokens: int | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weights w [N, T] of a whole minibatch; 0 where ``counted`` (bool [N, T]) is false.

    "token": 1 / tokens, the mean over tokens. "sequence": 1 / (sequences · tokens of the sequence), the mean over
    sequences of their means. "constant": 1 / (sequences · ``constant_tokens``), Dr. GRPO (Liu et al. 2025). A row
    without a counted token is no sequence (padding).
    """
    check_choice("denominators: how", how, Aggregate)
    weights = counted.to(torch.float64)
    of_rows = weights.sum(-1, keepdim=True)
    sequences = (of_rows > 0).sum().clamp(min=1)
    if how == "token":
        weights = weights / of_rows.sum().clamp(min=1)
    elif how == "sequence":
        weights = weights / (of_rows.clamp(min=1) * sequences)
    else:
        check_integer("denominators: constant_tokens", constant_tokens, 1)
        weights = weights / (sequences * (constant_tokens or 1))
    return weights.to(dtype)
