"""The most likely answers to what was held out, and what they earn."""

from __future__ import annotations

from typing import Any

import pytest

from fedasync.rl.evaluation import evaluate
from fedasync.rl.sampling import Sampling

from .talking import Fails, Talks, text_of, with_context
from .test_control_engine import Paths, policy
from .tiny import CHARACTERS, END, llama


@pytest.mark.parametrize("max_running", [1, 4])
def test_rewards_are_those_of_the_policy_s_greedy_answers(max_running: int) -> None:
    environment, made = Talks(), llama()
    found = evaluate(made, environment, Sampling(6, temperature=3.0), 99, max_running=max_running)
    wanted = made.greedy(made.module, Talks(), range(6), 6)
    texts = ["".join(CHARACTERS[t] for t in each.tokens[each.generated_from :] if t != END) for each in wanted]
    assert sorted(talk.heard[0] for talk in environment.begun) == sorted(texts)
    assert {talk.prompt for talk in environment.begun} == {text_of(100 + prompt) for prompt in range(6)}, "held out"
    assert found == {
        "reward": pytest.approx(sum(map(len, texts)) / 6),
        "exact": sum(len(text) >= 1 for text in texts) / 6,
    }


def test_at_most_so_many_prompts() -> None:
    environment = Talks()
    evaluate(llama(), environment, Sampling(6), 2)
    assert len(environment.begun) == 2


def test_failures_are_told_and_enter_nothing() -> None:
    """One prompt's environment is at fault and two prompts are too long; a failure is no reward of 0."""
    found = evaluate(with_context(llama(), 3), Fails(None, frozenset({0})), Sampling(6), 4)
    assert found["failed"] == 0.75
    assert found["reward"] > 0
    with pytest.raises(ValueError, match="all 4 held-out prompts failed, the first with: environment returned None"):
        evaluate(llama(), Fails(None, frozenset(range(4))), Sampling(6), 4)
    with pytest.raises(ValueError, match="holds no prompts out"):
        evaluate(llama(), Talks(held_out=0), Sampling(6), 4)


def test_control_tells_the_mean_return() -> None:
    made = policy()
    found = evaluate(made, Paths(), Sampling(50), 4)
    returns = []
    for prompt, answer in enumerate(made.greedy(made.module, Paths(), range(4), 50)):
        seen: Any = answer.observations
        assert len(answer.tokens) == min(3 + prompt, 5)
        returns.append(seen[1:, 0].sum())
    assert found == {"reward": pytest.approx(sum(returns) / 4, abs=1e-5)}
