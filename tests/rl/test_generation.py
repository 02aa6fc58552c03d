"""What an engine records is what its policy thinks, whoever else is there and whenever weights change."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.engine import Request
from fedasync.rl.engines import GenerationError, answers, engine_of, generate, prompt_tokens
from fedasync.rl.episodes import Start, cut
from fedasync.rl.generation import LanguageEngine
from fedasync.rl.language_policy import HuggingFaceTokenizer, LanguagePolicy
from fedasync.rl.policy import load_weights
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Trajectory, packed_trajectories

from .talking import (
    Talks,
    engine,
    finish,
    other_weights,
    requests,
    scores,
    text_of,
    trajectories,
    with_context,
)
from .tiny import CHARACTERS, END, Characters, llama, problem

torch.set_num_threads(1)
DOUBLE = torch.float64
VERSIONS = {version: llama(version, dtype=DOUBLE) for version in range(4)}
WEIGHTS = {version: other_weights(version) for version in range(4)}
PROMPT_OF_8 = 3  # answers to a prompt of four letters


def fresh() -> LanguagePolicy:
    return llama(0, dtype=DOUBLE)


def check_recorded(told: Trajectory, temperature: float = 1.0) -> None:
    """To the last bit of float32, in which log-probabilities are kept."""
    wanted = scores(VERSIONS, told, temperature)
    assert np.abs(told.log_probs - wanted).max() <= 1e-7 * max(1.0, np.abs(wanted).max())


# -- the law ---------------------------------------------------------------------------------------------------

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("load"), st.integers(0, 3)),
        st.tuples(st.just("withdraw"), st.integers(0, 12)),
        st.tuples(st.just("hold"), st.booleans()),
    ),
    min_size=3,
    max_size=10,
)


def played(calls: list[tuple[str, Any]], turns: int, running: int, policy: LanguagePolicy) -> list[Any]:
    made = engine(policy, Talks(turns), max_running=running, sampling=Sampling(8, 1.3))
    found, asked, newest = [], 0, 0
    for what, value in calls:
        if what == "submit":
            made.submit(requests(value, answers=2, first=asked))
            asked += value
        elif what == "step":
            for _ in range(value):
                found += made.step()
        elif what == "load":
            newest = max(newest, value)
            made.load(WEIGHTS[newest], newest)
        elif what == "withdraw":
            made.withdraw([value])
        else:
            made.hold(value)
    made.hold(False)
    return found + finish(made)


@settings(max_examples=12)
@given(CALLS, st.integers(1, 3), st.integers(1, 5))
def test_recorded_log_probs_are_the_scores_of_the_versions_that_chose(
    calls: list[tuple[str, Any]], turns: int, running: int
) -> None:
    """In any order of admission, interruption, withdrawal and holding, in one turn or several."""
    found = played(calls, turns, running, fresh())
    told = trajectories(found)
    assert len(told) == len(found)
    for answer, each in told.items():
        check_recorded(each, 1.3)
        chosen = each.versions[each.generated]
        assert (np.diff(chosen) >= 0).all()
        assert 1 <= len(chosen) <= 8
        prompt = text_of(answer // 2)
        assert each.prompt_tokens == len(prompt)
        assert [CHARACTERS[token] for token in each.tokens[: len(prompt)]] == list(prompt)
        assert (each.log_probs[~each.generated] == 0).all()
        assert (each.tokens[each.generated] == END).sum() <= each.turns
    again = trajectories(played(calls, turns, running, fresh()))
    assert list(again) == list(told), "in the same order"
    assert packed_trajectories(list(again.values())) == packed_trajectories(list(told.values())), "and bits"


def test_what_is_generated_does_not_depend_on_company() -> None:
    together = trajectories(finish_of(requests(12, answers=4), max_running=12))
    few = trajectories(finish_of(requests(12, answers=4)[::-1], max_running=5))
    alone = {i: trajectories(finish_of([request]))[i] for i, request in enumerate(requests(12, answers=4))}
    for answer, each in alone.items():
        for other in (together[answer], few[answer]):
            assert other.tokens.tolist() == each.tokens.tolist()
            assert np.allclose(other.log_probs, each.log_probs, rtol=0, atol=1e-6)
    assert len({tuple(each.tokens) for each in together.values()}) > 6, "and answers of a group differ"


def finish_of(asked: list[Request], **options: Any) -> list[Any]:
    made = engine(fresh(), Talks(2), **options)
    made.submit(asked)
    return finish(made)


def test_float32_agrees_to_1e_4() -> None:
    policy = llama(5)
    made = engine(policy, Talks(2), max_running=6)
    made.submit(requests(16))
    for each in trajectories(finish(made)).values():
        assert np.abs(each.log_probs - scores({0: policy}, each)).max() < 1e-4


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "eager"])
def test_other_models_of_full_attention(family: str) -> None:
    """Learned positions; four query heads to one of keys; attention without a fused kernel. And no warning."""
    policy = LanguagePolicy(causal_model(family).double().eval(), HuggingFaceTokenizer(Characters()), 32)
    made = engine(policy, Talks(3), max_running=4)
    made.submit(requests(10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trajectories(finish(made))
    for each in found.values():
        assert np.abs(each.log_probs - scores({0: policy}, each)).max() < 1e-6


def causal_model(family: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 12,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": None,
    }
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=12, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=END, eos_token_id=END
            )
        )
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=1, max_position_embeddings=32, **sizes))
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=32, attn_implementation="eager", **sizes))


def test_a_model_whose_attention_is_not_full_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    module = MistralForCausalLM(
        MistralConfig(
            vocab_size=12,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            sliding_window=8,
        )
    )
    with pytest.raises(ValueError, match=r"MistralForCausalLM has .*full attention, or a context within it"):
        engine(LanguagePolicy(module, HuggingFaceTokenizer(Characters()), 32), Talks())
    engine(LanguagePolicy(module, HuggingFaceTokenizer(Characters()), 8), Talks())
    with pytest.raises(ValueError, match="takes no position_ids"):
        engine(LanguagePolicy(torch.nn.Linear(2, 2), HuggingFaceTokenizer(Characters()), 8), Talks())


# -- new weights -----------------------------------------------------------------------------------------------


def test_kept_caches_are_an_option_and_show() -> None:
    """With "keep" what later tokens see of earlier ones stays the older version's, and the engine counts it."""

    def interrupted(kv: Any, weights: int) -> tuple[list[int], dict[int, Trajectory]]:
        made = engine(fresh(), Talks(), sampling=Sampling(20), max_running=8)
        made.submit(requests(8))
        for _ in range(3):
            made.step()
        made.load(WEIGHTS[weights], 1, kv)
        stale = [made.stale_tokens]
        found = finish(made)
        return [*stale, made.stale_tokens], trajectories(found)

    stale, kept = interrupted("keep", 1)
    none, anew = interrupted("recompute", 1)
    assert none == [0, 0]
    assert stale[0] > 0 == stale[1]
    for each in anew.values():
        check_recorded(each)
    spanning = [each for each in kept.values() if each.segments == 2]
    assert spanning
    assert any(np.abs(each.log_probs - scores(VERSIONS, each)).max() > 1e-3 for each in spanning)
    same, other = interrupted("keep", 0)[1], interrupted("recompute", 0)[1]
    assert [each.tokens.tolist() for each in same.values()] == [each.tokens.tolist() for each in other.values()]


