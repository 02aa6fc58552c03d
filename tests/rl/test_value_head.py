"""A critic for language: what it says of each state, that it learns, and that whoever only generates is unmoved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedasync.rl.batch import answers_of
from fedasync.rl.engines import prompt_tokens
from fedasync.rl.learner import Learner
from fedasync.rl.models import Gpt2, Llama
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser, choose_trainable
from fedasync.rl.policy import weights_of
from fedasync.rl.tasks import Reverse
from fedasync.rl.value_head import NAME, add_value_head, is_of_value_head

from . import tiny
from .tiny import groups, llama, problem

torch.set_num_threads(1)
GAE = Objective(advantages="gae")


def with_critic(**options: Any) -> Any:
    """A tiny Llama whose critic says something."""
    policy = llama(**options)
    add_value_head(policy.module)
    torch.nn.init.normal_(policy.module.value_head.weight, generator=torch.Generator().manual_seed(4))
    torch.nn.init.constant_(policy.module.value_head.bias, 0.5)
    return policy


def test_the_value_before_a_token_is_that_of_the_prefix() -> None:
    """V_t = w · h(tokens before t) + b, one prefix after the other; 0 before the first."""
    policy = with_critic(dtype=torch.float64)
    found = [each for group in groups(3) for each in group.trajectories]
    batch = answers_of(found, policy.pad_token, dtype=torch.float64).rows(range(len(found)))
    values = policy.score(policy.module, batch, 0.7).values
    assert values.shape == (len(found), batch.tokens.shape[1] + 1)
    assert not values[:, 0].any()
    for row, each in enumerate(found):
        for t in range(1, len(each) + 1):
            with torch.no_grad():
                hidden = policy.module.model(torch.tensor(each.tokens[:t])[None]).last_hidden_state[0, -1]
            expected = policy.module.value_head.weight[0] @ hidden + policy.module.value_head.bias[0]
            assert float(values[row, t]) == pytest.approx(float(expected), rel=1e-9)


def test_log_probabilities_and_entropies_are_those_of_the_model_without_it() -> None:
    bare, policy = llama(), with_critic()
    batch = answers_of([each for group in groups(3) for each in group.trajectories], 0).rows(range(16))
    with torch.no_grad():
        one, other = (each.score(each.module, batch, 1.0) for each in (bare, policy))
    assert one.values is None
    assert torch.equal(one.log_probs, other.log_probs)
    assert torch.equal(one.entropy, other.entropy)


def test_it_learns_what_answers_are_worth() -> None:
    """Answers that always earn 1, whatever is said."""
    subject = problem(policy=tiny.Llama(critic=True), objective=GAE, optimiser=Optimiser(1e-2, epochs=2))
    learner = Learner(subject, 0)
    found = groups(0, reward=1.0)
    for _ in range(25):
        learner.train(found)
    batch = answers_of([each for group in found for each in group.trajectories], 0).rows(range(16))
    values = learner.policy.score(learner.policy.module, batch, 1.0).values
    assert values is not None
    assert (values[:, :-1][batch.generated] - 1).abs().max() < 0.25
    assert learner.train(found)["value_mean"] == pytest.approx(1, abs=0.2)


def test_at_zero_it_gives_the_advantages_of_no_critic() -> None:
    """The first version's policy step is that of GAE without values; the head itself moves."""
    step = Optimiser(learning_rate=0.1, kind="sgd", clip_norm="none")
    bare = Learner(problem(objective=GAE, optimiser=step), 0)
    learner = Learner(problem(policy=tiny.Llama(critic=True), objective=GAE, optimiser=step), 0)
    bare.train(groups(1))
    learner.train(groups(1))
    moved = learner.weights()
    for name, each in bare.weights().items():
        torch.testing.assert_close(moved[name], each)
    assert moved[f"{NAME}.weight"].any()


@pytest.mark.parametrize("spec", [Gpt2(16, 1, 2, critic=True), Llama(16, 1, 2, critic=True)])
def test_every_process_makes_the_same_one(spec: Any) -> None:
    task = Reverse(3, 4)
    one, other = (weights_of(spec.make(task, 5).module) for _ in range(2))
    assert {name for name in one if is_of_value_head(name)} == {f"{NAME}.weight", f"{NAME}.bias"}
    assert all(torch.equal(each, other[name]) for name, each in one.items())
    plain = replace(spec, critic=False).make(task, 5)
    assert all(torch.equal(each, one[name]) for name, each in weights_of(plain.module).items())
    assert prompt_tokens(spec.make(task, 5), task, 0) == prompt_tokens(plain, task, 0)


def test_it_is_trained_with_the_last_blocks() -> None:
    module = with_critic(layers=3).module
    choose_trainable(module, 1)
    assert all(each.requires_grad for each in module.value_head.parameters())
    assert not module.get_input_embeddings().weight.requires_grad


def test_micro_batches_and_a_restore_change_nothing(tmp_path: Any) -> None:
    subject = problem(
        policy=tiny.Llama(1, torch.float64, critic=True),
        objective=replace(GAE, value_clip=0.2, normalise="batch"),
        optimiser=Optimiser(1e-2, minibatches=2, epochs=2),
    )
    whole = Learner(subject, 0)
    cut = Learner(replace(subject, optimiser=replace(subject.optimiser, microbatch_tokens=30)), 0)
    for seed in range(2):
        told = whole.train(groups(seed))
        assert cut.train(groups(seed)) == pytest.approx(told, rel=1e-6, abs=1e-9)
    whole.save(tmp_path / "saved")
    again = Learner(subject, 0)
    again.restore(tmp_path / "saved")
    assert again.train(groups(7)) == whole.train(groups(7))
    assert np.isfinite(list(told.values())).all()
