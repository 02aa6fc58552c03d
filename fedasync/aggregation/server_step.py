"""A buffer's step in three parts: aggregate the deltas, add noise where privacy wants it, let an optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedasync.aggregation.aggregators import Aggregator, Krum, Mean
from fedasync.aggregation.model import Form
from fedasync.aggregation.privacy import Privacy
from fedasync.aggregation.server_optimizers import ServerOptimizer, Sgd
from fedasync.aggregation.update import Input, Inputs
from fedasync.core.staleness import Constant, Staleness

if TYPE_CHECKING:
    from torch import Tensor

Weights = Literal["equal", "samples"]


@dataclass(frozen=True, slots=True)
class ServerStep:
    """w ← optimizer(w, D) with D the aggregate of s(τ)·Δ over the buffer (Reddi et al. 2021, algorithm 2).

    ``weights`` are 1/K (``equal``) or n_k/n (``samples``). With ``privacy``, noise for contributions clipped to
    ``clip_norm`` is added to D, and all weigh the same: a client's number of samples would be told by its weight.
    """

    optimizer: ServerOptimizer = Sgd()
    aggregator: Aggregator = Mean()
    staleness: Staleness = Constant()
    weights: Weights = "equal"
    privacy: Privacy | None = None
    clip_norm: float | None = None
    wants: Form = "delta"

    def __post_init__(self) -> None:
        check_privacy(self.privacy, self.clip_norm, self.aggregator)

    @property
    def steps_statistics(self) -> bool:
        """Statistics (running variances) go the way of parameters.

        Where a plain mean of them would let in what noise or a robust aggregator keeps out.
        """
        return is_private(self.privacy) or not isinstance(self.aggregator, Mean)

    def init(self, values: Tensor) -> Any:
        """The optimiser's state."""
        return self.optimizer.init(values)

    def apply(self, values: Tensor, state: Any, inputs: Inputs, out: Tensor | None = None) -> Any:
        import torch

        entering = inputs.entering
        direction = torch.empty_like(values) if out is None else out
        scales = [self.staleness(x.staleness) for x in entering]
        equal = self.weights == "equal" or is_private(self.privacy)
        self.aggregator.aggregate([x.values for x in entering], shares(entering, equal), scales, direction)
        if self.privacy is not None and self.clip_norm is not None:
            self.privacy.add(direction, len(entering), self.clip_norm, inputs)
        delay = max(x.staleness for x in entering)
        return self.optimizer.step(values, state, direction, values if out is None else out, delay)


@dataclass(frozen=True, slots=True)
class WindowAggregate:
    """FedFa's window with another aggregator than the mean, or with noise: w = aggregate of the window's models.

    Every step computes it afresh: K passes over memory.
    """

    aggregator: Aggregator = Mean()
    privacy: Privacy | None = None
    clip_norm: float | None = None
    wants: Form = "parameters"

    def __post_init__(self) -> None:
        check_privacy(self.privacy, self.clip_norm, self.aggregator)

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs, out: Tensor | None = None) -> None:
        window, target = inputs.window, values if out is None else out
        self.aggregator.aggregate([x.values for x in window], shares(window, True), [1.0] * len(window), target)
        if self.privacy is not None and self.clip_norm is not None:
            self.privacy.add(target, len(window), self.clip_norm, inputs)


def shares(inputs: Sequence[Input], equal: bool) -> list[float]:
    """Weights that sum to 1: equal ones, or in proportion to the samples."""
    if equal:
        return [1 / len(inputs)] * len(inputs)
    total = sum(x.samples for x in inputs)
    return [x.samples / total for x in inputs]


def is_private(privacy: Privacy | None) -> bool:
    """Some noise is added."""
    return privacy is not None and privacy.noise_multiplier > 0


def check_privacy(privacy: Privacy | None, clip_norm: float | None, aggregator: Aggregator) -> None:
    """Raise ValueError for noise whose size would mean nothing."""
    if not is_private(privacy):
        return
    if clip_norm is None:
        raise ValueError("privacy needs a clip_norm: without it no noise covers what a contribution can do")
    if not isinstance(aggregator, Mean):
        raise ValueError(
            f"privacy is defined here for the sum of a buffer, not for aggregator {aggregator.kind!r}; "
            "aggregator = { kind = 'mean' } would do"
        )


def check_size(name: str, aggregator: Aggregator, size: int) -> None:
    """Raise ValueError for a buffer that is too small for its aggregator."""
    if size < aggregator.fewest:
        needs = " (K ≥ 2·byzantine + 3, and ≥ keep + byzantine)" if isinstance(aggregator, Krum) else ""
        raise ValueError(
            f"{name}: aggregator {aggregator.kind!r} needs {aggregator.fewest} contributions{needs}, and a step has "
            f"{size}; a larger buffer, or fewer byzantine, would do"
        )