def test_diverged_weights_are_told_and_good_ones_help() -> None:
    made = engine(fresh(), Talks(), max_running=3)
    made.submit(requests(6))
    made.step()
    made.load({name: torch.full_like(each, torch.nan) for name, each in WEIGHTS[1].items()}, 1)
    with pytest.raises(ValueError, match=r"version 1: .*not numbers"):
        made.step()
    made.load(WEIGHTS[2], 2)
    for each in trajectories(finish(made)).values():
        check_recorded(each)
        assert 1 not in each.versions


def test_weights_of_another_model_change_nothing() -> None:
    made = engine(fresh(), Talks())
    with pytest.raises(ValueError, match="not of this policy"):
        made.load({"nonsense": torch.zeros(1)}, 7)
    with pytest.raises(ValueError, match="'recompute' or 'keep'"):
        made.load(WEIGHTS[1], 7, "drop")  # type: ignore[arg-type]
    assert made.version == 0


# -- how answers end -------------------------------------------------------------------------------------------


def biased(token: int, by: float = 60.0) -> LanguagePolicy:
    """A policy that always says one token."""
    policy = fresh()
    inner: Any = policy.module

    def always(module: Any, given: Any, found: Any) -> Any:
        found.logits[..., token] += by
        return found

    inner.register_forward_hook(always)
    return policy


