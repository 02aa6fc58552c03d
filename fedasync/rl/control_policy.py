"""A small actor and critic for tasks of observations and discrete actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedasync.rl.batch import Batch
from fedasync.rl.policy import Answer, Scores, States, upcast

if TYPE_CHECKING:
    from fedasync.rl.environment import ControlEnvironment, Environment


class ActorCritic(nn.Module):
    """Two networks of tanh layers: action logits, and the value of an observation.

    Weights are orthogonal and biases 0, the last layers' gains 0.01 (actor) and 1 (critic), as is usual for PPO
    (Huang et al. 2022, "The 37 implementation details", no. 2); they are a function of the seed alone.
    """

    def __init__(self, observation_size: int, actions: int, hidden: Sequence[int] = (64, 64), seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.actor = _tanh_layers((observation_size, *hidden), generator)
        self.choice = _orthogonal(hidden[-1], actions, 0.01, generator)
        self.critic = _tanh_layers((observation_size, *hidden), generator)
        self.value = _orthogonal(hidden[-1], 1, 1.0, generator)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of observations [..., d]: action logits [..., actions], values [...], and the actor's features."""
        features = self.actor(observations)
        return self.choice(features), self.value(self.critic(observations))[..., 0], features


@dataclass(frozen=True, eq=False)
class ControlPolicy:
    """A module that turns observations [..., d] into (logits, values, features), as an ``ActorCritic`` does."""

    module: nn.Module
    pad_token: int = 0

    def score(self, module: nn.Module, batch: Batch, temperature: float) -> Scores:
        """See ``Policy``: log-probabilities of the actions given the observation before each."""
        logits, values, _ = module(_observations(batch))
        log_probs = torch.log_softmax(upcast(logits[:, :-1]) / temperature, -1)
        chosen = log_probs.gather(-1, batch.tokens[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        nothing = torch.zeros_like(chosen)
        return Scores(chosen.where(batch.generated, nothing), entropy.where(batch.generated, nothing), upcast(values))

    def states(self, module: nn.Module, batch: Batch) -> States:
        """Features are the actor's last hidden layer."""
        logits, _, features = module(_observations(batch)[:, :-1][batch.generated])
        return States(upcast(logits), upcast(features))

    def greedy(
        self,
        module: nn.Module,
        environment: Environment | ControlEnvironment,
        prompts: Sequence[int],
        max_new_tokens: int,
    ) -> list[Answer]:
        """See ``Policy``."""
        weight = next(module.parameters())
        found = []
        for prompt in prompts:
            episode: Any = environment.start(prompt, held_out=True)
            seen, actions = [episode.reset()], []
            for _ in range(max_new_tokens):
                logits = module(torch.as_tensor(seen[-1]).to(weight)[None])[0]
                actions.append(int(logits[0].argmax()))
                observation, _, terminated, truncated = episode.step(actions[-1])
                seen.append(observation)
                if terminated or truncated:
                    break
            found.append(Answer(np.array(actions, np.int64), 0, np.stack(seen).astype(np.float32)))
        return found


def _observations(batch: Batch) -> Tensor:
    if batch.observations is None:
        raise ValueError("policy: a control policy scores observations, and these answers have none")
    return batch.observations


def _tanh_layers(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [_orthogonal(size, following, sqrt(2), generator), nn.Tanh()]
    return nn.Sequential(*layers)


def _orthogonal(size: int, following: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, size, following)  # type: ignore[no-untyped-call]
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
