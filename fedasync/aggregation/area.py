"""AREA (Iakovidou and Kim 2024): the model is the mean of what every client uploaded last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs

if TYPE_CHECKING:
    from torch import Tensor


class Uploads(NamedTuple):
    """y_i [P], the last model that client i uploaded, and w_0 [P], which stands for those who have not."""

    last: dict[int, Tensor]
    start: Tensor


@dataclass(frozen=True, slots=True)
class MeanOfLast:
    """w ← w + (1/N)·Σ (x_i − y_i) over the buffer; y_i ← x_i.

    So w = (1/N)·Σ y_i after every step, up to rounding. In the paper a client sends x_i − y_i and keeps y_i; here the
    server keeps it. No staleness weight and no learning rate.
    """

    wants: Form = "parameters"

    def init(self, values: Tensor) -> Uploads:
        return Uploads({}, values.clone())

    def apply(self, values: Tensor, state: Uploads, inputs: Inputs) -> Uploads:
        for x in inputs.entering:
            values.add_(x.values - state.last.get(x.worker, state.start), alpha=1 / inputs.clients)
            state.last[x.worker] = x.values.clone()
        return state
