"""Threads about rollouts that new weights interrupt: which version chose a token, and what is kept of an answer.

The number in a test's name is that of the public thread; docs/threads.md has the table.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedasync.rl.batch import answers_of
from fedasync.rl.engine import Request
from fedasync.rl.engines import generate
from fedasync.rl.environment import Reply
from fedasync.rl.episodes import Start, cut
from fedasync.rl.language_policy import HuggingFaceTokenizer, LanguagePolicy
from fedasync.rl.policy import load_weights
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Trajectory

from ..rl.talking import Talks, engine, finish, other_weights, requests, scores, text_of, trajectories
from ..rl.tiny import CHARACTERS, Characters, llama

torch.set_num_threads(1)
LONG = Sampling(24)
VERSIONS = {version: llama(version, dtype=torch.float64) for version in range(7)}
WEIGHTS = {version: other_weights(version) for version in range(7)}


def of_version(version: int) -> LanguagePolicy:
    policy = llama(0, dtype=torch.float64)
    load_weights(policy.module, WEIGHTS[version])
    return policy


def check_recorded(told: Trajectory) -> None:
    assert np.abs(told.log_probs - scores(VERSIONS, told)).max() < 1e-6


# -- versions --------------------------------------------------------------------------------------------------


def interrupted(partial: bool) -> dict[int, Trajectory]:
    """Versions 2, 4 and 6 come while sixteen answers run."""
    made = engine(of_version(2), Talks(), sampling=LONG, version=2, max_running=16)
    asked = requests(16)
    made.submit(asked)
    found = []
    for version in (4, 6):
        found += [*made.step(), *made.step()]
        running = {each.answer for each in asked} - {each.answer for each in found}
        if not partial:
            made.withdraw(running)
        made.load(WEIGHTS[version], version)
        if not partial:
            made.submit([each for each in asked if each.answer in running])
    return trajectories(found + finish(made))


def test_slime_2092_a_sample_of_versions_2_4_and_6_says_so_token_by_token() -> None:
    """Aborted groups went on with new weights although partial rollouts were off, and nothing corrected for it."""
    on, off = interrupted(partial=True), interrupted(partial=False)
    spans = {tuple(np.unique(each.versions[each.generated]).tolist()) for each in on.values()}
    assert (2, 4, 6) in spans
    for each in on.values():
        check_recorded(each)
        assert each.segments == len(np.unique(each.versions[each.generated]))
    assert len(on) == len(off) == 16
    for each in off.values():
        check_recorded(each)
        assert each.first_version == each.last_version, "and off, no answer has two"


def test_slime_1800_what_is_asked_again_is_the_pristine_prompt() -> None:
    """What an abort left of an answer was put back as a prompt, so that the policy's own tokens passed for given."""
    made = engine(of_version(2), Talks(), sampling=LONG, version=2)
    made.submit(requests(8))
    for _ in range(4):
        made.step()
    assert made.running >= 3
    made.withdraw(range(8))
    made.load(WEIGHTS[5], 5)
    made.submit(requests(8))
    again = trajectories(finish(made))
    never_begun = generate(of_version(5), [Start(each) for each in requests(8)], 5, Talks(), LONG, 3)
    for answer, each in again.items():
        assert each.prompt_tokens == len(text_of(answer))
        assert each.tokens.tolist() == never_begun[answer].tokens.tolist()
        assert each.versions.tolist() == never_begun[answer].versions.tolist()


def test_slime_1781_new_weights_do_not_wait_until_all_have_ended() -> None:
    """Each sync drained the engine first, so that the longest answer kept all others from starting."""
    made = engine(of_version(0), Talks(), sampling=LONG)
    made.submit(requests(12))
    made.step()
    before = made.running
    made.load(WEIGHTS[1], 1)
    assert made.running == before > 0
    told = trajectories(finish(made))
    assert any(each.segments == 2 for each in told.values())


