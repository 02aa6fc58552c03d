"""What goes wrong between an engine and its server costs the answer that it happens to, in words."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from .openai_cases import Talk, check_chain, engine, finished, generate, requests, trajectory, until
from .openai_server import ChainServer, Faults


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (Faults(log_probs="truncated"), "it gave 12 tokens and 1 log-probs"),
        (Faults(log_probs="positive"), "it gave 2.5 for a log-prob, which is > 0"),
        (Faults(extra_tokens=3), "it gave 15 tokens, and at most 12 were asked for"),
        (Faults(miscount=1), "it counts 13 tokens and gave 12"),
        (Faults(finish="content_filter"), "it ended with 'content_filter'"),
        (Faults(prompt=True), "it read 4 other tokens than the 2 of the prompt"),
    ],
)
def test_what_an_answer_lacks_is_named_and_costs_that_answer_alone(faults: Faults, words: str, stream: bool) -> None:
    faults.times = 1
    with ChainServer(faults, end=-30.0) as server:
        bad, good = generate(server, 2, stream=stream, max_running=1)
    assert words in str(bad.failure)
    assert (bad.trajectory, bad.own_fault) == (None, False)
    check_chain(trajectory(good), -30.0)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_the_server_finds_wrong_would_be_wrong_again(status: int) -> None:
    with ChainServer(Faults(status=status)) as server:
        (found,) = generate(server, 1)
    assert found.own_fault
    assert len(server.bodies) == 1


def test_a_stream_that_breaks_off_keeps_its_tokens_and_the_rest_is_asked_for() -> None:
    with ChainServer(Faults(break_after=5, times=1), end=-30.0) as server:
        (found,) = generate(server, 1)
    check_chain(trajectory(found), -30.0)
    assert trajectory(found).generated_tokens == 12
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(2, 12), (7, 7)]
    assert server.bodies[0]["seed"] != server.bodies[1]["seed"], "the same noise would come twice"


@pytest.mark.parametrize("stream", [True, False])
def test_a_slow_server_is_no_failure_and_a_step_does_not_wait_for_it(stream: bool) -> None:
    with ChainServer(end=-30.0) as server, engine(server, stream=stream) as made:
        server.gate = 0
        made.submit(requests(2))
        steps = 0
        while server.running < 2 or steps < 20:
            assert made.step() == []
            steps += 1
        first, second = made.waits()
        assert first.startswith(f"answer 0 waits for {server.url}: asked ")
        assert "attempt 1" in second
        server.gate = None
        assert len(finished(made)) == 2


def test_an_environment_that_errs_costs_its_answer_alone() -> None:
    class Errs(Talk):
        def start(self, prompt: int, *, held_out: bool = False) -> Any:
            if prompt == 0:
                raise KeyError("no such prompt")
            return super().start(prompt)

    with ChainServer() as server:
        found = generate(server, 4, Errs())
        (long,) = generate(server, 1, Talk(prompt="a" * 64))
        (strange,) = generate(server, 1, Talk(prompt="z"))
        (unsayable,) = generate(server, 1, Talk(turns=2, observation="?"), most=60)
    assert [each.failure is None for each in found] == [False, False, True, True]
    assert str(found[0].failure).startswith("environment raised KeyError")
    assert str(long.failure).startswith("prompt too long: 64 tokens")
    assert str(strange.failure).startswith("prompt cannot be encoded: ValueError: no token for")
    assert str(unsayable.failure).startswith("observation cannot be encoded: ")
    assert all(each.own_fault for each in (found[0], long, strange, unsayable))


def test_closing_does_not_wait_for_a_server_that_hangs() -> None:
    with ChainServer(Faults(hang=True)) as server, engine(server) as made:
        made.submit(requests(4))
        until(made, lambda: server.running == 4)
        ended = threading.Event()
        threading.Thread(target=lambda: (made.close(), ended.set())).start()
        assert ended.wait(10)
