"""Small policies, trajectories and problems for tests of the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fedasync.rl.batch import answers_of
from fedasync.rl.control_policy import ActorCritic, ControlPolicy
from fedasync.rl.environment import Reply
from fedasync.rl.language_policy import HuggingFaceTokenizer, LanguagePolicy
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser
from fedasync.rl.policy import Policy
from fedasync.rl.problem import Problem
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Group, Trajectory
from fedasync.rl.value_head import add_value_head

VOCABULARY, OBSERVATION, ACTIONS, END = 12, 3, 4, 1
CHARACTERS = "^$" + "abcdefghij"


class Characters:
    """A tokenizer of ten letters, with end token 1 and no pad token."""

    eos_token_id, pad_token_id, chat_template = END, None, None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [CHARACTERS.index(each) for each in text]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(CHARACTERS[each] for each in tokens)


def llama(seed: int = 0, *, layers: int = 2, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> LanguagePolicy:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = LlamaForCausalLM(config)
        for parameter in module.parameters():  # far from uniform answers
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2 * scale)
    return LanguagePolicy(module.to(dtype).eval(), HuggingFaceTokenizer(Characters()), 64)


@dataclass(frozen=True)
class Llama:
    """A PolicySpec."""

    layers: int = 2
    dtype: torch.dtype = torch.float32
    critic: bool = False

    def make(self, environment: Any, seed: int) -> LanguagePolicy:
        made = llama(seed, layers=self.layers, dtype=self.dtype)
        if self.critic:
            add_value_head(made.module)
        return made


@dataclass(frozen=True)
class Mlp:
    dtype: torch.dtype = torch.float32

    def make(self, environment: Any, seed: int) -> ControlPolicy:
        return ControlPolicy(ActorCritic(OBSERVATION, ACTIONS, (16,), seed).to(self.dtype))


class Letters:
    """Prompts of two to four letters."""

    prompts, held_out = None, 5

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        text = "".join(CHARACTERS[2 + (prompt * 3 + at) % 10] for at in range(2 + prompt % 3))
        return SimpleNamespace(prompt=text, step=lambda text: Reply(1.0))


class Walk:
    """A control task: where the actions of four steps have led."""

    observation_size, actions, prompts, held_out = OBSERVATION, ACTIONS, None, 3

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        at = np.full(OBSERVATION, prompt, np.float32)
        count = 0

        def step(action: int) -> tuple[Any, float, bool, bool]:
            nonlocal at, count
            at, count = at + np.float32(action - 1.5), count + 1
            return at, 1.0, count == 4, False

        return SimpleNamespace(reset=lambda: at, step=step)


def problem(**options: Any) -> Problem:
    """The letters' by default, whose policy is a tiny Llama."""
    usual: dict[str, Any] = {
        "environment": Letters(),
        "policy": Llama(),
        "sampling": Sampling(max_new_tokens=6),
        "objective": Objective(),
        "optimiser": Optimiser(learning_rate=1e-2),
    }
    return Problem(**(usual | options))


def trajectory(
    rng: np.random.Generator,
    *,
    prompt: int | None = None,
    answer: int | None = None,
    version: int = 0,
    control: bool = False,
    reward: float | None = None,
) -> Trajectory:
    """A random one; language answers have text of the environment in their middle now and then."""
    prompt = 0 if control else int(rng.integers(1, 5)) if prompt is None else prompt
    answer = int(rng.integers(1, 8)) if answer is None else answer
    length = prompt + answer
    generated = np.arange(length) >= prompt
    if not control and answer > 3 and rng.random() < 0.5:
        generated[prompt + 1 : prompt + 3] = False
    rewards = np.zeros(length, np.float32)
    rewards[-1:] = rng.random() if reward is None else reward
    return Trajectory(
        rng.integers(0, ACTIONS if control else VOCABULARY, length),
        generated,
        np.where(generated, rng.normal(-1.5, 0.4, length), 0).astype(np.float32),
        np.where(generated, version, -1).astype(np.int32),
        rewards,
        "stop",
        observations=rng.normal(size=(length + 1, OBSERVATION)).astype(np.float32) if control else None,
    )


def groups(seed: int = 0, count: int = 4, answers: int = 4, **options: Any) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        Group(lease, lease, 0, tuple(trajectory(rng, **options) for _ in range(answers)), answers)
        for lease in range(count)
    ]


def on_policy(policy: Policy, found: list[Group], temperature: float = 1.0) -> list[Group]:
    """The same answers, as if this policy had chosen them."""

    def own(each: Trajectory) -> Trajectory:
        dtype = next(policy.module.parameters()).dtype
        batch = answers_of([each], policy.pad_token, dtype=dtype).rows([0])
        with torch.no_grad():
            log_probs = policy.score(policy.module, batch, temperature).log_probs[0]
        return replace(each, log_probs=log_probs.float().numpy())

    return [replace(group, trajectories=tuple(map(own, group.trajectories))) for group in found]
