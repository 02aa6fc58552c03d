from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.batch import answers_of
from fedasync.rl.control_policy import ActorCritic, ControlPolicy
from fedasync.rl.optimiser import Optimiser, choose_trainable
from fedasync.rl.policy import Policy, load_weights, weights_of

from .tiny import ACTIONS, END, OBSERVATION, Letters, Walk, llama, trajectory

torch.set_num_threads(1)
DOUBLE = torch.float64


@pytest.fixture(scope="module")
def policies() -> dict[bool, Policy]:
    control = ControlPolicy(ActorCritic(OBSERVATION, ACTIONS, (16,)).double())
    return {False: llama(dtype=DOUBLE), True: control}


def hand_made(policy: Any, tokens: list[int], temperature: float) -> tuple[list[float], list[float]]:
    """log softmax and entropy, one prefix after the other."""
    log_probs, entropies = [], []
    for at in range(1, len(tokens)):
        with torch.no_grad():
            logits = policy.module(torch.tensor([tokens[:at]])).logits[0, -1].double() / temperature
        p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum()
        log_probs.append(float(np.log(p[tokens[at]])))
        entropies.append(float(-(p * np.log(p)).sum()))
    return log_probs, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_the_log_softmax_of_all_before(temperature: float) -> None:
    policy = llama(dtype=DOUBLE)
    own = trajectory(np.random.default_rng(3), prompt=2, answer=6)
    scores = policy.score(policy.module, answers_of([own], 0, dtype=DOUBLE).rows([0]), temperature)
    log_probs, entropies = hand_made(policy, own.tokens.tolist(), temperature)
    at = np.flatnonzero(own.generated)
    np.testing.assert_allclose(scores.log_probs[0, at].detach(), np.array(log_probs)[at - 1], rtol=1e-10)
    np.testing.assert_allclose(scores.entropy[0, at].detach(), np.array(entropies)[at - 1], rtol=1e-10)
    assert scores.log_probs[0, ~own.generated].eq(0).all()
    assert scores.values is None


def test_a_control_policy_scores_observations() -> None:
    policy = ControlPolicy(ActorCritic(OBSERVATION, ACTIONS, (16, 16), seed=4).double())
    own = trajectory(np.random.default_rng(3), answer=5, control=True)
    scores = policy.score(policy.module, answers_of([own], 0, dtype=DOUBLE).rows([0]), 0.5)
    assert scores.values is not None
    assert scores.values.shape == (1, 6)
    for t, (seen, action) in enumerate(zip(own.observations, own.tokens, strict=False)):
        logits, value, _ = policy.module(torch.tensor(seen, dtype=DOUBLE))
        torch.testing.assert_close(scores.log_probs[0, t], torch.log_softmax(logits / 0.5, -1)[action])
        torch.testing.assert_close(scores.values[0, t], value)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), count=st.integers(2, 5), control=st.booleans(), pad=st.integers(0, ACTIONS - 1))
