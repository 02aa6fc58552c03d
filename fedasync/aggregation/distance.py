"""How far one version of a model lies from another."""

from __future__ import annotations

from math import sqrt
from sys import float_info
from typing import TYPE_CHECKING

from fedasync.aggregation.update import blocks

if TYPE_CHECKING:
    from torch import Tensor


def relative_distance(current: Tensor, published: Tensor) -> float:
    """‖w − w_published‖ / ‖w_published‖ of two flat vectors, in one pass; sums in float64.

    From zero weights every move is the largest number there is.
    """
    import torch

    moved = norm = 0.0
    for now, before in blocks(current, published):
        reference = before.to(torch.float64)
        norm += float(reference.dot(reference))
        difference = now.to(torch.float64).sub_(reference) if now.dtype != torch.float64 else now - reference
        moved += float(difference.dot(difference))
    if moved == 0:
        return 0.0
    return min(sqrt(moved) / sqrt(norm), float_info.max) if norm > 0 else float_info.max
