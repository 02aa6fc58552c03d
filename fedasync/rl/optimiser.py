"""How a learner steps: the optimiser, its schedule, minibatches and micro-batches, and which weights are trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.rl.value_head import NAME

if TYPE_CHECKING:
    import torch
    from torch import nn

Kind = Literal["adamw", "sgd"]
Precision = Literal["no", "bf16"]


@dataclass(frozen=True)
class Optimiser:
    """``[optimiser]``: what one version's training is made of.

    A version trains on its batch ``epochs`` times, each time in ``minibatches`` parts, with one optimiser step for each
    part. A part goes through the module in micro-batches of at most ``microbatch_tokens`` tokens, prompts included
    (None: all at once); how many there are changes nothing but rounding. ``clip_norm`` bounds the norm of a step's
    gradient. The learning rate climbs linearly over the first ``warm_up_steps`` steps and then stays.

    ``precision`` "bf16": forward passes run under autocast, weights and gradients stay as they are. ``trainable`` k:
    only the last k blocks, what follows them but the output layer, and a critic's head are trained (ours).
    """

    learning_rate: float
    kind: Kind = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    """Of "sgd"."""
    clip_norm: float | Literal["none"] = 1.0
    warm_up_steps: int = 0
    minibatches: int = 1
    epochs: int = 1
    microbatch_tokens: int | None = None
    precision: Precision = "no"
    trainable: Literal["all"] | int = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        check_choice("optimiser: kind", self.kind, Kind)
        check_real("optimiser: learning_rate", self.learning_rate, 0)
        if len(self.betas) != 2:
            raise ValueError(f"optimiser: betas must be two numbers, got {list(self.betas)!r}")
        for beta in self.betas:
            check_real("optimiser: betas", beta, 0, 1, below=True)
        check_real("optimiser: eps", self.eps, 0, above=True)
        check_real("optimiser: weight_decay", self.weight_decay, 0)
        check_real("optimiser: momentum", self.momentum, 0, 1, below=True)
        if self.clip_norm != "none":
            check_real("optimiser: clip_norm", self.clip_norm, 0, above=True)
        check_integer("optimiser: warm_up_steps", self.warm_up_steps, 0)
        check_integer("optimiser: minibatches", self.minibatches, 1)
        check_integer("optimiser: epochs", self.epochs, 1)
        if self.microbatch_tokens is not None:
            check_integer("optimiser: microbatch_tokens", self.microbatch_tokens, 1)
        check_choice("optimiser: precision", self.precision, Precision)
        if self.trainable != "all":
            check_integer('optimiser: trainable (where not "all")', self.trainable, 1)

    @property
    def longest(self) -> float:
        """The most that the norm of a step's gradient may be."""
        return inf if self.clip_norm == "none" else self.clip_norm

    def rate(self, steps: int) -> float:
        """The learning rate of the step that follows ``steps`` steps."""
        return self.learning_rate * min(1.0, (steps + 1) / max(1, self.warm_up_steps))

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser of these parameters."""
        import torch

        if self.kind == "sgd":
            return torch.optim.SGD(
                parameters, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
            )
        return torch.optim.AdamW(
            parameters, lr=self.learning_rate, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay
        )


def choose_trainable(module: nn.Module, trainable: Literal["all"] | int) -> None:
    """Freeze the parameters of a module that ``Optimiser.trainable`` leaves out.

    Blocks are the module's longest list of modules, as in every causal language model. Raises ValueError where there
    are fewer than asked for.
    """
    from torch import nn

    if trainable == "all":
        return
    lists = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.ModuleList)]
    name, blocks = max(lists, key=lambda each: len(each[1]), default=("", nn.ModuleList()))
    if trainable > len(blocks):
        raise ValueError(f'optimiser: trainable must be "all" or an integer ≤ {len(blocks)} (blocks), got {trainable}')
    parent = module.get_submodule(name.rpartition(".")[0])
    children = [each for _, each in parent.named_children()]
    after = (
        children[next(at for at, each in enumerate(children) if each is blocks) + 1 :] if parent is not module else []
    )
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    critic = [each for name, each in module.named_children() if name == NAME]
    for chosen in (*list(blocks)[-trainable:], *after, *critic):
        chosen.requires_grad_(True)
