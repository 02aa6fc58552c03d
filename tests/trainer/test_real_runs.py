"""Whole runs on real processes: the asynchronous path at η = 0, what overlaps, deaths, and what is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedasync.core import Strategy
from fedasync.rl.engine import Request
from fedasync.rl.engines import generate
from fedasync.rl.episodes import Start
from fedasync.rl.learner import Learner
from fedasync.rl.policy import load_weights
from fedasync.rl.trajectory import Group
from fedasync.runs.run import Run
from fedasync.strategies.rollouts import areal, synchronous_rl
from fedasync.studies.build import build_problem
from fedasync.trainer.run import POLICY, TrainerRequest
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings

from ..rl.openai_server import MODEL, ChainServer

BATCH, ANSWERS, SEED = 4, 4, 3
PROBLEM: dict[str, Any] = {
    "task": {"kind": "reverse", "length": [2, 4], "symbols": 4, "held_out": 0},
    "policy": {"kind": "gpt2", "hidden": 32, "layers": 1, "heads": 2, "context_tokens": 16},
    "sampling": {"max_new_tokens": 6},
    "objective": {"loss": "coupled"},
    "optimiser": {"kind": "adamw", "learning_rate": 3e-3},
}


def request(strategy: Strategy, versions: int, processes: ProcessSettings | None = None, **more: Any) -> TrainerRequest:
    settings = RunSettings(versions=versions, **{"checkpoint_every": 2, **more})
    asked = PromptSettings(ANSWERS)
    return TrainerRequest(strategy, PROBLEM, None, asked, processes or ProcessSettings(), settings, seed=SEED)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the trainer saved at the end."""
    told = load_file(folder / POLICY / "learner.safetensors")
    return {name.removeprefix("weights."): value for name, value in told.items() if name.startswith("weights.")}


def plain(versions: int, tables: Mapping[str, Any] = PROBLEM) -> Mapping[str, torch.Tensor]:
    """Generate a batch, train on it, and so on, in this process: no worker, no controller, no coordinator."""
    problem = build_problem(dict(tables), "test")
    learner = Learner(problem, SEED)
    policy = problem.make_policy(SEED)
    for version in range(versions):
        load_weights(policy.module, learner.weights())
        prompts = range(version * BATCH, (version + 1) * BATCH)
        starts = [
            Start(Request(prompt * ANSWERS + index, prompt, 0, index)) for prompt in prompts for index in range(ANSWERS)
        ]
        told = generate(policy, starts, version, problem.environment, problem.sampling, SEED)  # type: ignore[arg-type]
        cut = [tuple(told[at : at + ANSWERS]) for at in range(0, len(told), ANSWERS)]
        learner.train([Group(p, p, version, each, ANSWERS) for p, each in zip(prompts, cut, strict=True)])
    return learner.weights()


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_at_eta_0_the_asynchronous_path_gives_the_plain_loops_weights_bit_for_bit(tmp_path: Path) -> None:
    run = request(areal(batch=BATCH, eta=0), 4).make(tmp_path)
    assert same(weights(tmp_path), plain(4))
    assert run.summary["staleness"]["max"] == 0
    assert run.rollouts is not None
    assert (run.rollouts["segments"] == 1).all()


def overlap_s(run: Run) -> float:
    """Seconds in which an answer was being generated while the trainer made a step."""
    table = run.metrics
    steps = table.filter(table["name"] == "train_s")
    assert run.rollouts is not None
    done = run.rollouts.filter(run.rollouts["end_s"].is_not_null())
    total = 0.0
    for end_s, train_s in zip(steps["time_s"], steps["value"], strict=True):
        begin_s = end_s - train_s
        starts, ends = done["start_s"].to_numpy(), done["end_s"].to_numpy()
        inside = np.minimum(ends, end_s) - np.maximum(starts, begin_s)
        total += max(0.0, float(inside.max(initial=0.0)))
    return total