@pytest.mark.parametrize("turns", [1, 3])
def test_slime_1440_after_each_resume_everything_has_the_answer_s_length(turns: int) -> None:
    """A mask of what is off-policy was shorter than the response after a resume, and training crashed (#2207)."""
    asked = requests(6)
    told = generate(of_version(0), [Start(each) for each in asked], 0, Talks(turns), LONG, 3)
    for version in range(1, 7):
        kept = [cut(each, max(1, each.generated_tokens * version // 7)) for each in told]
        starts = [Start(request, each) for request, each in zip(asked, kept, strict=True)]
        told = generate(of_version(version), starts, version, Talks(turns), LONG, 3)
        for before, each in zip(kept, told, strict=True):
            assert before is not None
            assert each.tokens[: len(before)].tolist() == before.tokens.tolist()
            assert each.versions[: len(before)].tolist() == before.versions.tolist()
            columns = (each.tokens, each.generated, each.log_probs, each.versions, each.rewards)
            assert {len(column) for column in columns} == {len(each)}
            assert ((each.versions >= 0) == each.generated).all()
            check_recorded(each)
        batch = answers_of(told, 0).rows(range(6))
        assert batch.generated.sum().item() == sum(each.generated_tokens for each in told)
        assert ((batch.versions >= 0) == batch.generated).all()
    assert max(each.segments for each in told) > 2


class Table(nn.Module):
    """A model to which all contexts are one."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.logits = nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, use_cache: bool, cache: Any) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_an_answer_of_two_versions_is_as_likely_as_each_found_its_own_tokens() -> None:
    """Token 0 of version 3 at 0.5, token 1 of version 4 at 0.25; the trainer finds 0.4 and 0.3.

    Their ratio is 0.96; were token 0 scored again under version 4 (0.45), it would be 1.0667.
    """
    first, second = 2, 3
    third, fourth = [0.125, 0.125, 0.5, 0.25], [0.15, 0.15, 0.45, 0.25]
    policy = LanguagePolicy(Table(third), HuggingFaceTokenizer(Characters()), 16)
    made = engine(policy, Talks(), sampling=Sampling(2), version=3, max_running=99)
    made.submit([Request(index, 0, 0, index) for index in range(99)])
    made.step()
    made.load({"logits": torch.tensor(fourth, dtype=torch.float64).log()}, 4)
    told = next(each for each in trajectories(made.step()).values() if each.tokens[1:].tolist() == [first, second])
    behaviour = np.exp(told.log_probs[1:])
    assert behaviour == pytest.approx([0.5, 0.25])
    assert np.prod(np.array([0.4, 0.3]) / behaviour) == pytest.approx(0.96)
    assert np.prod(np.array([0.4, 0.3]) / [0.45, 0.25]) == pytest.approx(1.0667, abs=1e-4)
    age = 5 - told.versions[told.generated]
    assert (age.max(), age.min(), age.mean(), told.segments) == (2, 1, 1.5, 2)
    assert (told.first_version, told.last_version) == (3, 4)


# -- caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_skyrl_2246_what_begins_after_new_weights_sees_nothing_of_the_old(kv: Any) -> None:
    """A prefix cache outlived its weights, and rollouts mixed in keys and values of up to 17 versions before.

    A group's prompt is computed once for those that begin together, and anew after new weights, whatever becomes of
    those that run (NeMo-RL #4018 as well).
    """
    made = engine(of_version(0), Talks(), max_running=2, sampling=LONG)
    made.submit([Request(index, 3, 0, index) for index in range(6)])
    found = made.step()
    made.load(WEIGHTS[1], 1, kv)
    assert (made.stale_tokens > 0) == (kv == "keep")
    told = trajectories(found + finish(made))
    late = [each for each in told.values() if each.first_version == 1]
    assert len(late) >= 4
    for each in late:
        check_recorded(each)


def test_nemo_rl_4018_keeping_a_cache_is_asked_for_and_told() -> None:
    """A flag to empty the cache was ignored without a word."""
    made = engine(of_version(0), Talks(), sampling=LONG)
    made.submit(requests(6))
    made.step()
    made.load(WEIGHTS[1], 1)
    assert made.stale_tokens == 0, "computed anew unless it is asked for"
    made.step()
    made.load(WEIGHTS[2], 2, "keep")
    stale = made.stale_tokens
    assert stale > 0
    made.load(WEIGHTS[3], 3, "keep")
    assert made.stale_tokens == stale
    made.load(WEIGHTS[4], 4, "recompute")
    assert made.stale_tokens == 0


# -- failures --------------------------------------------------------------------------------------------------


class Flaky(Talks):
    """The reward's service is away when the fourth answer asks."""

    asked = 0

    def start(self, prompt: int, *, held_out: bool = False) -> Any:
        talk = super().start(prompt)
        say = talk.step

        def step(text: str) -> Reply:
            self.asked += 1
            if self.asked == 4:
                raise ConnectionError("503")
            return say(text)

        talk.step = step  # type: ignore[method-assign]
        return talk


def test_miles_2800_one_failure_of_eight_costs_one_answer_and_is_no_reward_of_0() -> None:
    """An abort of one killed its group: at 5 % of failures a third of all groups, 1 − 0.95^8."""
    asked = [Request(index, 4, 0, index) for index in range(8)]
    made = engine(of_version(0), Flaky(), sampling=LONG)
    made.submit(asked)
    found = finish(made)
    (lost,) = (each for each in found if each.trajectory is None)
    assert lost.failure is not None
    assert lost.failure.startswith("environment raised ConnectionError: 503")
    made.submit([each for each in asked if each.answer == lost.answer])
    again = trajectories([each for each in found if each.trajectory is not None] + finish(made))
    whole = generate(of_version(0), [Start(each) for each in asked], 0, Talks(), LONG, 3)
    assert {answer: each.tokens.tolist() for answer, each in again.items()} == {
        answer: each.tokens.tolist() for answer, each in enumerate(whole)
    }, "filled up, the group is what it would have been"
    assert [again[i].reward for i in range(8)] == [each.reward for each in whole]
    assert all(CHARACTERS[token] in text_of(4) for token in whole[0].tokens[: len(text_of(4))])
