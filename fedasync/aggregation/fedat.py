"""FedAT (Chai et al., SC 2021): a model of each tier, mixed so that slow tiers, which step rarely, count for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_integer

if TYPE_CHECKING:
    from torch import Tensor


class TierModels(NamedTuple):
    """w_m [P] of every tier that has stepped, and how often each tier has."""

    models: dict[int, Tensor]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class TierMix:
    """w = Σ_m (T_{M+1−m}/T)·w_m: a tier counts as often as its mirror image in speed has stepped (as recalled).

    A tier's w_m is FedAvg's mean of its round. The step that is being made counts in T. While some tier has not
    stepped, its mirror image would weigh nothing, and the first updates would not move the model: until then the tiers
    that have stepped share by their own counts (ours).
    """

    tiers: int
    wants: Form = "parameters"

    def __post_init__(self) -> None:
        check_integer("fedat: tiers", self.tiers, 1)

    def init(self, values: Tensor) -> TierModels:
        return TierModels({}, [0] * self.tiers)

    def apply(self, values: Tensor, state: TierModels, inputs: Inputs) -> TierModels:
        import torch

        models, counts = state.models, state.counts
        tier = inputs.entering[0].group
        total = sum(x.samples for x in inputs.entering)
        mean = torch.zeros_like(values)
        for x in inputs.entering:
            mean.add_(x.values, alpha=x.samples / total)
        models[tier] = mean
        counts[tier] += 1
        values.zero_()
        for m, weight in enumerate(self.weights(counts)):
            if weight:
                values.add_(models[m], alpha=weight)
        return state

    def weights(self, counts: list[int]) -> list[float]:
        """Of each tier's model; they sum to 1."""
        total = sum(counts)
        if min(counts):
            return [mirrored / total for mirrored in reversed(counts)]
        return [count / total for count in counts]
