"""DC-ASGD (Zheng et al., ICML 2017): a stale gradient corrected for how far the model has moved since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.step_sizes import step_size_sum
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DelayCompensation:
    """w ← w − η·(g + λ·g⊙g⊙(w − w_base)), g⊙g standing for the Hessian's diagonal.

    The client's Δ stands for −s·g, s its ``step_size_sum``, so that w ← w + η·(Δ − (λ/s)·Δ⊙Δ⊙(w − w_base)). With
    ``adaptive`` λ is λ/√(M + ε), M ← m·M + (1 − m)·g⊙g. Defaults of public ports: λ = 0.04 constant; adaptive λ = 2,
    m = 0.95, ε = 1e-7.
    """

    compensation: float = 0.04
    adaptive: bool = False
    mean_square_momentum: float = 0.95
    epsilon: float = 1e-7
    server_learning_rate: float = 1.0
    wants: Form = "delta"
    needs_base: bool = True
    needs_step_sizes: bool = True

    def __post_init__(self) -> None:
        check_real("dc_asgd: compensation", self.compensation, 0)
        check_real("dc_asgd: mean_square_momentum", self.mean_square_momentum, 0, 1, below=True)
        check_real("dc_asgd: epsilon", self.epsilon, 0, above=True)
        check_real("dc_asgd: server_learning_rate", self.server_learning_rate, 0, above=True)

    def init(self, values: Tensor) -> Tensor | None:
        """M [P], 0, if adaptive."""
        import torch

        return torch.zeros_like(values) if self.adaptive else None

    def apply(self, values: Tensor, state: Tensor | None, inputs: Inputs) -> Tensor | None:
        for x in inputs.entering:
            assert x.base is not None
            gradient = x.values / -step_size_sum("dc_asgd", x)
            squared = gradient.square()
            correction = squared * (values - x.base)
            if state is not None:
                state.mul_(self.mean_square_momentum).add_(squared, alpha=1 - self.mean_square_momentum)
                correction.div_((state + self.epsilon).sqrt_())
            size = step_size_sum("dc_asgd", x)
            values.add_(x.values, alpha=self.server_learning_rate)
            values.add_(correction, alpha=-self.server_learning_rate * size * self.compensation)
        return state