def test_what_fills_a_row_changes_nothing(
    policies: dict[bool, Policy], seed: int, count: int, control: bool, pad: int
) -> None:
    """Alone or beside others, whatever the pad token is."""
    policy, rng = policies[control], np.random.default_rng(seed)
    answers = answers_of([trajectory(rng, control=control) for _ in range(count)], pad, dtype=DOUBLE)
    together = policy.score(policy.module, answers.rows(range(count)), 1.0)
    for row in range(count):
        alone = policy.score(policy.module, answers.rows([row]), 1.0)
        length = alone.log_probs.shape[1]
        torch.testing.assert_close(together.log_probs[row, :length], alone.log_probs[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(together.entropy[row, :length], alone.entropy[0], rtol=1e-9, atol=1e-12)
        assert together.log_probs[row, length:].eq(0).all()
        if together.values is not None and alone.values is not None:
            torch.testing.assert_close(together.values[row, : length + 1], alone.values[0])


@pytest.mark.parametrize("control", [False, True])
def test_tokens_that_were_not_generated_have_no_gradient(policies: dict[bool, Policy], control: bool) -> None:
    """And what comes after the last generated token is not looked at: other tokens there, the same gradient."""
    policy, rng = policies[control], np.random.default_rng(1)
    own = trajectory(rng, prompt=3, answer=4, control=control)
    batch = answers_of([own], 0, dtype=DOUBLE).rows([0])
    mask = torch.zeros_like(batch.generated)
    mask[0, [1, 3]] = True
    batch = batch._replace(generated=mask)

    def gradient(tokens: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        scores = policy.score(policy.module, batch._replace(tokens=tokens), 1.0)
        found = torch.autograd.grad((scores.log_probs * weight).sum(), policy.module.parameters(), allow_unused=True)
        return [each for each in found if each is not None]

    if not control:
        batch = batch._replace(generated=mask.index_fill(1, torch.tensor([0]), False))
    other = batch.tokens.clone()
    other[0, 4:] = (other[0, 4:] + 1) % ACTIONS
    weight = torch.ones_like(batch.behaviour)
    for one, same in zip(gradient(batch.tokens, weight), gradient(other, weight), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-9, atol=1e-12)
    assert all(each.eq(0).all() for each in gradient(batch.tokens, weight * ~batch.generated))
    assert any(each.ne(0).any() for each in gradient(batch.tokens, weight))


def test_states_are_those_before_the_generated_tokens() -> None:
    policy, rng = llama(dtype=DOUBLE), np.random.default_rng(2)
    trajectories = [trajectory(rng) for _ in range(4)]
    batch = answers_of(trajectories, 0, dtype=DOUBLE).rows(range(4))
    with torch.no_grad():
        states = policy.states(policy.module, batch)
        torch.testing.assert_close(
            torch.log_softmax(states.logits, -1).gather(1, batch.tokens[batch.generated][:, None])[:, 0],
            policy.score(policy.module, batch, 1.0).log_probs[batch.generated],
        )
        torch.testing.assert_close(states.features @ policy.module.lm_head.weight.T, states.logits)


def test_greedy_answers_are_the_most_likely_tokens_up_to_the_end_token() -> None:
    policy = llama(5)
    for answer, prompt in zip(policy.greedy(policy.module, Letters(), range(5), 6), range(5), strict=True):
        told = policy.encode_prompt(Letters().start(prompt).prompt)
        tokens = list(told)
        while len(tokens) < len(told) + 6 and tokens[-1] != END:
            with torch.no_grad():
                tokens.append(int(policy.module(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert (answer.tokens.tolist(), answer.generated_from) == (tokens, len(told))


def test_greedy_episodes_follow_the_largest_logit() -> None:
    policy = ControlPolicy(ActorCritic(OBSERVATION, ACTIONS, (16,), seed=1))
    for answer in policy.greedy(policy.module, Walk(), range(3), 10):
        assert answer.observations is not None
        assert (len(answer.tokens), answer.observations.shape) == (4, (5, OBSERVATION))
        logits = policy.module(torch.tensor(answer.observations[:-1]))[0]
        assert logits.argmax(1).tolist() == answer.tokens.tolist()


def test_an_answer_without_a_prompt_is_refused() -> None:
    policy = llama()
    own = trajectory(np.random.default_rng(0), prompt=0, answer=3)
    with pytest.raises(ValueError, match="first token was generated"):
        policy.score(policy.module, answers_of([own], 0).rows([0]), 1.0)


def test_weights_go_in_as_they_came_out() -> None:
    one, other = llama(0), llama(1)
    tensors = {name: each.clone() for name, each in weights_of(one.module).items()}
    load_weights(other.module, tensors)
    assert all(torch.equal(each, tensors[name]) for name, each in weights_of(other.module).items())
    with pytest.raises(ValueError, match=r"'x' is not of this policy"):
        load_weights(one.module, {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is \[1\], and this policy's \[32\]"):
        load_weights(one.module, {"model.norm.weight": torch.zeros(1)})


def test_weights_of_control_are_a_function_of_the_seed() -> None:
    torch.manual_seed(0)
    one = weights_of(ActorCritic(3, 2, (8,), seed=3))
    torch.manual_seed(1)
    same, other = weights_of(ActorCritic(3, 2, (8,), seed=3)), weights_of(ActorCritic(3, 2, (8,), seed=4))
    assert all(torch.equal(each, same[name]) for name, each in one.items())
    assert not torch.equal(one["choice.weight"], other["choice.weight"])


def test_only_the_last_blocks_and_what_follows_them_are_trained() -> None:
    module = llama(layers=3).module
    choose_trainable(module, 1)
    trained = {name.rsplit(".", 1)[0] for name, each in module.named_parameters() if each.requires_grad}
    assert {name.partition("layers.2")[0] for name in trained} == {"model.", "model.norm"}
    with pytest.raises(ValueError, match=r'trainable must be "all" or an integer ≤ 3 \(blocks\), got 4'):
        choose_trainable(module, 4)


def test_the_learning_rate_climbs_and_stays() -> None:
    optimiser = Optimiser(learning_rate=0.8, warm_up_steps=4)
    assert [optimiser.rate(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert Optimiser(learning_rate=0.8).rate(0) == 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1}, "learning_rate must be a finite number ≥ 0, got -1"),
        ({"kind": "adam"}, "kind must be 'adamw' or 'sgd', got 'adam'"),
        ({"betas": (0.9,)}, r"betas must be two numbers, got \[0.9\]"),
        ({"betas": (0.9, 1.0)}, "betas must be a finite number ≥ 0 and < 1, got 1.0"),
        ({"clip_norm": 0}, "clip_norm must be a finite number > 0, got 0"),
        ({"minibatches": 0}, "minibatches must be an integer ≥ 1, got 0"),
        ({"microbatch_tokens": 0}, "microbatch_tokens must be an integer ≥ 1, got 0"),
        ({"precision": "fp16"}, "precision must be 'no' or 'bf16', got 'fp16'"),
        ({"trainable": "last"}, r"trainable \(where not \"all\"\) must be an integer ≥ 1, got 'last'"),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^optimiser: {message}$"):
        Optimiser(**({"learning_rate": 0.1} | options))


def test_a_gradient_may_be_as_long_as_it_is() -> None:
    assert Optimiser(learning_rate=1.0, clip_norm="none").longest == inf
    assert Optimiser(learning_rate=1.0).longest == 1.0
