"""FedNova (Wang et al., NeurIPS 2020): clients that make more local steps do not pull harder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.step_sizes import step_size_sum
from fedasync.aggregation.update import Inputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormalisedMean:
    """w ← w + s_eff·Σ p_i·Δ_i/s_i, with s_i = η·‖a_i‖₁ (``step_size_sum``), s_eff = Σ p_i·s_i and p_i = n_i/n.

    Δ_i/s_i is minus the client's normalised direction d_i. For the effective number of steps the paper allows several
    choices; Σ p_i·‖a_i‖₁ is the one that gives FedAvg back where all clients make equally many steps.
    """

    wants: Form = "delta"
    needs_step_sizes: bool = True

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs) -> None:
        total = sum(x.samples for x in inputs.entering)
        shares = [x.samples / total for x in inputs.entering]
        sizes = [step_size_sum("fednova", x) for x in inputs.entering]
        effective = sum(share * size for share, size in zip(shares, sizes, strict=True))
        for x, share, size in zip(inputs.entering, shares, sizes, strict=True):
            values.add_(x.values, alpha=effective * share / size)
