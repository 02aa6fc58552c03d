from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedasync.rl.divergence import MEASURES, HeldOut, distance
from fedasync.rl.learner import Learner

from .tiny import END, Letters, Llama, Mlp, Walk, groups, llama, problem

torch.set_num_threads(1)


def learners() -> list[tuple[str, Learner]]:
    return [
        ("language", Learner(problem(), 0)),
        ("control", Learner(problem(environment=Walk(), policy=Mlp()), 0)),
    ]


@pytest.mark.parametrize(("kind", "learner"), learners())
def test_the_same_weights_have_not_moved_and_others_have(kind: str, learner: Learner) -> None:
    published = learner.weights()
    assert learner.measure(MEASURES, published) == {
        "kl": 0.0,
        "disagreement": 0.0,
        "feature_cosine": pytest.approx(1.0, abs=1e-12),
        "distance": 0.0,
    }
    last = learner.measure(["kl", "distance"], published)
    for seed in range(3):
        for _ in range(3):
            learner.train(groups(seed, control=kind == "control"))
        told = learner.measure(["kl", "distance"], published)
        assert told["kl"] > last["kl"] or seed
        last = told
    assert last["kl"] > 0
    assert last["distance"] > 0
    assert learner.measure(MEASURES, published)["feature_cosine"] < 1


def test_measures_are_those_of_the_published_policy_s_greedy_answers() -> None:
    """Told again by hand, one prefix after the other."""
    old, new = llama(0), llama(1)
    logits: dict[str, list[Any]] = {"old": [], "new": []}
    for prompt in range(5):
        tokens = old.encode_prompt(Letters().start(prompt).prompt)
        for _ in range(6):
            with torch.no_grad():
                for name, each in (("old", old), ("new", new)):
                    logits[name].append(each.module(torch.tensor([tokens])).logits[0, -1].double().numpy())
            tokens = [*tokens, int(logits["old"][-1].argmax())]
            if tokens[-1] == END:
                break
    one, other = np.array(logits["new"]), np.array(logits["old"])
    p, q = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in (one, other))
    held_out = HeldOut(llama(2), Letters(), 6)
    weights = [{name: each.detach() for name, each in policy.module.named_parameters()} for policy in (new, old)]
    told = held_out.measured(["kl", "disagreement"], *weights)
    assert told["kl"] == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-4)
    assert told["disagreement"] == pytest.approx((one.argmax(1) != other.argmax(1)).mean())


def test_what_was_measured_before_makes_no_difference() -> None:
    """Measures are functions of the two versions, so there is nothing to save."""
    first, second, third = (Learner(problem(), 0) for _ in range(3))
    weights = []
    for seed in range(3):
        weights.append(first.weights())
        first.train(groups(seed))
    told = [first.measure(MEASURES, each) for each in weights]
    assert [first.measure(MEASURES, each) for each in reversed(weights)] == told[::-1]
    second.load_weights(first.weights())
    assert second.measure(MEASURES, weights[1]) == told[1]
    assert third.measure(["distance"], weights[0]) == {"distance": 0.0}


def test_measuring_does_not_touch_what_is_trained() -> None:
    one, other = Learner(problem(), 0), Learner(problem(), 0)
    published = one.weights()
    for seed in range(2):
        assert one.train(groups(seed)) == other.train(groups(seed))
        one.measure(MEASURES, published)
    own = other.weights()
    assert all(torch.equal(each, own[name]) for name, each in one.weights().items())


def test_distance_is_relative() -> None:
    one, zero = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, {"a": torch.zeros(1), "b": torch.zeros(1)}
    assert distance({"a": torch.tensor([3.0]), "b": torch.tensor([5.0])}, one) == pytest.approx(0.2)
    assert distance(zero, one) == 1
    assert distance(zero, zero) == 0
    assert distance(one, zero) == float("inf")
    with pytest.raises(ValueError, match="the same weights"):
        distance(one, {"a": torch.zeros(1)})


def test_what_cannot_be_measured_is_refused() -> None:
    class Alone(Letters):
        held_out = 0

    learner = Learner(problem(environment=Alone(), policy=Llama(1)), 0)
    published = learner.weights()
    with pytest.raises(ValueError, match=r"^measure: a learner measures disagreement, distance, .*, got episodes$"):
        learner.measure(["episodes", "kl"], published)
    with pytest.raises(ValueError, match="this task has none; distance would do"):
        learner.measure(["kl"], published)
    assert learner.measure(["distance"], published) == {"distance": 0.0}
