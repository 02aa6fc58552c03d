"""What a policy is to the learner: a module, and how likely it finds the tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fedasync.rl.batch import Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fedasync.rl.environment import ControlEnvironment, Environment


class Scores(NamedTuple):
    """Of every token of a batch, with gradient. Only positions that were generated mean anything; others are 0."""

    log_probs: Tensor
    """[N, T]: log-probability of tokens[i, t] given all before it, under the whole distribution at the temperature."""
    entropy: Tensor
    """[N, T]: of that distribution, in nats."""
    values: Tensor | None = None
    """[N, T + 1]: the critic's value of what the policy saw before token t, and last of what it saw at the end."""


class States(NamedTuple):
    """What a policy makes of M states: those before each generated token of a batch, row by row."""

    logits: Tensor
    """[M, choices]"""
    features: Tensor
    """[M, width]: what its last layer reads."""


class Policy(Protocol):
    """A module and how to read it. ``module`` in the methods is that one, or what wraps it (DDP, FSDP)."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def pad_token(self) -> int:
        """What fills rows up; never looked at."""
        ...

    def score(self, module: nn.Module, batch: Batch, temperature: float) -> Scores: ...

    def states(self, module: nn.Module, batch: Batch) -> States:
        """At temperature 1."""
        ...

    def greedy(
        self,
        module: nn.Module,
        environment: Environment | ControlEnvironment,
        prompts: Sequence[int],
        max_new_tokens: int,
    ) -> list[Answer]:
        """The most likely answers to held-out prompts; of an environment of many turns the first turn only."""
        ...


class Answer(NamedTuple):
    """A bare answer: what a Trajectory has but for rewards and versions."""

    tokens: NDArray[np.int64]
    """[T]"""
    generated_from: int
    """The first generated token; all from there on are."""
    observations: NDArray[np.float32] | None = None
    """[T + 1, d], of a control task."""


def weights_of(module: nn.Module, *, trainable_only: bool = False) -> dict[str, Tensor]:
    """Parameters (tied ones once) and kept buffers of a module, by name; the module's own tensors, detached."""
    kept = set(module.state_dict(keep_vars=True))
    named = {
        name: each.detach() for name, each in module.named_parameters() if each.requires_grad or not trainable_only
    }
    return named | {name: each for name, each in module.named_buffers() if name in kept}


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write weights into a module, in place; what ``weights`` does not name stays.

    Raises ValueError, and changes nothing, where a name or a shape is not the module's.
    """
    import torch

    own = weights_of(module)
    for name, tensor in weights.items():
        if name not in own:
            raise ValueError(f"weights: {name!r} is not of this policy, which has {', '.join(sorted(own)[:3])}, …")
        if tensor.shape != own[name].shape:
            raise ValueError(f"weights: {name!r} is {list(tensor.shape)}, and this policy's {list(own[name].shape)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def upcast(tensor: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return tensor if tensor.element_size() >= 4 else tensor.float()
