"""Local training's settings, and its optimisers on lists of tensors: one client's, or many clients' stacked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Literal

from fedasync.core.bounds import check_choice, check_integer, check_real

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Tensors = list[Tensor] | tuple[Tensor, ...]

Optimizer = Literal["sgd", "adam"]


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """What a client does with its data: ``epochs`` passes over it in mini-batches.

    With ``steps`` it makes that many optimiser steps instead, beginning a new pass whenever one ends.
    ``optimizer``, ``momentum`` (of SGD, without dampening), ``weight_decay`` (an L2 term in the gradient of the
    trainable parameters), ``betas`` and ``epsilon`` (of Adam) mean what they mean in ``torch.optim.SGD`` and
    ``torch.optim.Adam``; the optimiser's state is fresh at the start of each task. ``device`` is where training
    computes: a torch device such as "cpu" or "cuda:0", or "auto" for CUDA where there is one and the CPU elsewhere.
    """

    epochs: int = 1
    batch_size: int = 10
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: Optimizer = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    device: str = "auto"
    steps: int | None = None

    def __post_init__(self) -> None:
        check_integer("LocalTraining: epochs", self.epochs, 1)
        check_integer("LocalTraining: batch_size", self.batch_size, 1)
        if self.steps is not None:
            check_integer("LocalTraining: steps", self.steps, 1)
        check_real("LocalTraining: learning_rate", self.learning_rate, 0, above=True)
        check_real("LocalTraining: momentum", self.momentum, 0, 1, below=True)
        check_real("LocalTraining: weight_decay", self.weight_decay, 0)
        check_choice("LocalTraining: optimizer", self.optimizer, Optimizer)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ValueError(f"LocalTraining: betas must be two numbers, got {self.betas!r}")
        for i, beta in enumerate(self.betas):
            check_real(f"LocalTraining: betas[{i}]", beta, 0, 1, below=True)
        check_real("LocalTraining: epsilon", self.epsilon, 0, above=True)
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(
                f"LocalTraining: momentum is SGD's and must be 0 with optimizer 'adam', got {self.momentum}"
            )

    def step_size_sum(self, steps: int) -> float | None:
        """How far ``steps`` steps along a gradient of constant 1 move a parameter; None for Adam, which scales it.

        η·‖a‖₁ of FedNova (Wang et al. 2020, section 4): η·steps, and with momentum ρ
        η·(steps − ρ(1 − ρ^steps)/(1 − ρ))/(1 − ρ). Weight decay is not part of it.
        """
        if self.optimizer == "adam":
            return None
        rho = self.momentum
        if rho:
            return self.learning_rate * (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return self.learning_rate * steps


def training_device(name: str) -> torch.device:
    """The device that ``LocalTraining.device`` names. Raises ValueError if this machine does not have it."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        one = torch.ones(1, device=name)
        one.item()  # a device that holds no numbers refuses
        return one.device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"LocalTraining: device {name!r} cannot be used here ({str(error).splitlines()[0]});"
            " 'auto' and 'cpu' always can"
        ) from error


@dataclass(slots=True)
class LocalOptimizer:
    """SGD or Adam in place on a list of tensors ``x``.

    Each gradient gains, where given, ``control`` (SCAFFOLD's c − c_i), ``mu``·(x − ``base``) (FedProx) and the
    weight decay. Stacked tensors have one more dimension in front, the same operations for all lanes.
    """

    local: LocalTraining
    x: Tensors
    control: Tensors = ()
    mu: float = 0.0
    base: Tensors = ()
    first: Tensors = ()
    """SGD's velocity, Adam's first moment."""
    second: Tensors = ()
    steps: int = 0

    @classmethod
    def fresh(
        cls, local: LocalTraining, x: Tensors, control: Tensors = (), mu: float = 0.0, base: Tensors = ()
    ) -> LocalOptimizer:
        """At the start of a task; ``base`` is needed if ``mu`` > 0."""
        import torch

        adam = local.optimizer == "adam"
        first = [torch.zeros_like(t) for t in x] if adam or local.momentum else []
        second = [torch.zeros_like(t) for t in x] if adam else []
        return cls(local, x, control, mu, base, first, second)

    def prefix(self, lanes: int) -> LocalOptimizer:
        """The same state for the first ``lanes`` lanes of stacked tensors."""
        x, control, base, first, second = (
            [t[:lanes] for t in tensors] for tensors in (self.x, self.control, self.base, self.first, self.second)
        )
        return replace(self, x=x, control=control, base=base, first=first, second=second)

    def step(self, gradient: Tensors) -> None:
        """One step along ``gradient``, which is only read: its tensors may share memory or be broadcast."""
        import torch

        g = gradient
        if self.control:
            g = torch._foreach_add(g, self.control)
        if self.mu:
            g = torch._foreach_add(g, torch._foreach_sub(self.x, self.base), alpha=self.mu)
        if self.local.weight_decay:
            g = torch._foreach_add(g, self.x, alpha=self.local.weight_decay)
        self.steps += 1
        if self.local.optimizer == "adam":
            self._adam(g)
            return
        if self.local.momentum:
            torch._foreach_mul_(self.first, self.local.momentum)
            torch._foreach_add_(self.first, g)
            g = self.first
        torch._foreach_add_(self.x, g, alpha=-self.local.learning_rate)

    def _adam(self, gradient: Tensors) -> None:
        """Kingma and Ba 2015, algorithm 1, with the bias corrections where ``torch.optim.Adam`` has them."""
        import torch

        one, two = self.local.betas
        torch._foreach_lerp_(self.first, gradient, 1 - one)
        torch._foreach_mul_(self.second, two)
        torch._foreach_addcmul_(self.second, gradient, gradient, 1 - two)
        scale = torch._foreach_sqrt(self.second)
        torch._foreach_div_(scale, sqrt(1 - two**self.steps))
        torch._foreach_add_(scale, self.local.epsilon)
        rate = self.local.learning_rate / (1 - one**self.steps)
        torch._foreach_addcdiv_(self.x, self.first, scale, -rate)
