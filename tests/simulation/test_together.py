"""Runs side by side: each comes out as it does alone, whatever its company does."""

from __future__ import annotations

from typing import Any

import pytest

from fedasync import strategies
from fedasync.federated.arrays import WorkloadError
from fedasync.runs.run import Run
from fedasync.simulation import Population, RunRequest, Settings, simulate, simulate_together
from fedasync.simulation.laws import Constant, Exponential, Lognormal
from fedasync.workloads import Digits, Quadratic
from fedasync.workloads.protocol import Task

STRATEGIES = (
    strategies.fedavg(cohort=4, keep=3),
    strategies.fedasync(concurrency=5),
    strategies.fedbuff(concurrency=6, buffer_size=3, max_staleness=2),
    strategies.fedfa(concurrency=3, window=4, lease_timeout_s=9.0),
)
LAWS = (Constant(5.0), Exponential(4.0), Lognormal(6.0, 1.0))


def weights(run: Run) -> bytes:
    assert run.model is not None
    return bytes(run.model.values.numpy().tobytes())


def requests(workloads: list[Any], **limits: Any) -> list[RunRequest]:
    """Every strategy with every workload, the laws in turn."""
    pairs = [(strategy, workload) for strategy in STRATEGIES for workload in workloads]
    return [
        RunRequest(strategy, Population(duration_s=LAWS[i % 3]), workload, Settings(**limits), seed=i % 2)
        for i, (strategy, workload) in enumerate(pairs)
    ]


@pytest.mark.parametrize("kind", ["mlp", "cnn", "quadratic"])
def test_a_run_in_company_is_the_run_alone_byte_for_byte(kind: Any) -> None:
    workloads: list[Any] = [
        Quadratic(9, seed=seed) if kind == "quadratic" else Digits(clients=9, model=kind, hidden=8, seed=seed)
        for seed in (0, 1)
    ]
    asked = requests(workloads, time_s=30.0, evaluate_every_s=15.0)
    together = dict(simulate_together(asked))
    assert sorted(together) == list(range(len(asked)))
    for place, request in enumerate(asked):
        run = together[place]
        assert isinstance(run, Run), run
        alone = simulate(request.strategy, request.population, request.workload, request.settings, seed=request.seed)
        assert run.events.equals(alone.events)
        assert run.metrics.equals(alone.metrics)
        assert weights(run) == weights(alone)


def test_batched_and_one_by_one_tell_the_same_story() -> None:
    """The log to the byte, the weights to rounding."""
    for request in requests([Digits(clients=9, hidden=8)], time_s=60.0):
        one, all_at_once = (
            simulate(
                request.strategy,
                request.population,
                request.workload,
                time_s=60.0,
                training=training,
                seed=request.seed,
            )
            for training in ("one_by_one", "batched")
        )
        assert one.events.equals(all_at_once.events)
        assert one.model is not None
        assert all_at_once.model is not None
        difference = (one.model.values - all_at_once.model.values).abs().max()
        assert difference <= 1e-5 * one.model.values.abs().max()


class Breaks(Quadratic):
    """Client 3 cannot work."""

    def train(self, task: Task) -> Any:
        if task.client == 3:
            raise RuntimeError("no battery")
        return super().train(task)

    def train_batch(self, work: Any, memory_bytes: int) -> Any:
        return [workload.train(task) for workload, task in work]


def test_what_one_run_raises_is_its_own() -> None:
    sound, ill = Quadratic(6), Breaks(6)
    population, settings = Population(duration_s=Exponential(1.0)), Settings(updates=40)
    asked = [RunRequest(STRATEGIES[1], population, workload, settings) for workload in (sound, ill, sound)]
    asked.append(RunRequest(strategies.fedbuff(concurrency=99), population, sound, settings))
    found = dict(simulate_together(asked))
    assert isinstance(found[1], WorkloadError)
    assert "client 3, lease" in str(found[1])
    assert "train raised RuntimeError: no battery" in str(found[1])
    assert isinstance(found[3], ValueError)
    alone = simulate(STRATEGIES[1], population, sound, settings)
    for place in (0, 2):
        run = found[place]
        assert isinstance(run, Run)
        assert run.events.equals(alone.events)
        assert weights(run) == weights(alone)


def test_timing_only_runs_and_learning_ones_may_stand_side_by_side() -> None:
    population = Population(clients=6, duration_s=Exponential(1.0))
    asked = [RunRequest(STRATEGIES[1], population, w, Settings(updates=30)) for w in (None, Quadratic(6), None)]
    runs = [run for _, run in sorted(simulate_together(asked))]
    assert [isinstance(run, Run) and run.model is not None for run in runs] == [False, True, False]
