"""Local training: stochastic gradient descent of any torch module on one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedasync.aggregation.model import Contribution, Model
from fedasync.core.bounds import check_integer, check_real
from fedasync.workloads.protocol import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """What a client does with its data: ``epochs`` passes of mini-batch SGD.

    ``momentum`` (without dampening, velocity zero at the start of each task) and ``weight_decay`` (an L2 term in
    the gradient of the trainable parameters) mean what they mean in ``torch.optim.SGD``.
    """

    epochs: int = 1
    batch_size: int = 10
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_integer("LocalTraining: epochs", self.epochs, 1)
        check_integer("LocalTraining: batch_size", self.batch_size, 1)
        check_real("LocalTraining: learning_rate", self.learning_rate, 0, above=True)
        check_real("LocalTraining: momentum", self.momentum, 0, 1, below=True)
        check_real("LocalTraining: weight_decay", self.weight_decay, 0)


def module_state(module: Module) -> dict[str, Tensor]:
    """The tensors of a module that make up a model, by name: trainable parameters, frozen ones, buffers.

    Trainable ones stand first so that they are one contiguous piece of the flat vector. Tied parameters appear
    once, non-persistent buffers (constants by definition) not at all.
    Raises ValueError for integer buffers that are not int64 and for a module without trainable parameters.
    """
    import torch

    parameters = dict(module.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trainable:
        raise ValueError(f"module {type(module).__name__} has no trainable parameters")
    persistent = module.state_dict(keep_vars=True)
    buffers = {name: b for name, b in module.named_buffers() if name in persistent}
    for name, buffer in buffers.items():
        if not buffer.is_floating_point() and buffer.dtype != torch.int64:
            raise ValueError(
                f"buffer {name!r} has dtype {buffer.dtype}: a model carries int64 and its own float dtype;"
                " register a constant with persistent=False"
            )
    return {**trainable, **parameters, **buffers}


class ModuleTrainer:
    """A module bound to one flat vector, so that an SGD step is a few flat operations in place.

    Every parameter and floating buffer of the module is a view into one vector, every integer buffer into
    another, every gradient into a third. ``loss(module, *batch)`` is the mean loss of a batch.

    The module is taken over: change neither its tensors' storage nor their ``grad`` from outside. Tensors live on
    the CPU. One trainer serves one thread.
    """

    def __init__(self, module: Module, loss: Callable[..., Tensor]) -> None:
        import torch

        self.module = module
        self._loss = loss
        state = module_state(module)
        model = Model.from_tensors(state)
        self.layout = model.layout
        self._values = model.values
        self._integers = model.integers
        for name, view in model.tensors().items():
            state[name].data = view
        trainable = [tensor for tensor in state.values() if tensor.requires_grad]
        sizes = [tensor.numel() for tensor in trainable]
        self._gradient = torch.zeros(sum(sizes), dtype=self.dtype)
        for parameter, gradient in zip(trainable, torch.split(self._gradient, sizes), strict=True):
            parameter.grad = gradient.view(parameter.shape)
        self._buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in state]

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    def load(self, model: Model) -> None:
        """Copy a version into the module. Raises ValueError if its layout or dtype is not the module's."""
        if model.layout is not self.layout and model.layout != self.layout:
            raise ValueError(
                f"the model's layout ({len(model.layout.entries)} tensors, {model.layout.parameters} parameters)"
                f" is not that of module {type(self.module).__name__}"
                f" ({len(self.layout.entries)} tensors, {self.layout.parameters} parameters)"
            )
        if model.values.dtype != self.dtype:
            raise ValueError(f"the model's values must be {self.dtype}, got {model.values.dtype}")
        self._values.copy_(model.values.detach())
        if self._integers is not None:
            if model.integers is None:
                raise ValueError(f"the model lacks the {len(self._integers)} integers of its layout")
            self._integers.copy_(model.integers)

    def train(self, task: Task, data: Sequence[Tensor], local: LocalTraining) -> Contribution:
        """Train from ``task.model``, which is only read, on ``data``: tensors of n samples each, n ≥ 1.

        Each epoch passes over the samples in a new order; its last batch may be short. With μ = ``proximal_mu``
        > 0 the gradient of every batch gains μ(x − w_base), the term of FedProx (Li et al. 2020, "Federated
        Optimization in Heterogeneous Networks", section 3.2). The order and torch's own generator (dropout) start
        from ``task.seed``; the global generators are left as they were found.

        Returns all parameters and buffers after training, in fresh memory. What the module raises propagates.
        """
        import torch

        self.load(task.model)
        # Torch's CPU generator keeps 32 bits of its seed; numpy's mixes all of task.seed.
        rng = np.random.default_rng(task.seed)
        trainable = len(self._gradient)
        step = _sgd(
            self._values[:trainable],
            self._gradient,
            local,
            base=task.model.values.detach()[:trainable],
            proximal_mu=task.proximal_mu,
        )
        if not self.module.training:
            self.module.train()
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(int(rng.integers(2**63)))
            for _ in range(local.epochs):
                for batch in _batches(data, local.batch_size, rng):
                    self._gradient.zero_()
                    self._loss(self.module, *batch).backward()  # type: ignore[no-untyped-call]
                    step()
        self._check_buffers()
        integers = None if self._integers is None else self._integers.clone()
        return Contribution(self._values.clone(), "parameters", len(data[0]), integers)

    def _check_buffers(self) -> None:
        if not self._buffers:
            return
        current = dict(self.module.named_buffers())
        for name, buffer in self._buffers:
            if current.get(name) is not buffer:
                raise ValueError(
                    f"buffer {name!r} of module {type(self.module).__name__} was replaced in training:"
                    " write to it in place (copy_, add_, lerp_)"
                )


def _batches(data: Sequence[Tensor], size: int, rng: np.random.Generator) -> Iterable[Sequence[Tensor]]:
    """One epoch in a new order; a batch of everything needs none."""
    import torch

    if len(data[0]) <= size:
        return (data,)
    order = torch.from_numpy(rng.permutation(len(data[0])))
    return zip(*(torch.split(tensor[order], size) for tensor in data), strict=True)


def _sgd(x: Tensor, gradient: Tensor, local: LocalTraining, base: Tensor, proximal_mu: float) -> Callable[[], None]:
    """One step of SGD on ``x`` [T], in place, from ``gradient`` [T], which it overwrites."""
    import torch

    scratch = torch.empty_like(x) if proximal_mu else x
    velocity = torch.zeros_like(x) if local.momentum else gradient

    def step() -> None:
        if proximal_mu:
            torch.sub(x, base, out=scratch)
            gradient.add_(scratch, alpha=proximal_mu)
        if local.weight_decay:
            gradient.add_(x, alpha=local.weight_decay)
        if local.momentum:
            velocity.mul_(local.momentum).add_(gradient)
        x.add_(velocity, alpha=-local.learning_rate)

    return step
