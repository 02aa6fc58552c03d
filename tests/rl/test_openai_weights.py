"""New weights on a completions server: what was generated says under which, whoever was interrupted how."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fedasync.rl.engine import Request
from fedasync.rl.openai_protocol import Collected
from fedasync.rl.openai_settings import Call, OpenAIServer, WeightUpdate
from fedasync.rl.openai_start import openai_engine_of
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Trajectory

from .openai_cases import (
    QUICK,
    Talk,
    check_chain,
    engine,
    finished,
    received,
    requests,
    trajectory,
    until,
)
from .openai_server import MODEL, ChainServer, Characters, Faults, table


def update(folder: Path, **options: Any) -> WeightUpdate:
    return WeightUpdate(
        "http", str(folder), **{"check": Call("/weight_info", method="GET"), "timeout_s": 60.0} | options
    )


def weights(version: int, end: float = 0.0) -> Any:
    return {"table": torch.tensor(table(version, end))}


@pytest.mark.parametrize("stream", [True, False])
def test_new_weights_get_to_the_server_and_answers_are_of_them(tmp_path: Path, stream: bool) -> None:
    (tmp_path / "base").mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / "base" / name).write_text("{}")
    told = update(tmp_path / "served", companions=str(tmp_path / "base"))
    with ChainServer() as server, engine(server, stream=stream, update=told) as made:
        for version in (1, 2, 5):
            made.load(weights(version), version)
            made.submit(requests(2))
            for each in finished(made):
                check_chain(trajectory(each))
                assert trajectory(each).first_version == trajectory(each).last_version == version
    assert sorted(each.name for each in (tmp_path / "served").iterdir()) == ["version-2", "version-5"]
    assert sorted(each.name for each in (tmp_path / "served" / "version-5").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def interrupted(tmp_path: Path, kv: Any = "recompute", **options: Any) -> tuple[list[Trajectory], Counter[str]]:
    """Four answers of 12 tokens, of which 5 have come (of those that are streamed) when version 7 is loaded."""
    with ChainServer(end=-30.0) as server, engine(server, update=update(tmp_path), **options) as made:
        server.gate = 5
        made.submit(requests(4))
        until(made, lambda: server.running == 4)
        if made.server.stream:
            until(made, lambda: received(made) == [5] * 4)
        if made.server.interruption == "finish":
            server.gate = None
        made.load(weights(7, -30.0), 7, kv)
        server.gate = None
        found = [trajectory(each) for each in finished(made)]
        for each in found:
            check_chain(each, -30.0)
            assert each.generated_tokens == 12
        return found, made.counts


def test_interrupted_streams_keep_their_tokens_and_go_on_under_the_new_version(tmp_path: Path) -> None:
    found, counts = interrupted(tmp_path)
    assert {tuple(each.versions[2:].tolist()) for each in found} == {(0,) * 5 + (7,) * 7}
    assert counts["interrupted_requests"] == 4
    assert counts["restarted_tokens"] == 0


def test_restarted_requests_are_of_the_new_version_alone(tmp_path: Path) -> None:
    found, counts = interrupted(tmp_path, interrupted="restart")
    assert {each.first_version for each in found} == {7}
    assert counts["restarted_tokens"] == 20
    found, counts = interrupted(tmp_path, interrupted="restart", stream=False)
    assert {each.first_version for each in found} == {7}


def test_requests_that_finish_are_of_the_old_version_alone_and_new_weights_wait(tmp_path: Path) -> None:
    for stream in (True, False):
        found, counts = interrupted(tmp_path, interrupted="finish", stream=stream)
        assert {each.last_version for each in found} == {0}
        assert counts["interrupted_requests"] == 0


def test_an_answer_whose_last_token_had_come_is_not_asked_for_again(tmp_path: Path) -> None:
    """The end token is there, and the word that it is the end is not."""
    faults, told = Faults(late_finish=True), update(tmp_path)
    with ChainServer(faults, script=lambda prompt: "bc") as server, engine(server, update=told) as made:
        server.gate = 3
        made.submit(requests(1))
        until(made, lambda: received(made) == [3])
        made.load(weights(3), 3)
        answer = trajectory(finished(made)[0])
        assert len(server.bodies) == 1
    assert Characters().decode(answer.tokens) == "aabc\3"
    assert (answer.finish, answer.last_version) == ("stop", 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_runs_through_an_update_carries_the_versions_that_the_server_says(
    tmp_path: Path, stream: bool
) -> None:
    with ChainServer(end=-30.0, spans=True) as server, engine(server, update=update(tmp_path), stream=stream) as made:
        server.gate = 5
        made.submit(requests(1))
        until(made, lambda: received(made) == [5] if stream else server.sent == 5)
        made.load(weights(7, -30.0), 7, "keep")
        server.gate = None
        answer = trajectory(finished(made)[0])
    check_chain(answer, -30.0)
    assert answer.versions[2:].tolist() == [0] * 5 + [7] * 7
    assert len(server.bodies) == 1


def test_a_version_that_the_server_was_not_told_is_somebody_elses_number() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 2}]
    spans += [{"version": "8", "start": 2, "end": 9}]
    found = Collected(5)
    found.add({"choices": [{"token_ids": [2, 3, 4, 5], "weight_versions": spans}]}, {8})
    assert found.versions == [5, 5, 8, 8]


def test_without_an_update_versions_are_labels_and_nothing_is_sent() -> None:
    with ChainServer(end=-30.0) as server, engine(server, interrupted="finish") as made:
        server.gate = 0
        made.submit(requests(1))
        until(made, lambda: server.running == 1)
        made.load({}, 4)
        server.gate = None
        made.submit([Request(9, 0, 1, 0)])
        first, second = finished(made)
    assert (trajectory(first).last_version, trajectory(second).first_version) == (0, 4)
    assert server.calls == []


def test_a_language_policy_that_is_served_gives_the_log_probs_that_the_trainer_gives_it(tmp_path: Path) -> None:
    """Before and after new weights, of which one layer is trained: the server's copy is the trainer's."""
    from safetensors.torch import load_file

    from fedasync.rl.batch import answers_of
    from fedasync.rl.models import Llama
    from fedasync.rl.objective import Objective
    from fedasync.rl.optimiser import Optimiser
    from fedasync.rl.policy import load_weights, weights_of
    from fedasync.rl.problem import Problem

    class Lettered(Talk):
        alphabet = "abcdefgh"

    problem = Problem(Lettered(), Llama(), Sampling(6, 0.8), Objective(), Optimiser(learning_rate=0.1))
    served, trained = (problem.make_policy(seed) for seed in (1, 1))
    module: Any = served.module
    with torch.no_grad():
        trained.module.get_parameter("lm_head.weight").mul_(3.0)

    def scores(tokens: Any) -> Any:
        with torch.no_grad():
            return module(input_ids=torch.tensor([list(tokens)])).logits[0, -1].double().numpy()

    def read(folder: Path) -> None:
        whole = load_file(folder / "model.safetensors")
        assert whole.keys() == weights_of(module).keys()
        load_weights(module, whole)

    with ChainServer(scorer=scores, reader=read) as server:
        settings = OpenAIServer(server.url, MODEL, **QUICK, update=update(tmp_path))
        policy: Any = problem.make_policy(1)
        with closing(openai_engine_of(problem, policy, settings, 0, wait_s=5.0)) as made:
            for version, now in enumerate((policy, trained)):
                if version:
                    made.load({"lm_head.weight": now.module.get_parameter("lm_head.weight")}, version)
                made.submit(requests(4))
                found = [trajectory(each) for each in finished(made)]
                batch = answers_of(found, 0).rows(range(4))
                with torch.no_grad():
                    ours = now.score(now.module, batch, 0.8).log_probs
                assert {each.first_version for each in found} == {version}
                assert torch.allclose(ours, batch.behaviour.to(ours.dtype), atol=1e-4)
