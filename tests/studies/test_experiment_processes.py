"""Experiments on real processes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from .running import PROGRAM, apart, changed, moments, runs, summary

REAL = """
[study]
title = "real"
seeds = 1

[federation]
clients = 2

[run]
updates = 3

[workload]
kind = "quadratic"
clients = 2

[strategy]
name = "fedasync"
concurrency = 2

[report]
figures = []
"""


def left_running(folder: Path) -> list[str]:
    """Processes that were started by a federation below a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME", "").startswith(str(folder)):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_an_experiment_runs_on_real_processes_and_not_twice(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(REAL)
    first = apart("run", "e.toml", cwd=tmp_path, timeout_s=240)
    assert (first.status, first.err) == (0, ""), first
    assert "run 1 of 1: seed 0: updates at " in first.out
    ((name, run),) = runs(tmp_path / "results/e").items()
    told = summary(run)
    assert (told["run_id"], told["study"], told["runtime"], told["consumed"]) == (name, "e", "flower", 3)
    assert {"trace.json", "exchanges.parquet", "events.parquet", "events.bin"} <= {path.name for path in run.iterdir()}
    assert left_running(tmp_path) == []
    assert [path.name for path in (tmp_path / "results/e/runs").iterdir()] == [name]
    before = moments(tmp_path / "results/e")
    again = apart("run", "e.toml", cwd=tmp_path)
    assert again.status == 0
    assert "starting" not in again.out
    assert moments(tmp_path / "results/e") == before


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_and_the_same_command_goes_on(
    tmp_path: Path, until: Callable[..., None], number: int, status: int
) -> None:
    (tmp_path / "e.toml").write_text(changed(REAL, ("seeds = 1", "seeds = 2")))
    folder = tmp_path / "results/e/runs"
    with subprocess.Popen(
        [PROGRAM, "run", "e.toml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: len(list(folder.glob(".*.partial/events.bin"))) == len(list(folder.glob("[!.]*"))) == 1, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == status
    (line,) = err.splitlines()
    assert line.startswith("fedasync: ")
    assert "1 of 2 runs are finished, and the same command goes on from there" in line
    assert left_running(tmp_path) == []
    assert len(list(folder.iterdir())) == 1
    before = moments(tmp_path / "results/e")
    assert apart("run", "e.toml", cwd=tmp_path, timeout_s=300).status == 0
    after = moments(tmp_path / "results/e")
    assert before.items() <= after.items()
    assert len(runs(tmp_path / "results/e")) == 2
    assert left_running(tmp_path) == []


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait until something happened while a process goes on."""
    import time

    def wait(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
        end_s = time.monotonic() + 300
        while not happened():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end_s
            time.sleep(0.1)

    return wait
