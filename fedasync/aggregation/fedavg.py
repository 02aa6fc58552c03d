"""FedAvg (McMahan et al. 2017): w ← Σ (n_k / n)·x_k over the round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs, blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleWeightedMean:
    """Mean of the round's models, weighted by their sample counts."""

    wants: Form = "parameters"
    stays_between: bool = True

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs, out: Tensor | None = None) -> None:
        import torch

        total = sum(x.samples for x in inputs.entering)
        weights = [x.samples / total for x in inputs.entering]
        for mean, first, *others in blocks(values if out is None else out, *(x.values for x in inputs.entering)):
            torch.mul(first, weights[0], out=mean)
            for x, weight in zip(others, weights[1:], strict=True):
                mean.add_(x, alpha=weight)
