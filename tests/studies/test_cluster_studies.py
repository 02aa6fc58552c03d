"""Studies of a cluster: configured, refused, run and resumed as those of federated clients."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from fedasync.studies.build import ClusterParts, build
from fedasync.studies.study import load

from .running import TIMING, Command, changed, contents, moments, runs, summary

S = Path("results/s")

CLUSTER = """
[study]
title = "small cluster"
seeds = 2

[run]
versions = 8

[cluster]
generation_gpus = 4
training_gpus = 2
decoding = { kind = "fixed_speed", tokens_per_second = 50.0, max_running = 8 }
trainer = { tokens_per_second_per_gpu = 300.0 }
weights = { pause_s = 0.5, transfer = false }

[prompts]
answers = 4
answer_tokens = { kind = "lognormal", mean = 300.0, sigma = 0.6 }

[strategy]
name = "areal"
batch = 8
eta = 1

[report]
figures = []
"""
ETAS = """
[[axis]]
name = "eta"
key = "strategy.eta"
values = [0, 1, 4]
"""


def test_a_study_of_a_cluster_makes_its_runs(fedasync: Command, study: Path) -> None:
    study.write_text(changed(CLUSTER, ("eta = 1", "")) + ETAS)
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, "")
    made = runs(S)
    assert len(made) == 3 * 2
    for folder in made.values():
        told = summary(folder)
        assert told["versions"] == 8
        assert told["consumed"] == 8 * 8
        assert all(verdict["holds"] for verdict in told["verdicts"])
        assert pl.read_parquet(folder / "rollouts.parquet").height >= 8 * 8 * 4
        assert told["staleness"]["max"] <= int(told["labels"]["eta"]) + 1
        if told["labels"]["eta"] == "0":
            assert told["staleness"]["max"] == 0
    assert fedasync("show", str(next(iter(made.values())))).status == 0
    assert fedasync("plot", str(S)).status == 0


def test_one_process_and_two_write_the_same_bytes(fedasync: Command, study: Path, tmp_path: Path) -> None:
    study.write_text(changed(CLUSTER, ("eta = 1", "")) + ETAS)
    for jobs in ("1", "2"):
        assert fedasync("sim", "s.toml", "--jobs", jobs, "--out", str(tmp_path / jobs)).status == 0
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


def test_a_study_goes_on_where_it_was(fedasync: Command, study: Path) -> None:
    study.write_text(changed(CLUSTER, ("eta = 1", "")) + ETAS)
    assert fedasync("sim", "s.toml").status == 0
    before, files = moments(S), contents(S)
    lost = list(runs(S).values())[::2]
    for folder in lost:
        shutil.rmtree(folder)
    assert "6 runs, 3 finished before" in fedasync("sim", "s.toml").out
    assert contents(S) == files
    kept = {name: moment for name, moment in before.items() if not name.startswith(tuple(map(str, lost)))}
    assert kept.items() <= moments(S).items()


def test_what_is_built_is_what_the_file_says(study: Path) -> None:
    study.write_text(CLUSTER)
    base = load(study, ["cluster.generation_gpus=16", "prompts.answers=2", "faults.stalled_after_s=60.0"])
    (first, *_) = base.plans()
    parts = build(first.config, "here")
    assert isinstance(parts, ClusterParts)
    assert parts.cluster.servers == 16
    assert parts.prompts.answers == 2
    assert parts.faults.stalled_after_s == 60.0


MISTAKES = {
    "generation_gpu = 4": "s.toml: cluster.generation_gpu: unknown key; did you mean 'generation_gpus'?",
    "generation_gpus = 4.5": "s.toml: cluster.generation_gpus: got 4.5; an integer would do",
    "generation_gpus = 0": "cluster: generation_gpus must be an integer ≥ 1",
    'generation_gpus = 4\ngpu = "h900"': "cluster: gpu: no preset 'h900'",
    "generation_gpus = 4\ntensor_parallel = 3": "a multiple of 3 would do",
    'generation_gpus = 4\ndecodin = { kind = "fixed_speed" }': "cluster.decodin: unknown key; did you mean 'decoding'?",
}


@pytest.mark.parametrize("written", MISTAKES)
def test_a_mistake_is_one_line_that_says_where(fedasync: Command, study: Path, written: str) -> None:
    study.write_text(changed(CLUSTER, ("generation_gpus = 4", written)))
    end = fedasync("sim", "s.toml")
    assert end.status == 2
    assert MISTAKES[written] in end.complaint
    assert not S.exists()


def test_other_tables_are_refused_in_one_line(fedasync: Command, study: Path) -> None:
    cases = {
        CLUSTER + "[population]\nclients = 3\n": "[population] and [cluster] in one run",
        changed(CLUSTER, ("[cluster]", "[clusters]")): "clusters: unknown table; did you mean 'cluster'?",
        CLUSTER.replace("[prompts]\nanswers = 4\n", "").replace("answer_tokens = {", "x = {"): "[prompts] is missing",
        changed(CLUSTER, ("answers = 4", "answer = 4")): "prompts.answer: unknown key; did you mean 'answers'?",
        CLUSTER + "[faults]\nserver = []\n": "faults.server: unknown key",
        changed(CLUSTER, ("versions = 8", "versions = 8\nselection = 'same_client'")): "run.selection: unknown key",
        changed(TIMING, ("[population]", "[prompts]\n[population]")): "[population] and [prompts] in one run",
    }
    for text, said in cases.items():
        study.write_text(text)
        end = fedasync("sim", "s.toml")
        assert end.status == 2
        assert said in end.complaint


def test_what_can_never_run_is_refused_before_anything_runs(fedasync: Command, study: Path) -> None:
    cases = {
        changed(CLUSTER, ("eta = 1", "eta = 1\nlease_timeout_s = -1.0")): "lease_timeout_s",
        changed(
            CLUSTER, ('name = "areal"\nbatch = 8\neta = 1', 'name = "fedcompass"\nconcurrency = 4')
        ): "strategy 'fedcompass'",
        changed(CLUSTER, ("answers = 4", "answers = 4\ncount = 5\nepochs = 1")): "the first step needs 8 groups",
    }
    for text, said in cases.items():
        study.write_text(text)
        end = fedasync("sim", "s.toml")
        assert end.status == 2
        assert said in end.complaint
    assert not S.exists()


def test_another_recorded_file_makes_new_runs(fedasync: Command, study: Path) -> None:
    law = 'kind = "lognormal", mean = 300.0, sigma = 0.6'
    study.write_text(changed(CLUSTER, (law, 'kind = "recorded", file = "d.csv"')))
    Path("d.csv").write_text("prompt,generated_tokens\n0,100\n0,200\n1,300\n")
    assert fedasync("sim", "s.toml").status == 0
    assert "2 finished before" in fedasync("sim", "s.toml").out
    Path("d.csv").write_text("prompt,generated_tokens\n0,100\n0,200\n1,301\n")
    assert "none finished before" in fedasync("sim", "s.toml").out


def test_world_says_what_a_cluster_is(fedasync: Command, study: Path) -> None:
    study.write_text(CLUSTER)
    end = fedasync("world", "s.toml", "--set", "cluster.generation_gpus=6")
    assert end.status == 0
    assert "8 H800 (6 + 2)" in end.out
    assert "1,600" not in end.out
    assert "2,400" in end.out  # 6 servers of 8 answers at 50 tokens/s
    assert "A step on 8 prompts" in end.out
    assert not S.exists()