def one(policy: LanguagePolicy, environment: Any, **options: Any) -> Trajectory:
    made = engine(policy, environment, **options)
    made.submit(requests(1))
    return trajectories(finish(made))[0]


def test_an_empty_answer_is_a_legal_one() -> None:
    environment = Talks()
    told = one(biased(END), environment)
    assert (told.generated_tokens, told.finish, told.reward) == (1, "stop", 0.0)
    assert environment.begun[-1].heard == [""]


def test_an_answer_without_end_is_cut_and_still_judged() -> None:
    environment = Talks()
    told = one(biased(4), environment, sampling=Sampling(5))
    assert (told.generated_tokens, told.finish, told.reward) == (5, "length", 5.0)
    assert environment.begun[-1].heard == [CHARACTERS[4] * 5]
    told = one(with_context(biased(4), 4), environment, sampling=Sampling(5))
    assert (len(told), told.generated_tokens, told.finish, told.reward) == (4, 3, "context", 3.0)
    assert one(biased(4), Talks(), sampling=Sampling(1)).finish == "length"
    assert one(biased(END), Talks(), sampling=Sampling(1)).finish == "stop", "an end token in time"


def test_turns() -> None:
    """Prompt 2 of three letters, three turns: each of one end token, "ab" after the first two."""
    made = engine(biased(END), Talks(3))
    made.submit([Request(0, 2, 0, 0)])
    told = trajectories(finish(made))[0]
    assert "".join(CHARACTERS[token] for token in told.tokens) == text_of(2) + "$ab$ab$"
    assert told.generated.tolist() == [False] * 3 + [True, False, False] * 2 + [True]
    assert (told.turns, told.finish, told.segments) == (3, "done", 1)
    check = engine(biased(5), Talks(3), sampling=Sampling(4))
    check.submit([Request(0, 2, 0, 0)])
    assert trajectories(finish(check))[0].turns == 1, "an answer that is cut has no further turn"


def test_a_turn_that_the_context_has_no_room_for_ends_the_answer() -> None:
    made = engine(with_context(biased(END), 7), Talks(3))
    made.submit([Request(0, 2, 0, 0)])
    told = trajectories(finish(made))[0]
    assert (len(told), told.turns, told.finish) == (7, 2, "context")
    empty = engine(biased(END), Talks(3, observation=""))
    empty.submit([Request(0, 2, 0, 0)])
    told = trajectories(finish(empty))[0]
    assert (told.generated_tokens, told.turns) == (3, 3), "an empty observation is one, too"


# -- the queue -------------------------------------------------------------------------------------------------


def test_slots_queue_hold_and_withdrawal() -> None:
    made = engine(biased(4), Talks(), max_running=2)
    assert made.step() == []
    made.submit(requests(5))
    assert (made.running, made.waiting) == (0, 5)
    made.step()
    assert (made.running, made.waiting) == (2, 3)
    made.withdraw([0, 3, 77])
    assert (made.running, made.waiting) == (1, 2)
    made.hold(True)
    made.step()
    assert (made.running, made.waiting) == (1, 2)
    made.hold(False)
    with pytest.raises(ValueError, match="answer 4 is being generated already"):
        made.submit(requests(1, first=4))
    made.submit(requests(1, first=0))
    assert sorted(each.answer for each in finish(made)) == [0, 1, 2, 4]


