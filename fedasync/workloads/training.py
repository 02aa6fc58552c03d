"""Local training of any torch module, one client at a time, on one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from fedasync.aggregation.model import Contribution, Model
from fedasync.workloads.optimizer import LocalOptimizer, LocalTraining
from fedasync.workloads.order import generator_seed, orders
from fedasync.workloads.protocol import Task
from fedasync.workloads.schedule import steps_and_passes

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


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


class Descent(Protocol):
    """How the batches of a task become optimiser steps."""

    def __call__(self, trainer: ModuleTrainer, batches: Iterable[Sequence[Tensor]], optimizer: LocalOptimizer) -> None:
        """Make one step along the mean loss of each batch, whose samples are ``trainer.losses``.

        Every backward pass adds to ``trainer.gradient``, which is zeroed before a batch and given to the optimiser.
        """
        ...


def in_one_pass(trainer: ModuleTrainer, batches: Iterable[Sequence[Tensor]], optimizer: LocalOptimizer) -> None:
    """The plain ``Descent``: each batch goes through the module at once."""
    for batch in batches:
        trainer.gradient.zero_()
        trainer.losses(batch).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step([trainer.gradient])


class ModuleTrainer:
    """A module bound to one flat vector, so that an optimiser's step is a few flat operations in place.

    Every parameter and floating buffer of the module is a view into one vector, every integer buffer into
    another, every gradient into a third. ``loss(module, *batch)`` returns the loss of each sample of a batch, [B];
    their mean is what is descended.

    The module is taken over, to ``device``: change neither its tensors' storage nor their ``grad`` from outside.
    One trainer serves one thread.
    """

    def __init__(
        self, module: Module, loss: Callable[..., Tensor], device: torch.device | Literal["cpu"] = "cpu"
    ) -> None:
        import torch

        self.module = module.to(device)
        self.loss = loss
        self.device = torch.device(device)
        state = module_state(module)
        model = Model.from_tensors(state)
        self.layout = model.layout
        self.trainable = [name for name, tensor in state.items() if tensor.requires_grad]
        """Names of the trainable parameters, which come first in the layout."""
        self._values = model.values
        self._integers = model.integers
        for name, view in model.tensors().items():
            state[name].data = view
        sizes = [state[name].numel() for name in self.trainable]
        self.gradient = torch.zeros(sum(sizes), dtype=self.dtype, device=device)
        """Of the trainable parameters, in one vector: the backward passes add to it."""
        for name, gradient in zip(self.trainable, torch.split(self.gradient, sizes), strict=True):
            state[name].grad = gradient.view(state[name].shape)
        self._buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in state]

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    def check(self, model: Model) -> None:
        """Raise ValueError if a version's layout or dtype is not the module's."""
        if model.layout is not self.layout and model.layout != self.layout:
            raise ValueError(
                f"the model's layout ({len(model.layout.entries)} tensors, {model.layout.parameters} parameters)"
                f" is not that of module {type(self.module).__name__}"
                f" ({len(self.layout.entries)} tensors, {self.layout.parameters} parameters)"
            )
        if model.values.dtype != self.dtype:
            raise ValueError(f"the model's values must be {self.dtype}, got {model.values.dtype}")
        if self._integers is not None and model.integers is None:
            raise ValueError(f"the model lacks the {len(self._integers)} integers of its layout")

    def check_control(self, control: Tensor) -> None:
        """Raise ValueError if a control variate is not a vector like the model's."""
        if control.shape != self._values.shape or control.dtype != self.dtype:
            raise ValueError(
                f"task.control must be {self.dtype} of shape {list(self._values.shape)}, as the model's values,"
                f" got {control.dtype} of shape {list(control.shape)}"
            )

    def load(self, model: Model) -> None:
        """Copy a version into the module. Raises ValueError if it does not fit."""
        self.check(model)
        self._values.copy_(model.values.detach())
        if self._integers is not None and model.integers is not None:
            self._integers.copy_(model.integers)

    def losses(self, batch: Sequence[Tensor]) -> Tensor:
        """The loss of each sample of a batch, [B]. Raises ValueError if it is not one number per sample."""
        losses = self.loss(self.module, *batch)
        check_losses(losses, len(batch[0]))
        return losses

    def train(
        self, task: Task, data: Sequence[Tensor], local: LocalTraining, descend: Descent = in_one_pass
    ) -> Contribution:
        """Train from ``task.model``, which is only read, on ``data``: tensors of n samples each, n ≥ 1.

        Each epoch passes over the samples in a new order; its last batch may be short. With μ = ``proximal_mu``
        > 0 the gradient of every batch gains μ(x − w_base), the term of FedProx (Li et al. 2020, "Federated
        Optimization in Heterogeneous Networks", section 3.2), and with ``control`` that vector. The order and
        torch's own generators (dropout) start from ``task.seed``; the global ones are left as they were found.
        ``task.steps`` replaces the number of steps that ``local`` says. ``descend`` makes the steps.

        Returns all parameters and buffers after training, in fresh memory on the CPU. What the module raises
        propagates; ValueError if the loss is not one number per sample.
        """
        if task.steps is not None:
            local = replace(local, steps=task.steps)
        self.load(task.model)
        x = self._values[: len(self.gradient)]
        control = []
        if task.control is not None:
            self.check_control(task.control)
            control.append(task.control.detach()[: len(self.gradient)].to(self.device))
        base = [x.clone()] if task.proximal_mu else []
        optimizer = LocalOptimizer.fresh(local, [x], control, task.proximal_mu, base)
        if not self.module.training:
            self.module.train()
        with _seeded(generator_seed(task.seed), self.device):
            descend(self, _batches(data, local, task.seed), optimizer)
        self._check_buffers()
        integers = None if self._integers is None else self._integers.to("cpu", copy=True)
        moved = local.step_size_sum(optimizer.steps)
        return Contribution(self._values.to("cpu", copy=True), "parameters", len(data[0]), integers, moved)

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


def check_losses(losses: Tensor, samples: int) -> None:
    """Raise ValueError unless ``losses`` is one number for each sample of a batch."""
    if tuple(losses.shape) != (samples,):
        raise ValueError(
            f"the loss must be one number per sample, shape [{samples}], got {list(losses.shape)}:"
            " leave it unreduced (reduction='none')"
        )


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators of the CPU and of ``device`` started from ``seed``, and put back afterwards."""
    import torch

    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else ()):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _batches(data: Sequence[Tensor], local: LocalTraining, seed: int) -> Iterator[Sequence[Tensor]]:
    """The batches of all passes, each pass in a new order; a batch of everything needs none."""
    import torch

    samples = np.array([len(data[0])])
    ((steps,), (passes,)) = steps_and_passes(samples, local)
    if samples[0] <= local.batch_size:
        yield from repeat(data, int(steps))
        return
    order = torch.from_numpy(orders(np.array([seed], dtype=np.uint64), int(passes), samples)[0]).to(data[0].device)
    batches = (zip(*(torch.split(tensor[rows], local.batch_size) for tensor in data), strict=True) for rows in order)
    yield from islice(chain.from_iterable(batches), int(steps))
