"""Gradients of many copies of one module in one pass: each lane has its own parameters, its own batch, its own loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import LSTM, Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedasync.workloads.lanes import OBSERVED_LANES, Aligned, Traits, observe
from fedasync.workloads.recording import Function, record
from fedasync.workloads.training import check_losses

RECORD_AFTER = 8
"""Passes of one shape after which it is recorded: recording costs about as much as it saves in that many."""
RECORD_OPERATIONS = 3000
"""A longer pass is never recorded: that would take seconds."""


class StackedGradient:
    """The gradient of Σ_j w_ij · loss_ij for each lane i, with respect to the lane's trainable parameters.

    ``trainable`` and ``carried`` name the parameters and buffers that are stacked. A lane's buffers are written in
    place, as the module writes them. All lanes are differentiated in one ordinary backward pass where the forward
    pass has batching rules, and each within its lane where it has not. A pass of a shape that comes often is recorded
    and run again without Python's part in it; the bits are the same.
    """

    def __init__(
        self, module: Module, loss: Callable[..., Tensor], trainable: Sequence[str], carried: Sequence[str]
    ) -> None:
        self._objective = _Objective(module, loss)
        self._trainable = [f"module.{name}" for name in trainable]
        self._carried = [f"module.{name}" for name in carried]
        # Stacked like the others: a product with one shared matrix would fold the lanes into its rows.
        self._constants = {
            name: buffer for name, buffer in self._objective.named_buffers() if name not in set(self._carried)
        }
        self._nested = False
        # oneDNN's LSTM has no batching rule: torch would loop over the lanes.
        self._without_onednn = any(isinstance(each, LSTM) for each in module.modules())
        self._traits: dict[Hashable, Traits] = {}
        self._passes: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, Function | None] = {}

    def traits(self, rows: int, data: Sequence[Tensor]) -> Traits:
        """Of a pass over batches of ``rows`` samples like those of ``data``, [samples, ...] each."""
        key = (rows, *(t.shape[1:] for t in data))
        if key not in self._traits:
            state = dict(self._objective.named_parameters()) | dict(self._objective.named_buffers())
            own = [state[name].detach() for name in (*self._trainable, *self._carried)]
            batch = [t[:1].expand(rows, *t.shape[1:]) for t in data]
            weights = torch.ones(rows, dtype=own[0].dtype, device=own[0].device)
            lanes = [t.expand(OBSERVED_LANES, *t.shape).contiguous() for t in (*own, *batch, weights)]
            try:
                self._traits[key] = observe(lambda: self._plain(*lanes))
            except RuntimeError:
                if self._nested:
                    raise
                self._nested = True
                self._traits[key] = observe(lambda: self._plain(*lanes))
        return self._traits[key]

    def __call__(
        self, tensors: Sequence[Tensor], batch: Sequence[Tensor], weights: Tensor, traits: Traits
    ) -> tuple[Tensor, ...]:
        """Gradients of the trainable ``tensors`` [lanes, ...], with ``batch`` [lanes, samples, ...] and ``weights``
        [lanes, samples]. ``tensors`` are the trainable ones, then the carried ones. Read what you get, never write it.
        """
        key = (weights.shape, *(t.shape for t in batch))
        inputs = (*tensors, *batch, weights)
        run = self._aligned if traits.aligned and weights.device.type == "cpu" else self._plain
        recorded = self._recorded.get(key)
        if recorded is not None:
            return recorded(*inputs)
        passes = self._passes[key] = self._passes.get(key, 0) + 1
        if passes >= RECORD_AFTER and key not in self._recorded and traits.operations <= RECORD_OPERATIONS:
            self._recorded[key] = record(run, inputs)
        return run(*inputs)

    def _aligned(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with Aligned():
            return self._plain(*inputs)

    def _plain(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        # Torch warns of slow batching rules; the fused kernels of attention have none.
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            return self._gradients(*inputs)

    def _gradients(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        trainable, carried = len(self._trainable), len(self._trainable) + len(self._carried)
        batch, weights = inputs[carried:-1], inputs[-1]
        others = dict(zip(self._carried, inputs[trainable:carried], strict=True))
        for name, constant in self._constants.items():
            others[name] = constant.expand(len(weights), *constant.shape)
        if self._nested:
            # Takes recurrent layers to pieces that have batching rules, and costs half as much again.
            x = dict(zip(self._trainable, inputs[:trainable], strict=True))
            with torch.backends.mkldnn.flags(enabled=False) if self._without_onednn else nullcontext():
                return tuple(vmap(grad(self._weighted))(x, others, batch, weights).values())
        x = {name: t.detach().requires_grad_() for name, t in zip(self._trainable, inputs, strict=False)}
        losses = vmap(self._losses)(x, others, batch)
        return torch.autograd.grad(losses, tuple(x.values()), weights, allow_unused=True, materialize_grads=True)

    def _losses(self, x: dict[str, Tensor], others: dict[str, Tensor], batch: Sequence[Tensor]) -> Tensor:
        losses: Tensor = functional_call(self._objective, {**x, **others}, tuple(batch))
        check_losses(losses, len(batch[0]))
        return losses

    def _weighted(
        self, x: dict[str, Tensor], others: dict[str, Tensor], batch: Sequence[Tensor], weights: Tensor
    ) -> Tensor:
        return (self._losses(x, others, batch) * weights).sum()


class _Objective(Module):
    def __init__(self, module: Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.module, *batch)
