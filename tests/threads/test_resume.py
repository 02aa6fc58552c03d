"""Threads about runs that are lost with their server, and about resuming them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
import torch

from fedasync.aggregation.update import Input, Inputs
from fedasync.core import Coordinator, EventLog, StepReady, Strategy
from fedasync.simulation import Exponential, Lognormal, OnOff, Population
from fedasync.simulation.population import Clients
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff
from fedasync.studies.command import run_study
from fedasync.workloads import Quadratic

from ..core.driving import told
from ..studies.running import PROGRAM, TIMING, changed, contents, moments, runs

HERE = Path(__file__).parent
CENTRES = (3.0, -1.0, 0.5, 7.0, 2.0, -4.0)


class Small:
    """The smallest runtime: a coordinator, a heap of lease ends, and a model of one number. All of it is plain data.

    Durations come from the population's streams, which keep no generator: client and count of leases say all.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.clients = Clients(Population(6, Lognormal(1.0, 1.0)), seed=5)
        self.log = EventLog()
        self.coordinator = Coordinator(strategy, self.log)
        self.w, self.now = 0.0, 0.0
        self.turns = [0] * 6
        self.ends: list[list[Any]] = []
        self.brought: dict[str, float] = {}

    def run(self, arrivals: int) -> None:
        for _ in range(arrivals):
            self._dispatch()
            self.now, lease_id, client, base = heappop(self.ends)
            entering = (base + CENTRES[client]) / 2
            self.brought[str(lease_id)] = entering - base if self.strategy.update.wants == "delta" else entering
            for event in self.coordinator.deliver(lease_id, self.now):
                if isinstance(event, StepReady):
                    self._step(event)

    def _dispatch(self) -> None:
        for client in range(6):
            if any(end[2] == client for end in self.ends):
                continue
            lease = self.coordinator.request(client, self.now)
            if lease is not None:
                work_s = self.clients.work_s(client, self.turns[client], lease.id)
                self.turns[client] += 1
                heappush(self.ends, [self.now + work_s, lease.id, client, self.w])

    def _step(self, event: StepReady) -> None:
        values = torch.tensor([self.w], dtype=torch.float64)
        entering = [
            Input(torch.tensor([self.brought.pop(str(a.lease.id))], dtype=values.dtype), 1, event.step.staleness(a), 0)
            for a in event.step.entering
        ]
        self.strategy.update.apply(values, self.strategy.update.init(values), Inputs(entering))
        self.w = float(values)
        self.coordinator.commit(self.now)

    def checkpoint(self) -> str:
        return json.dumps(
            [self.coordinator.snapshot(), self.w, self.now, self.turns, self.ends, self.brought], allow_nan=False
        )

    @classmethod
    def resumed(cls, strategy: Strategy, checkpoint: str) -> Small:
        self = cls(strategy)
        state, self.w, self.now, self.turns, self.ends, self.brought = json.loads(checkpoint)
        self.coordinator = Coordinator.restore(strategy, state, self.log)
        return self


@pytest.mark.parametrize(
    "strategy",
    [fedasync(concurrency=4), fedbuff(concurrency=5, buffer_size=3), fedavg(cohort=4, keep=3)],
    ids=lambda s: s.name,
)
def test_flower_599_a_run_resumed_halfway_is_the_run_undisturbed(strategy: Strategy) -> None:
    """Checkpoints held parameters, and neither the round, nor the strategy's state, nor what was in flight (#606)."""
    whole, first = Small(strategy), Small(strategy)
    whole.run(61)
    first.run(31)
    assert first.coordinator.in_flight > 0, "nothing was in flight"
    assert (first.coordinator.waiting > 0) is (strategy.name != "fedasync"), "nothing waited in the buffer"
    second = Small.resumed(strategy, first.checkpoint())
    second.run(30)
    assert whole.coordinator.version >= 15
    assert told(first.log) + told(second.log) == told(whole.log)
    assert second.w == whole.w != first.w
    assert second.checkpoint() == whole.checkpoint()


def test_flower_3169_a_checkpoint_of_another_strategy_is_refused() -> None:
    """Resuming takes the strategy's state as well, and never that of other knobs."""
    first = Small(fedbuff(concurrency=5, buffer_size=3))
    first.run(10)
    for other in (fedbuff(concurrency=5, buffer_size=4), fedbuff(concurrency=5, buffer_size=3, max_staleness=9)):
        with pytest.raises(ValueError, match="the snapshot is of strategy"):
            Small.resumed(other, first.checkpoint())


WAITING = changed(
    TIMING, ('name = "fedbuff"', 'name = "mine.waits"'), ("buffer_size = 2", ""), ("seeds = 1", "seeds = 3")
)


def test_nvflare_242_a_killed_study_goes_on_and_ends_with_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losing the server lost the run, after 15 hours (MediSwarm #347). Here: kill -9 while the second of three runs."""
    shutil.copy(HERE / "mine.py", tmp_path)
    (tmp_path / "s.toml").write_text(WAITING)
    (tmp_path / "wait").touch()
    with subprocess.Popen([PROGRAM, "sim", "s.toml", "--jobs", "1"], cwd=tmp_path) as process:
        try:
            end_s = time.monotonic() + 300
            while not (tmp_path / "at_work").exists():
                assert process.poll() is None
                assert time.monotonic() < end_s
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
    results = tmp_path / "results/s"
    finished = moments(results)
    assert len(runs(results)) == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wait").unlink()
    assert run_study("s.toml", [], 1, None, None) == 0
    assert run_study("s.toml", [], 1, None, tmp_path / "undisturbed") == 0
    assert finished.items() <= moments(results).items(), "the finished run was made again"
    assert contents(results) == contents(tmp_path / "undisturbed")
    assert len(runs(results)) == 3


@pytest.mark.parametrize("strategy", [fedasync(concurrency=4), fedbuff(concurrency=4, buffer_size=3), fedavg(cohort=4)])
def test_fets_challenge_24_a_longer_run_begins_with_the_shorter_one(strategy: Strategy) -> None:
    """Resuming with a larger number of rounds (fedbiomed #39): more of the same, not another experiment."""
    come_and_go = OnOff(Exponential(6.0), Exponential(2.0))
    population = Population(duration_s=Lognormal(1.0, 1.0), availability=come_and_go, dropout_probability=0.1)
    workload = Quadratic(9, dimensions=3)
    short, long = (
        simulate(strategy, population, workload, seed=2, versions=versions, evaluate_every_s=0.5)
        for versions in (10, 25)
    )
    end = 1 + max(short.events.with_row_index().filter(short.events["kind"] == "committed")["index"])
    assert short.events["version"][end - 1] == 10
    assert "offline" in short.events[:end]["reason"].to_list()
    assert long.events[:end].equals(short.events[:end])
    before = short.metrics.filter(short.metrics["time_s"] < short.summary["time_s"])
    assert len(before) > 5
    assert long.metrics[: len(before)].equals(before)
