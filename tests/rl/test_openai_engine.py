"""An engine on a completions server: what an answer says is what the server drew, whatever happens on the way."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.openai_protocol import Collected, MalformedError, completion_body
from fedasync.rl.openai_settings import OpenAIServer
from fedasync.rl.sampling import Sampling

from .openai_cases import (
    Talk,
    check_chain,
    ends,
    engine,
    finished,
    generate,
    requests,
    trajectory,
    until,
)
from .openai_server import END, MODEL, ChainServer, Characters, Faults, together, told


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("names", ["token_ids", "token_id:", "text"])
def test_an_answer_is_the_tokens_that_were_drawn_with_their_log_probabilities(stream: bool, names: str) -> None:
    dialect = "plain" if names == "text" else "vllm"
    with ChainServer(Faults(names=names)) as server:
        found = [trajectory(each) for each in generate(server, 12, stream=stream, dialect=dialect, temperature=1.5)]
    for each in found:
        check_chain(each, 0.0, 1.5)
        assert each.prompt_tokens == 2
        assert not each.generated[:2].any()
        assert each.finish == ("stop" if ends(each) else "length")
        assert each.generated_tokens <= 12
        assert each.reward == each.generated_tokens - ends(each)
        assert (each.versions[2:] == 0).all()
    assert {each.finish for each in found} == {"stop", "length"}


def test_streamed_or_not_the_same_seeds_give_the_same_answers_on_a_server_that_heeds_them() -> None:
    with ChainServer() as server:
        one, other, third = (generate(server, 6, stream=stream) for stream in (True, False, True))
    assert (
        [each.trajectory for each in one] == [each.trajectory for each in other] == [each.trajectory for each in third]
    )
    assert len({each.trajectory.tokens.tobytes() for each in one if each.trajectory}) > 3


def test_the_server_is_told_all_that_shapes_the_distribution() -> None:
    server, sampling = OpenAIServer("http://x", MODEL), Sampling(7, 0.5, top_k=3, top_p=0.9)
    body = completion_body(server, sampling, (1, 2), [5, 6], 7, 9)
    expected = {
        "prompt": [5, 6],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.0,
        "seed": 9,
    }
    expected |= {"repetition_penalty": 1.0, "stop_token_ids": [1, 2], "logprobs": 1, "return_token_ids": True}
    assert expected.items() <= body.items()
    assert completion_body(server, Sampling(7), (1,), [5], 7, 9)["top_k"] == -1
    plain = completion_body(OpenAIServer("http://x", MODEL, "plain"), Sampling(7), (1,), [5], 7, 9)
    assert not {"min_p", "top_k", "return_token_ids", "stop_token_ids"} & plain.keys()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(2, 9), st.floats(-9, 0)), min_size=1, max_size=8), st.data())
def test_a_stream_says_the_same_however_it_is_cut(drawn: list[tuple[int, float]], data: st.DataObject) -> None:
    names = data.draw(st.sampled_from(["token_ids", "token_id:", "text"]))
    drawn = [*drawn, (END, -0.5)]
    pieces = [told(token, value, {}, at, Faults(names=names)) for at, (token, value) in enumerate(drawn)]
    pieces[-1]["finish_reason"] = "stop"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(pieces) - 1)))) if len(pieces) > 1 else []
    collected = Collected(4)
    for first, last in zip([0, *cuts], [*cuts, len(pieces)], strict=True):
        collected.add({"choices": [together(pieces[first:last])]})
    collected.settle(Characters(), 99, "refuse")
    assert list(zip(collected.tokens, collected.log_probs, strict=True)) == drawn
    assert collected.versions == [4] * len(drawn)


def test_text_that_does_not_come_back_the_same_is_refused() -> None:
    class Merging(Characters):
        def decode(self, tokens: Any) -> str:
            return super().decode(tokens).replace("aa", "a")

    collected = Collected(0)
    collected.add({"choices": [{"text": "baa", "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0] * 3}}]})
    with pytest.raises(MalformedError, match="does not survive encoding and decoding"):
        collected.settle(Merging(), 9, "refuse")


def test_text_of_other_tokens_than_the_server_counts_is_refused() -> None:
    collected = Collected(0)
    collected.add({"choices": [{"text": "bab", "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0] * 2}}]})
    with pytest.raises(MalformedError, match="of 2 tokens by its own count, and the policy's tokenizer makes 3"):
        collected.settle(Characters(), 9, "refuse")


def test_minus_9999_is_no_probability() -> None:
    collected = Collected(0)
    given = {"tokens": ["token_id:3"], "token_logprobs": [-9999.0]}
    collected.add({"choices": [{"text": "", "finish_reason": "length", "logprobs": given}]})
    collected.settle(Characters(), 1, "refuse")
    assert collected.log_probs == [-np.inf]


def test_what_the_environment_says_in_between_is_no_token_of_the_policy() -> None:
    talk = Talk(turns=3, observation="hg")
    with ChainServer(script=lambda prompt: "bcd"[: len(prompt) % 3 + 1]) as server:
        (found,) = generate(server, 1, talk, most=40)
    answer = trajectory(found)
    check_tokens = Characters().decode(answer.tokens)
    assert check_tokens == "aa" + "bcd\3" + "hg" + "bcd\3" + "hg" + "bcd\3"
    assert (answer.finish, answer.turns, answer.segments) == ("done", 3, 1)
    assert [int(at) for at in np.flatnonzero(answer.rewards)] == [5, 11, 17]
    assert not answer.generated[[0, 1, 6, 7, 12, 13]].any()
    assert (answer.versions[~answer.generated] == -1).all()


def test_budget_and_context_end_an_answer_of_many_turns() -> None:
    with ChainServer(script=lambda prompt: "bc") as server:
        (length,) = generate(server, 1, Talk(turns=9), most=7)
        (context,) = generate(server, 1, Talk(turns=9), most=40, context_tokens=14)
        (observed,) = generate(server, 1, Talk(turns=9), most=40, context_tokens=12)
    assert (trajectory(length).finish, trajectory(length).generated_tokens) == ("length", 7)
    assert (trajectory(context).finish, len(trajectory(context))) == ("context", 14)
    assert (trajectory(observed).finish, len(trajectory(observed))) == ("context", 10)


def test_no_more_requests_run_than_may_and_what_is_held_does_not_begin() -> None:
    with ChainServer(Faults(slow_s=0.002)) as server, engine(server, max_running=3) as made:
        made.hold(True)
        made.submit(requests(9))
        assert made.step() == []
        assert (made.running, made.waiting, server.bodies) == (0, 9, [])
        assert made.waits() == ["9 requests wait: held"]
        made.hold(False)
        assert len(finished(made)) == 9
        assert server.peak <= 3


def test_what_is_withdrawn_does_not_come_back() -> None:
    with ChainServer() as server, engine(server, max_running=3) as made:
        server.gate = 0
        made.submit(requests(5))
        until(made, lambda: server.running == 3)
        made.withdraw([0, 3, 77])
        server.gate = None
        assert [each.answer for each in finished(made)] == [1, 2, 4]


def test_the_key_goes_to_the_server_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CHAIN_KEY", "s3cret")
    caplog.set_level(logging.DEBUG)
    fault = Faults(status=500, body='{"error": {"message": "who is {key}?"}}')
    with ChainServer(fault) as server:
        (found,) = generate(server, 1, key_variable="CHAIN_KEY")
    assert set(server.keys) == {"Bearer s3cret"}
    assert "who is Bearer …?" in str(found.failure)
    assert "s3cret" not in caplog.text + str(found)
    monkeypatch.delenv("CHAIN_KEY")
    with pytest.raises(ValueError, match="the environment variable CHAIN_KEY is not set"):
        generate(server, 1, key_variable="CHAIN_KEY")


def test_an_engine_that_is_closed_leaves_no_thread() -> None:
    before = threading.active_count()
    server = ChainServer(Faults(hang=True))
    with server, engine(server) as made:
        made.submit(requests(3))
        until(made, lambda: server.running == 3)
        made.close()
        assert not made.requests._thread.is_alive()
    assert threading.active_count() <= before + 3, "those of the server's handlers may still end"


def test_a_token_that_the_policy_does_not_know_means_another_model() -> None:
    with ChainServer(script=lambda prompt: "h") as server, engine(server) as made:
        made.vocabulary = 9
        made.submit(requests(1))
        assert "token 9 is not one of the policy's 9: another model is served?" in str(finished(made)[0].failure)
