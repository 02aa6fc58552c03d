"""Learning on real data: every strategy reaches the accuracy that the studies aim at."""

from __future__ import annotations

import pytest

from fedasync.core import Strategy
from fedasync.simulation import Population, simulate
from fedasync.simulation.laws import Lognormal
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa, fedprox
from fedasync.workloads import Digits, Dirichlet, LocalTraining

LOCAL = LocalTraining(epochs=4, batch_size=64, learning_rate=1.0)


@pytest.mark.parametrize(
    "strategy",
    [
        fedavg(cohort=10),
        fedavg(cohort=10, keep=8),
        fedprox(cohort=10),
        fedasync(concurrency=10),
        fedbuff(concurrency=10, buffer_size=5),
        fedfa(concurrency=10),
    ],
    ids=["fedavg", "fedavg over-selected", "fedprox", "fedasync", "fedbuff", "fedfa"],
)
def test_every_strategy_reaches_93_per_cent_on_digits_dealt_unevenly(strategy: Strategy) -> None:
    run = simulate(
        strategy,
        Population(duration_s=Lognormal(10.0, 0.25)),
        Digits(clients=60, hidden=64, partition=Dirichlet(0.5), local=LOCAL),
        time_s=700.0,
        evaluate_every_s=10.0,
        target={"accuracy": 0.93},
        stop_at_target=True,
    )
    assert run.summary["ended"] == "target", run.summary["best"]
