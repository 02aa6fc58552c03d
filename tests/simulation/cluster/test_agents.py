"""Answers of several turns: statistics as published, the cut at a token budget, tools that are slow or fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.simulation.cluster.agents import PAGE, SEARCH, Tool, Turn, Turns, resolve
from fedasync.simulation.cluster.prompts import Group, Prompts, PromptStream
from fedasync.simulation.laws import Constant, Lognormal, Uniform
from fedasync.studies.errors import StudyError, parse

PLAIN = Tool("plain", latency_s=Constant(1.0), observation_tokens=Constant(100.0))


def groups(turns: Turns | str, count: int, answers: int = 16, seed: int = 0, **more: Any) -> list[Group]:
    stream = PromptStream(Prompts(answers, turns=turns, **more), seed)
    return [stream.group(prompt, 0) for prompt in range(count)]


def trajectories(found: list[Group]) -> list[list[Turn]]:
    return [turns for group in found for turns in group.turns or []]


@pytest.mark.parametrize(
    ("preset", "calls", "tokens"),
    [("v1_start", 1.6, 8_600), ("v1_end", 5.4, 19_000), ("v2_end", 20.0, 60_000), ("base_7b", 5.0, 900)],
)
def test_a_presets_calls_and_tokens_are_those_that_it_was_fitted_to(preset: str, calls: float, tokens: float) -> None:
    """300 groups of 16; answers of a group go together, so the means are good to some 6 %."""
    found = groups(preset, 300)
    assert np.mean([len(turns) - 1 for turns in trajectories(found)]) == pytest.approx(calls, rel=0.12)
    assert np.mean([group.tokens for group in found]) == pytest.approx(tokens, rel=0.1)


def test_half_of_the_log_variance_of_the_number_of_calls_is_the_questions() -> None:
    """Where rounding is too fine to matter."""
    for share in (0.0, 0.5, 1.0):
        turns = Turns(Lognormal(60.0, 0.5), Constant(1.0), (PLAIN,), question_share=share)
        logs = np.log([[len(own) - 1 for own in group.turns or []] for group in groups(turns, 400, answers=4)])
        assert logs.var() == pytest.approx(0.25, rel=0.15)
        between = np.mean([np.cov(logs[:, 0], logs[:, j])[0, 1] for j in (1, 2, 3)])
        assert between / logs.var() == pytest.approx(share, abs=0.12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), most=st.integers(1, 3_000), cap=st.one_of(st.none(), st.integers(1, 6)))
def test_a_token_budget_cuts_an_answer_where_it_is_spent(seed: int, most: int, cap: int | None) -> None:
    turns = Turns(Lognormal(4.0, 0.7), Lognormal(200.0, 0.5), (PLAIN,), most_tool_calls=cap)
    whole, cut = groups(turns, 3, 4, seed), groups(turns, 3, 4, seed, most_tokens=most)
    for group in cut:
        assert group.tokens == [sum(turn.tokens for turn in own) for own in group.turns or []]
    for before, after in zip(trajectories(whole), trajectories(cut), strict=True):
        assert cap is None or len(before) <= cap + 1
        total = sum(turn.tokens for turn in before)
        assert sum(turn.tokens for turn in after) == min(total, most)
        assert after[:-1] == before[: len(after) - 1]
        assert after[-1].tool_s == before[-1].tool_s == 0.0
        assert after[-1].observation_tokens == 0
        assert all(turn.tokens >= 1 for turn in after)
        assert all((turn.tool_s, turn.observation_tokens) == (1.0, 100) for turn in before[:-1])


def test_turns_are_the_same_whoever_asks_in_whatever_order() -> None:
    prompts = Prompts(4, turns="v1_end", count=500)
    stream = PromptStream(prompts, 9)
    for asked in ((400, 1, 0), (3, 0, 2), (3, 0, 0), (400, 1, 0), (3, 0, 2)):
        assert stream.group(*asked) == PromptStream(prompts, 9).group(*asked)
    assert (
        PromptStream(Prompts(2, turns="v1_end", count=500), 9).group(3, 0, 2).turns == stream.group(3, 0, 2).turns[:2]
    )  # type: ignore[index]


def calls_of(tool: Tool, count: int = 200) -> list[Turn]:
    turns = Turns(Constant(50.0), Constant(10.0), (tool,))
    return [turn for own in trajectories(groups(turns, count, answers=1)) for turn in own[:-1]]


def test_a_call_that_is_stuck_or_too_slow_is_given_up_and_brings_nothing() -> None:
    tool = Tool("t", Uniform(0.0, 4.0), Constant(7.0), timeout_s=3.0, stuck_probability=0.2)
    found = calls_of(tool)
    given_up = [turn for turn in found if turn.tool_s == 3.0]
    assert len(given_up) / len(found) == pytest.approx(1 - 0.8 * 0.75, abs=0.02)
    assert {turn.observation_tokens for turn in given_up} == {0}
    assert {turn.observation_tokens for turn in found if turn.tool_s < 3.0} == {7}


def test_a_call_that_fails_is_made_again_after_each_wait_and_in_the_end_brings_nothing() -> None:
    tool = Tool("t", Constant(0.5), Constant(7.0), failure_probability=0.5, retries_s=(1.0, 2.0))
    found = calls_of(tool)
    shares = {seconds: sum(turn.tool_s == seconds for turn in found) / len(found) for seconds in (0.5, 2.0, 4.5)}
    assert shares == {
        0.5: pytest.approx(0.5, abs=0.02),
        2.0: pytest.approx(0.25, abs=0.02),
        4.5: pytest.approx(0.25, abs=0.02),
    }
    assert sum(turn.observation_tokens == 0 for turn in found) / len(found) == pytest.approx(0.125, abs=0.015)
    assert {turn.tool_s for turn in found if turn.observation_tokens == 0} == {4.5}


def test_each_tool_has_its_share_of_the_calls() -> None:
    tools = (Tool("a", Constant(1.0), share=0.7), Tool("b", Constant(2.0), share=0.3))
    turns = Turns(Constant(50.0), Constant(10.0), tools)
    found = [turn.tool_s for own in trajectories(groups(turns, 100, answers=1)) for turn in own[:-1]]
    assert set(found) == {1.0, 2.0}
    assert found.count(1.0) / len(found) == pytest.approx(0.7, abs=0.03)


def test_searching_takes_as_long_as_in_the_load_test() -> None:
    """Its median of 0.64 s, and p95 of 1.35 s."""
    assert SEARCH.latency_s.quantile(0.5) == pytest.approx(0.64)
    assert SEARCH.latency_s.quantile(0.95) == pytest.approx(1.35, rel=0.01)
    assert PAGE.latency_s.quantile(0.5) == pytest.approx(2.0)


WHERE = "study.toml: prompts"


def test_turns_are_a_preset_or_a_table_in_toml() -> None:
    assert parse(Prompts, {"turns": "v2_end"}, WHERE).turns == "v2_end"
    table = {
        "tool_calls": {"kind": "lognormal", "mean": 5, "sigma": 0.7},
        "segment_tokens": {"kind": "constant", "value": 300},
        "tools": [{"name": "search", "latency_s": {"kind": "constant", "value": 1}, "retries_s": [1, 2]}],
        "most_tool_calls": 10,
    }
    wanted = Turns(
        Lognormal(5.0, 0.7), Constant(300.0), (Tool("search", Constant(1.0), retries_s=(1.0, 2.0)),), most_tool_calls=10
    )
    assert parse(Prompts, {"turns": table}, WHERE).turns == wanted
    with pytest.raises(StudyError, match=r"prompts.turns.tool_calls: this key is missing"):
        parse(Prompts, {"turns": {"segment_tokens": table["segment_tokens"]}}, WHERE)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Tool("t", Constant(1.0), stuck_probability=0.1), "tool 't': a call that is stuck would never end"),
        (lambda: Tool("t", Constant(1.0), failure_probability=2.0), "tool 't': failure_probability must be"),
        (lambda: Tool("t", Constant(1.0), retries_s=(-1.0,)), "tool 't': each of retries_s must be"),
        (lambda: Turns(Constant(1.0), Constant(1.0), ()), "turns: tools is empty"),
        (
            lambda: Turns(Constant(1.0), Constant(1.0), (PLAIN, PLAIN)),
            r"shares of the tools must add up to 1, got 1 \+ 1",
        ),
        (lambda: Turns(Constant(1.0), Constant(1.0), question_share=1.5), "turns: question_share must be"),
        (lambda: Turns(Constant(1.0), Constant(1.0), most_tool_calls=0), "turns: most_tool_calls must be"),
        (
            lambda: resolve("v9"),
            "turns: no preset 'v9'; one of v1_start, v1_end, v2_end, base_7b, or a table, would do",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
