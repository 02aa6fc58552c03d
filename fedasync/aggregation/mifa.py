"""MIFA (Gu et al., NeurIPS 2021): every step averages the latest update of every client, at work or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


class Memory(NamedTuple):
    """The latest Δ [P] of every client that has delivered one, and their sum [P]."""

    latest: dict[int, Tensor]
    total: Tensor


@dataclass(frozen=True, slots=True)
class LatestMean:
    """w ← w + η·(1/N)·Σ_i G_i over all N clients, G_i the latest Δ of client i.

    With ``wait_for_all`` the model does not move before every client has delivered once, as in the paper; without, the
    missing ones count as 0. The paper divides G by the local learning rate and multiplies it in again, and lets that
    rate fall as 1/t, which is the workload's business here.
    """

    server_learning_rate: float = 1.0
    wait_for_all: bool = True
    wants: Form = "delta"

    def __post_init__(self) -> None:
        check_real("mifa: server_learning_rate", self.server_learning_rate, 0, above=True)

    def init(self, values: Tensor) -> Memory:
        import torch

        return Memory({}, torch.zeros_like(values))

    def apply(self, values: Tensor, state: Memory, inputs: Inputs) -> Memory:
        latest, total = state
        for x in inputs.entering:
            total.add_(x.values)
            if x.worker in latest:
                total.sub_(latest[x.worker])
            latest[x.worker] = x.values.clone()
        if len(latest) == inputs.clients or not self.wait_for_all:
            values.add_(total, alpha=self.server_learning_rate / inputs.clients)
        return state
