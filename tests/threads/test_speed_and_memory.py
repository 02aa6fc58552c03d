"""Threads about simulations that crash without a cause, hang, or eat the machine."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedasync.aggregation.model import Contribution
from fedasync.simulation import Exponential, Population, WorkloadError
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa
from fedasync.workloads import Classification, Task, Workload

from ..simulation.worlds import Mapped, rows
from ..studies.running import runs
from . import mine
from .noise import noise, plain
from .study import Made


def test_flower_4138_a_clients_exception_comes_out_with_client_file_and_line(made: Made) -> None:
    """ "Simulation crashed", "ActorPool is empty" (#2758, #4277), and no word of what had happened in the client."""
    lines = made.end.err.splitlines()
    assert len(lines) == 2, "one for each seed"
    source, first = inspect.getsourcelines(mine.lookup)
    at = first + next(place for place, text in enumerate(source) if "# raises" in text)
    for line in lines:
        assert re.match(rf"fedasync: run ill_seed\d_\w+: client {mine.CLIENT}, lease \d+, version \d+: ", line)
        assert "train raised KeyError: 'pixel'" in line
        log = (made.folder / line.partition("(traceback: ")[2].removesuffix(")")).read_text()
        assert f'mine.py", line {at}, in lookup' in log


def test_flower_4476_an_exception_in_a_client_ends_its_run_and_no_other(made: Made) -> None:
    """A silent hang until the time-out."""
    assert made.end.status == 1
    assert [name[:11] for name in runs(made.folder / "results/s")] == ["sound_seed0", "sound_seed1"]


@pytest.mark.parametrize("training", ["batched", "one_by_one"])
@pytest.mark.parametrize(
    "strategy", [fedavg(cohort=4), fedasync(concurrency=4), fedbuff(concurrency=4, buffer_size=2), fedfa(concurrency=4)]
)
def test_flower_4476_every_strategy_lets_the_exception_out(strategy: Any, training: Any) -> None:
    """In one process it is the cause of a WorkloadError, its own traceback with it."""
    population = Population(duration_s=Exponential(1.0))
    with pytest.raises(WorkloadError, match=rf"client {mine.CLIENT}, lease \d+, version \d+: train raised") as raised:
        simulate(strategy, population, mine.Broken(6), updates=10**9, training=training)
    last = traceback.extract_tb(raised.value.__cause__.__traceback__)[-1]  # type: ignore[union-attr]
    assert (Path(last.filename).name, last.name) == ("mine.py", "lookup")


MEASURED = """
import gc
import resource
import psutil
import torch
from fedasync.aggregation.model import Contribution, Model
from fedasync.simulation import Exponential, Population, simulate
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa
from fedasync.workloads import Quadratic

MEGABYTE = 1 << 20
population = Population(duration_s=Exponential(1.0))


class Large:
    def __init__(self, clients):
        self.clients = clients

    def client_samples(self):
        return [1] * self.clients

    def initial_model(self, seed):
        return Model.from_tensors({"w": torch.zeros(MEGABYTE // 4)})

    def train(self, task):
        return Contribution(task.model.values + 1.0, "parameters", 1)

    def evaluate(self, model):
        return {"w": float(model.values[0])}


for clients in (1_000, 100_000):
    run = simulate(fedbuff(concurrency=20, buffer_size=5), population, Large(clients), updates=100)
    assert len(set(run.events["worker"].drop_nulls())) > 50
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

small = Quadratic(8, dimensions=MEGABYTE // 32)
rows = fedasync(concurrency=8), fedavg(cohort=8, keep=6), fedbuff(concurrency=8, buffer_size=4), fedfa(concurrency=8)
for turn in range(24):
    run = simulate(rows[turn % 4], population, small, seed=turn, updates=8)
    gc.collect()
    if turn in (3, 23):
        print(psutil.Process().memory_info().rss / MEGABYTE)
"""


@pytest.fixture(scope="module")
def megabytes() -> list[float]:
    """Peaks after a run with 1,000 and one with 100,000 clients; then what 4, and 24, smaller runs leave.

    Memory of every tensor goes back to the machine at once, as far as the C library can be told so.
    """
    if sys.platform != "linux":
        pytest.skip("other systems count memory in their own ways")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def test_flower_1376_twenty_runs_in_one_process_leave_no_memory_behind(megabytes: list[float]) -> None:
    """Workers kept memory after every round and simulation (#1152). One model of 256 KB a run would be 5 MB."""
    _, _, after_4, after_24 = megabytes
    assert after_24 - after_4 < 3, f"{after_4:.0f} MB after 4 runs, {after_24:.0f} MB after 24"


def test_flower_1963_peak_memory_does_not_depend_on_how_many_clients_are_registered(megabytes: list[float]) -> None:
    """Fifty clients of one model took 400 GB. Here 1 MB for each would be 100 GB, and twenty are at work."""
    few, many, _, _ = megabytes
    assert many - few < 40, f"{few:.0f} MB with 1,000 clients, {many:.0f} MB with 100,000"


def test_flower_1963_a_large_population_costs_nothing_an_event() -> None:
    """A hundred thousand clients, twenty at work: the log holds the leases of those, and nobody else."""
    run = simulate(fedasync(concurrency=20), Population(100_000, Exponential(1.0)), updates=50)
    assert run.summary["admitted"] == 70
    assert run.summary["consumed"] == 50


class Counted(Classification):
    """Notes how many results are computed in one call."""

    def train_batch(self, work: Sequence[tuple[Workload, Task]], memory_bytes: int) -> Sequence[Contribution]:
        self.calls.append(len(work))
        return super().train_batch(work, memory_bytes)

    calls: list[int]


def test_plato_165_no_more_is_computed_at_once_than_is_in_flight() -> None:
    """All clients were launched although few train at a time: 160 GB, and 70 GB when only those are."""
    workload = noise(plain, clients=40, kind=Counted)
    workload.calls = []
    assert workload.not_batched is None
    run = simulate(fedbuff(concurrency=6, buffer_size=3), Population(duration_s=Exponential(1.0)), workload, updates=30)
    assert 1 < max(workload.calls) <= 6
    assert sum(workload.calls) <= run.summary["admitted"] == len(rows(run, "admitted", "lease"))


def test_plato_165_what_nobody_waits_for_is_not_computed_at_all() -> None:
    """Over-selected clients are cancelled before their result would be due."""
    trained = []

    class Noted(Mapped):
        def train(self, task: Task) -> Contribution:
            trained.append(task.client)
            return super().train(task)

    run = simulate(fedavg(cohort=9, keep=4), Population(9, Exponential(1.0)), Noted(9, lambda _, w: w), versions=10)
    assert len(trained) == run.summary["consumed"] == 40
