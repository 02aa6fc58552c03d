"""Threads about engines that answer badly or not at all: one failure is one answer's, and nobody waits without end.

The name of a test begins with its thread; docs/threads.md has the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedasync.rl.openai_requests import Requests, ServerError
from fedasync.rl.openai_settings import Call, OpenAIServer, WeightUpdate, update_of
from fedasync.rl.openai_start import check
from fedasync.rl.openai_weights import WeightUpdateError
from fedasync.rl.sampling import Sampling

from ..rl.openai_cases import check_chain, engine, finished, generate, received, requests, trajectory, until
from ..rl.openai_server import MODEL, ChainServer, Characters, Faults, UpdateFaults, table


def weights(version: int) -> Any:
    return {"table": torch.tensor(table(version))}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("log_probs", ["none", "null", "nan"])
def test_trl_6297_an_answer_without_log_probs_is_refused_in_words(log_probs: str, stream: bool) -> None:
    with ChainServer(Faults(log_probs=log_probs), end=-30.0) as server:
        (found,) = generate(server, 1, stream=stream)
    missing = f"server: it gave no log-prob for {1 if log_probs == 'null' else 12} of 12 tokens; "
    assert found.trajectory is None
    assert found.failure == missing + 'missing_log_probs = "nan" leaves them to the objective'
    assert not found.own_fault
    assert len(server.bodies) == 1, "asking again would not help"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("log_probs", "missing"), [("none", 12), ("null", 1), ("nan", 12)])
def test_trl_6297_or_it_is_nan_for_the_objective_and_counted(log_probs: str, missing: int, stream: bool) -> None:
    with (
        ChainServer(Faults(log_probs=log_probs), end=-30.0) as server,
        engine(server, stream=stream, missing_log_probs="nan") as made,
    ):
        made.submit(requests(1))
        answer = trajectory(finished(made)[0])
    assert int(np.isnan(answer.log_probs).sum()) == made.counts["missing_log_probs"] == missing
    assert not np.isnan(answer.log_probs[~answer.generated]).any()


@pytest.mark.parametrize(
    ("dialect", "cure"), [("vllm", "--logprobs-mode"), ("sglang", "SGLANG_RETURN_ORIGINAL_LOGPROB")]
)
def test_trl_4159_log_probs_of_another_temperature_are_found_before_the_run(dialect: Any, cure: str) -> None:
    with ChainServer(Faults(raw=True)) as server:
        asked = Requests(OpenAIServer(server.url, MODEL, dialect), Sampling(4, 0.7), Characters())
        with pytest.raises(ServerError, match=f"at temperature 0.7 are those at 1, .*{cure}"):
            check(asked, Characters(), 5.0)
        asked.close()


@pytest.mark.parametrize("faults", [Faults(drop_end=True), Faults(names="hidden_end")])
def test_vllm_28185_an_end_token_that_the_server_keeps_to_itself_is_no_answer_to_train_on(faults: Faults) -> None:
    with ChainServer(faults, script=lambda prompt: "bc") as server:
        (found,) = generate(server, 1, stream=False)
    assert "is no end token of the policy: it leaves the end token out" in str(found.failure)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("faults", "words", "attempts"),
    [
        (Faults(status=500), "HTTP 500: the engine is dead (3 attempts)", 3),
        (Faults(status=503, body="overloaded"), "HTTP 503: overloaded (3 attempts)", 3),
        (Faults(hang=True), "silence of 1 s (3 attempts)", 3),
        (Faults(reset=True), "Error", 3),
        (Faults(not_json=True), "its answer is not JSON: '<html>hello</html>' (3 attempts)", 3),
        (Faults(finish="abort"), "", 2),
        (Faults(status=404, body='{"detail": "no such model"}'), "HTTP 404: no such model", 1),
        (Faults(status=401), "HTTP 401: the engine is dead", 1),
    ],
)
def test_trl_7176_a_failed_generation_is_that_answers_failure_and_never_a_reward(
    faults: Faults, words: str, attempts: int, stream: bool
) -> None:
    """The worker lives on: what comes next is answered."""
    faults.times = attempts
    with ChainServer(faults, end=-30.0) as server, engine(server, stream=stream, silence_timeout_s=1.0) as made:
        made.submit(requests(1))
        (bad,) = finished(made)
        if faults.finish == "abort":
            assert trajectory(bad).generated_tokens == 12, "what had come of it is kept"
        else:
            assert words in str(bad.failure)
            assert str(bad.failure).startswith("server: /v1/completions: ")
            assert (bad.trajectory, bad.own_fault) == (None, False)
            assert len(server.bodies) == attempts
        made.submit(requests(3)[1:])
        for each in finished(made):
            check_chain(trajectory(each), -30.0)


@pytest.mark.parametrize("faults", [Faults(status=500), Faults(status=429), Faults(hang=True), Faults(reset=True)])
def test_trl_7176_what_passes_is_tried_again_and_counted(faults: Faults) -> None:
    faults.times = 2
    with ChainServer(faults, end=-30.0) as server, engine(server, silence_timeout_s=1.0) as made:
        made.submit(requests(1))
        check_chain(trajectory(finished(made)[0]), -30.0)
        assert made.counts["further_attempts"] == 2
        assert made.counts["failed_answers"] == 0


def test_trl_7176_one_failure_among_many_kills_no_other() -> None:
    """5 % of failures on the way are no third of the groups: each is one answer's, and is tried again first."""
    with ChainServer(Faults(status=500, times=4)) as server, engine(server, retries=0, max_running=8) as made:
        made.submit(requests(24))
        found = finished(made)
    assert [each.answer for each in found] == list(range(24))
    assert sum(each.failure is not None for each in found) == made.counts["failed_answers"] == 4
    assert not any(each.own_fault for each in found if each.failure)


