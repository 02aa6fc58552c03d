"""How far a policy's weights have moved from published ones, on states of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.publication.divergence import action_disagreement, categorical_kl, feature_cosine
from fedasync.rl.batch import Batch, answers_of
from fedasync.rl.policy import Answer, Policy, load_weights
from fedasync.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.environment import ControlEnvironment, Environment
    from fedasync.rl.policy import States

PROMPTS, TOKENS = 16, 32
"""At most so many held-out prompts, and so many tokens of each answer: up to 512 states, as in the Atari scripts."""

_ON_STATES: dict[str, Callable[[States, States], float]] = {
    "kl": lambda new, old: categorical_kl(new.logits, old.logits),
    "disagreement": lambda new, old: action_disagreement(new.logits, old.logits),
    "feature_cosine": lambda new, old: feature_cosine(new.features, old.features),
}
MEASURES = frozenset(_ON_STATES) | {"distance"}
"""See ``publication.divergence``; ``distance`` is ‖new − published‖ / ‖published‖ over all weights."""


class HeldOut:
    """Measures on the states that the published policy meets.

    The states are those of its greedy answers to the first ``PROMPTS`` held-out prompts, of which both versions are
    then asked what they would say (temperature 1). They are a function of the published weights, made when these are
    first compared with and kept as long as they are, so there is nothing to save (ours).
    """

    def __init__(self, policy: Policy, environment: Environment | ControlEnvironment, max_new_tokens: int) -> None:
        """``policy`` is used up: its weights become now these, now those."""
        self._policy = policy
        policy.module.eval()
        self._environment = environment
        self._tokens = min(max_new_tokens, TOKENS)
        self._published: Mapping[str, Tensor] | None = None
        self._batch: Batch | None = None
        self._old: States | None = None

    def measured(
        self, names: Collection[str], current: Mapping[str, Tensor], published: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Raises ValueError for an unknown measure, and for one on states where there are no held-out prompts."""
        if unknown := sorted(set(names) - MEASURES):
            raise ValueError(f"measure: a learner measures {', '.join(sorted(MEASURES))}, got {', '.join(unknown)}")
        found = {"distance": distance(current, published)} if "distance" in names else {}
        if on_states := sorted(set(names) & set(_ON_STATES)):
            new, old = self._states(current, published)
            found |= {name: _ON_STATES[name](new, old) for name in on_states}
        return found

    def _states(self, current: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> tuple[States, States]:
        import torch

        policy, module = self._policy, self._policy.module
        with torch.no_grad():
            if self._batch is None or self._old is None or not _same(self._published, published):
                prompts = range(min(PROMPTS, self._environment.held_out))
                load_weights(module, published)
                answers = policy.greedy(module, self._environment, prompts, self._tokens)
                if not answers:
                    raise ValueError(
                        "measure: kl, disagreement and feature_cosine are measured on held-out prompts, and this task "
                        "has none; distance would do"
                    )
                self._batch = _batch_of(answers, policy)
                self._old = policy.states(module, self._batch)
                self._published = {name: each.clone() for name, each in published.items()}
            load_weights(module, current)
            return policy.states(module, self._batch), self._old


def distance(current: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> float:
    """‖current − published‖ / ‖published‖ over all weights; where published is 0, 0 or infinite.

    Raises ValueError where the two do not have the same names.
    """
    if current.keys() != published.keys():
        raise ValueError("measure: the two versions must have the same weights")
    moved = sum(float((each.double() - published[name].double()).square().sum()) for name, each in current.items())
    norm = sum(float(each.double().square().sum()) for each in published.values())
    return float(np.sqrt(moved / norm)) if norm else (float("inf") if moved else 0.0)


def _same(known: Mapping[str, Tensor] | None, weights: Mapping[str, Tensor]) -> bool:
    import torch

    if known is None or known.keys() != weights.keys():
        return False
    return all(torch.equal(each, weights[name]) for name, each in known.items())


def _batch_of(answers: Sequence[Answer], policy: Policy) -> Batch:
    """Bare answers as a batch on the policy's device."""
    weight = next(policy.module.parameters())
    trajectories = []
    for each in answers:
        generated = np.arange(len(each.tokens)) >= each.generated_from
        zeros = np.zeros(len(generated), np.float32)
        versions = np.where(generated, 0, -1).astype(np.int32)
        trajectories.append(
            Trajectory(each.tokens, generated, zeros, versions, zeros, "stop", observations=each.observations)
        )
    return answers_of(trajectories, policy.pad_token, weight.device, weight.dtype).rows(range(len(trajectories)))
