"""How far a contribution may move the model from the version it started from: clip, or reject.

Clipping is what robust aggregation and differential privacy start from (McMahan et al. 2018, "Learning Differentially
Private Recurrent Language Models": Δ ← Δ·min(1, C/‖Δ‖)). It happens when a contribution comes in, before any buffer, so
that it goes with every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, isfinite
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norms:
    """Bounds on ‖x − w_base‖₂ over the whole vector: scaled back to ``clip``, rejected beyond ``most``."""

    clip: float | None = None
    most: float | None = None


def limit(values: Tensor, base: Tensor, form: Form, norms: Norms) -> str | None:
    """Hold a contribution [P], finite and in ``form``, to the bounds, in place; what is wrong if it is too far."""
    if norms.clip is None and norms.most is None:
        return None
    distance = norm(values) if form == "delta" else norm(values, base)
    if norms.most is not None and distance > norms.most:
        return f"it lies {distance:.4g} from its base; at most {norms.most:g} would do"
    if not isfinite(distance):  # of finite values: nothing can be scaled by it
        return "its distance from its base is beyond the largest number"
    if norms.clip is not None and distance > norms.clip:
        scale = norms.clip / distance
        for x, w in blocks(values, base):
            if form == "delta":
                x.mul_(scale)
            else:
                x.sub_(w).mul_(scale).add_(w)
    return None


def norm(values: Tensor, base: Tensor | None = None) -> float:
    """‖values‖₂, or ‖values − base‖₂, summed in float64."""
    from torch import float64
    from torch.linalg import vector_norm

    if base is None:
        parts = [float(vector_norm(x, dtype=float64)) for (x,) in blocks(values)]
    else:
        parts = [float(vector_norm(x - w, dtype=float64)) for x, w in blocks(values, base)]
    return hypot(*parts)