def test_iterations_tell_what_a_step_took_and_a_group_s_prompt_is_computed_once() -> None:
    made = engine(biased(4), Talks(), max_running=16, sampling=Sampling(3))
    made.submit([Request(i, PROMPT_OF_8, 0, i) for i in range(8)])
    made.step()
    made.submit([Request(8, 4, 0, 0)])
    made.step()
    rows = made.take_iterations()
    assert [each.prefill_tokens for each in rows] == [3, 4], "all of a prompt but its last token"
    assert [each.running for each in rows] == [8, 9]
    assert [each.context_tokens for each in rows] == [8 * 4, 8 * 5 + 5]
    assert all(each.seconds > 0 and each.prefill_s > 0 for each in rows)
    assert made.take_iterations() == []
    found = finish(made)
    assert all(each.start_s <= each.end_s and each.prompt_tokens in (4, 5) for each in found)


def test_prefill_in_parts_is_the_same() -> None:
    def tokens(limit: int) -> list[list[int]]:
        made = engine(fresh(), Talks(3), max_running=12)
        made._model.prefill_tokens = limit
        made.submit(requests(24))
        return [each.tokens.tolist() for each in trajectories(finish(made)).values()]

    assert tokens(1) == tokens(10) == tokens(10_000)


# -- whole answers ---------------------------------------------------------------------------------------------


def test_what_is_kept_of_an_answer_goes_on_as_if_it_had_never_stopped() -> None:
    """After any number of its tokens, in any turn."""
    policy, sampling = fresh(), Sampling(8)
    asked = requests(12)
    whole = generate(policy, [Start(each) for each in asked], 4, Talks(3), sampling, 3)
    for request, told in zip(asked, whole, strict=True):
        cuts = [cut(told, k) for k in range(told.generated_tokens + 1)]
        starts = [Start(request._replace(answer=k), each) for k, each in enumerate(cuts)]
        for again in generate(policy, starts, 4, Talks(3), sampling, 3):
            assert again.tokens.tolist() == told.tokens.tolist()
            assert again.versions.tolist() == told.versions.tolist()
            assert again.rewards.tolist() == told.rewards.tolist()
            assert (again.finish, again.turns) == (told.finish, told.turns)
    with pytest.raises(ValueError, match="does not begin with its prompt"):
        generate(policy, [Start(Request(0, 3, 0, 0), whole[0])], 4, Talks(3), sampling, 3)


def test_what_is_kept_keeps_its_versions_and_the_rest_is_the_present_weights() -> None:
    old, new = fresh(), fresh()
    load_weights(new.module, WEIGHTS[2])
    told = generate(old, [Start(each) for each in requests(8)], 0, Talks(), Sampling(8), 3)
    starts = [Start(request, cut(each, 1)) for request, each in zip(requests(8), told, strict=True)]
    for before, after in zip(told, generate(new, starts, 2, Talks(), Sampling(8), 3), strict=True):
        at = before.prompt_tokens
        assert after.versions[after.generated].tolist() == [0] + [2] * (after.generated_tokens - 1)
        assert after.log_probs[at] == before.log_probs[at]
        check_recorded(after)


def test_whole_answers_are_the_engine_s() -> None:
    made = engine_of(problem(environment=Talks(2)), fresh(), 3, max_running=4)
    assert isinstance(made, LanguageEngine)
    made.submit(requests(9))
    stepwise = trajectories(finish(made))
    at_once = generate(fresh(), [Start(each) for each in requests(9)], 0, Talks(2), Sampling(6), 3)
    assert [each.tokens.tolist() for each in at_once] == [stepwise[i].tokens.tolist() for i in range(9)]
    assert generate(fresh(), [], 0, Talks(), Sampling(6), 3) == []


def test_whole_answers_and_failures() -> None:
    policy = with_context(fresh(), 4)
    found = answers(policy, [Start(each) for each in requests(5)], 0, Talks(), Sampling(6), 3)
    too_long = "prompt too long: {} tokens, and a context of 4 leaves no room for an answer"
    assert [each.failure for each in found] == [None] * 3 + [too_long.format(4), too_long.format(5)]
    assert all(each.own_fault for each in found[3:])
    with pytest.raises(GenerationError, match="answer 4 to prompt 4: prompt too long: 5 tokens"):
        generate(policy, [Start(each) for each in requests(5)[4:]], 0, Talks(), Sampling(6), 3)
    assert prompt_tokens(policy, Talks(), 4) == 5