def update(folder: Path, **options: Any) -> WeightUpdate:
    asked: dict[str, Any] = {"timeout_s": 2.0, "before": (Call("/pause"),), "after": (Call("/resume"),)}
    return WeightUpdate("http", str(folder), **(asked | options))


ASKED = {"check": Call("/weight_info", method="GET")}


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (UpdateFaults(status=500), "/update_weights: HTTP 500: no space left"),
        (UpdateFaults(status=400), "/update_weights: HTTP 400: no space left"),
        (UpdateFaults(success=False), "/update_weights: not done: it does not fit"),
        (UpdateFaults(hang=True), "/update_weights: no answer within 2 s"),
        (UpdateFaults(ignored=True), "it was told to, and says it has 0"),
    ],
)
def test_trl_6913_an_update_that_fails_is_told_in_time_and_the_server_stays_usable(
    tmp_path: Path, faults: UpdateFaults, words: str
) -> None:
    """Answers under way go on under the version that the server says it has; the next update is tried as if nothing
    had been."""
    told = update(tmp_path, **ASKED)
    with ChainServer(update_faults=faults, end=-30.0) as server, engine(server, update=told) as made:
        server.gate = 5
        made.submit(requests(1))
        until(made, lambda: received(made) == [5])
        with pytest.raises(WeightUpdateError) as caught:
            made.load(weights(3), 3)
        assert f"weights of version 3 did not get to {server.url}: {words}" in str(caught.value)
        assert (caught.value.serves, made.version, made.counts["failed_updates"]) == (0, 0, 1)
        assert server.calls.count("/resume") == server.calls.count("/pause") == 1
        server.gate = None
        answer = trajectory(finished(made)[0])
        check_chain(answer, -30.0)
        assert answer.last_version == 0
        faults.times = 0
        made.load(weights(4), 4)
        made.submit(requests(1))
        answer = trajectory(finished(made)[0])
        check_chain(answer)
        assert answer.first_version == 4


def test_trl_6913_an_update_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    faults = UpdateFaults(status=503, times=1)
    with ChainServer(update_faults=faults) as server, engine(server, update=update(tmp_path)) as made:
        made.load(weights(3), 3)
        assert (server.version, made.version) == (3, 3)
        assert server.calls.count("/update_weights") == 2


def test_trl_6913_nothing_is_generated_while_nobody_knows_the_servers_weights(tmp_path: Path) -> None:
    """An update of which nothing was heard may still be made, and the server is not one that says what it has."""
    faults = UpdateFaults(hang=True, times=2)
    with ChainServer(update_faults=faults) as server, engine(server, update=update(tmp_path)) as made:
        with pytest.raises(WeightUpdateError) as caught:
            made.load(weights(3), 3)
        assert caught.value.serves is None
        made.submit(requests(2))
        found = finished(made)
        assert [each.answer for each in found] == [0, 1]
        for each in found:
            assert str(each.failure).startswith("server: weights unknown: weights of version 3 did not get to ")
            assert not each.own_fault
        assert server.bodies == []
        made.load(weights(4), 4)
        made.submit(requests(1))
        check_chain(trajectory(finished(made)[0]))


CALLS = {
    ("vllm", "recompute"): "/pause?mode=abort /collective_rpc /update_weight_version /reset_prefix_cache /resume",
    ("vllm", "keep"): "/pause?mode=keep /collective_rpc /update_weight_version /resume",
    ("sglang", "recompute"): "/pause_generation /update_weights_from_disk /continue_generation /model_info",
    ("sglang", "keep"): "/pause_generation /update_weights_from_disk /continue_generation /model_info",
}


@pytest.mark.parametrize(("kind", "kv"), CALLS)
def test_nemo_rl_4018_the_prefix_cache_is_dropped_with_the_weights_that_filled_it(
    tmp_path: Path, kind: str, kv: Any
) -> None:
    """Unless the cache of what runs is kept, which is a choice."""
    told = update_of({"kind": kind, "folder": str(tmp_path), "timeout_s": 60.0})
    with ChainServer() as server, engine(server, update=told) as made:
        made.load(weights(3), 3, kv)
    assert (server.version, made.version) == (3, 3)
    assert " ".join(server.calls) == CALLS[kind, kv]
    if kind == "sglang":
        assert told.update.filled("f", 3, kv).body["flush_cache"] is (kv == "recompute")


def test_trl_6789_drawing_from_a_part_of_the_distribution_is_warned_of() -> None:
    words = r"top_k = 4 and top_p = 0.9 .* importance ratio is off"
    with ChainServer() as server, pytest.warns(UserWarning, match=words):
        generate(server, 1, sampling=Sampling(4, top_k=4, top_p=0.9))