@pytest.mark.slow
def test_from_eta_1_on_generation_overlaps_training_and_versions_change_within_an_answer(tmp_path: Path) -> None:
    apart = request(synchronous_rl(batch=BATCH), 6).make(tmp_path / "apart")
    together = request(areal(batch=BATCH, eta=2), 20, ProcessSettings(max_running=3)).make(tmp_path / "together")
    assert overlap_s(apart) == pytest.approx(0.0, abs=0.02)
    assert overlap_s(together) > 0.05
    assert together.rollouts is not None
    assert together.rollouts["segments"].max() > 1
    assert together.summary["staleness"]["max"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker-0", "rank-0"])
def test_a_process_that_is_killed_changes_nothing_of_what_is_learnt_at_eta_0(tmp_path: Path, name: str) -> None:
    """kill -9 in the middle; the weights are those of an undisturbed run."""
    versions = 12
    made = request(areal(batch=BATCH, eta=0), versions, checkpoint_every=1)
    killed: list[int] = []

    def kill(version: int, metrics: Mapping[str, float]) -> None:
        if version == 5 and not killed:
            module = "rollout_worker" if name == "worker-0" else "trainer_rank"
            (pid,) = [each for each in children() if module in command(each) and str(tmp_path) in command(each)]
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    run = made.make(tmp_path, kill)
    assert killed
    assert run.summary["versions"] == versions
    assert run.summary["restarts"] == 1
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])
    assert same(weights(tmp_path), plain(versions))


@pytest.mark.slow
def test_a_run_that_is_interrupted_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(version: int, metrics: Mapping[str, float]) -> None:
        if version == 4:
            raise KeyboardInterrupt

    made = request(areal(batch=BATCH, eta=0), 8, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        made.make(tmp_path, interrupt)
    assert not [pid for pid in children() if str(tmp_path) in command(pid)]
    run = made.make(tmp_path)
    assert run.summary["versions"] == 8
    assert same(weights(tmp_path), plain(8))
    assert any("goes on from version" in each["what"] for each in run.summary["incidents"])


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["shared_memory", "distributed"])
def test_other_channels_bring_the_same_weights(tmp_path: Path, channel: Any) -> None:
    request(areal(batch=BATCH, eta=0), 3, ProcessSettings(channel=channel)).make(tmp_path)
    assert same(weights(tmp_path), plain(3))


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_up_to_rounding(tmp_path: Path, data_parallel: Any) -> None:
    """Plain SGD, whose steps are as far apart as gradients are: Adam would make whole steps of what is rounding."""
    sgd = {**PROBLEM, "optimiser": {"kind": "sgd", "learning_rate": 0.1}}
    made = replace(
        request(areal(batch=BATCH, eta=0), 3, ProcessSettings(ranks=2, data_parallel=data_parallel)), problem=sgd
    )
    made.make(tmp_path)
    assert ("FSDP" if data_parallel == "fsdp" else "DistributedDataParallel") in (
        tmp_path / "logs/rank-1.log"
    ).read_text()
    found = weights(tmp_path)
    for name, value in plain(3, sgd).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_workers_share_the_answers(tmp_path: Path) -> None:
    run = request(areal(batch=BATCH, eta=1), 6, ProcessSettings(workers=2)).make(tmp_path)
    assert run.rollouts is not None
    assert set(run.rollouts.filter(run.rollouts["end_s"].is_not_null())["server"]) == {0, 1}


@pytest.mark.slow
def test_a_completions_server_generates_in_place_of_the_worker(tmp_path: Path) -> None:
    """Seven symbols and a separator have the numbers of tokens that the server's chain has, so it can answer."""
    tables = {
        **PROBLEM,
        "task": {"kind": "reverse", "length": 2, "symbols": 7, "held_out": 0},
        "objective": {"loss": "coupled"},
    }
    with ChainServer() as server:
        made = replace(
            request(areal(batch=BATCH, eta=1), 3), problem=tables, engine={"url": server.url, "model": MODEL}
        )
        run = made.make(tmp_path)
    assert run.summary["versions"] == 3
    assert run.rollouts is not None
    done = run.rollouts.filter(run.rollouts["end_s"].is_not_null())
    assert (done["generated_tokens"] >= 1).all()
    k1 = run.metrics.filter(run.metrics["name"] == "k1")["value"]
    assert len(k1) == 3
    assert (k1.abs() > 0.01).all()  # a chain's tokens are not those of the policy, and the trainer sees that


def children() -> list[int]:
    """All processes that can be seen."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]


def command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_bad_input_is_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    broken = {**PROBLEM, "policy": {"kind": "gpt2", "hidden": 33}}
    asked = TrainerRequest(
        areal(batch=2, eta=0), broken, None, PromptSettings(2), ProcessSettings(), RunSettings(versions=1)
    )
    began_s = time.monotonic()
    with pytest.raises(Exception, match=r"hidden must be a multiple of") as told:
        asked.make(tmp_path)
    assert "\n" not in str(told.value)
    assert time.monotonic() - began_s < 150
    assert not [pid for pid in children() if str(tmp_path) in command(pid)]
    assert threading.active_count() < 20
