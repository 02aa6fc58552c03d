"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates take a client's own drift out of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedasync.aggregation.model import Form
from fedasync.aggregation.step_sizes import step_size_sum
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


class Variates(NamedTuple):
    """c [P], the server's control variate, and c_i [P] of every client that has delivered something (the rest 0)."""

    server: Tensor
    clients: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class ControlVariates:
    """Clients step along g + c − c_i. w ← w + η·mean(Δ); option II: c_i ← c_i − c − Δ_i/(η_l·Q); c ← c + (1/N)·Σ δc_i.

    η_l·Q is the contribution's ``step_size_sum``. The mean is over the round, equally weighted, as in the paper; so c
    stays the mean of all c_i. Values of a model that are not trained (buffers) have variates that nobody uses.
    """

    server_learning_rate: float = 1.0
    wants: Form = "delta"
    needs_step_sizes: bool = True

    def __post_init__(self) -> None:
        check_real("scaffold: server_learning_rate", self.server_learning_rate, 0, above=True)

    def init(self, values: Tensor) -> Variates:
        import torch

        return Variates(torch.zeros_like(values), {})

    def control(self, state: Variates, worker: int) -> Tensor:
        """c − c_i."""
        own = state.clients.get(worker)
        return state.server.clone() if own is None else state.server - own

    def apply(self, values: Tensor, state: Variates, inputs: Inputs) -> Variates:
        share = self.server_learning_rate / len(inputs.entering)
        sizes = [step_size_sum("scaffold", x) for x in inputs.entering]
        for x, size in zip(inputs.entering, sizes, strict=True):
            values.add_(x.values, alpha=share)
            renewed = x.values / -size
            if x.control is not None:
                renewed.sub_(x.control)  # c − c_i as the client had them
            own = state.clients.get(x.worker)
            state.server.add_(renewed if own is None else renewed - own, alpha=1 / inputs.clients)
            state.clients[x.worker] = renewed
        return state
