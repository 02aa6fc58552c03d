"""What users of other frameworks ran into, as small inputs; each test names the thread."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from fedasync.core import Constant
from fedasync.simulation.availability import OnOff
from fedasync.simulation.laws import Exponential, Pareto
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import STRATEGIES, fedasync, fedavg, fedbuff, fedfa
from fedasync.workloads import Quadratic

from .worlds import Mapped, constant_times, rows, series

PLAIN = Constant()


def test_flower_469_an_asynchronous_strategy_makes_a_version_of_every_arrival() -> None:
    run = simulate(fedasync(concurrency=3), constant_times(1.0, 1.7, 2.3), Quadratic(3), time_s=20.0)
    arrivals = len(rows(run, "delivered", "lease"))
    assert run.summary["versions"] == arrivals == run.summary["consumed"] > 30


@pytest.mark.parametrize(
    "strategy", [fedasync(concurrency=9), fedbuff(concurrency=9, buffer_size=4), fedfa(concurrency=9), fedavg(cohort=9)]
)
def test_fedlab_benchmarks_31_staleness_lies_between_0_and_the_servers_version(strategy: object) -> None:
    """It was ±1.14e13 where the time of a model travelled through uninitialised memory."""
    run = simulate(strategy, Population(9, Pareto(0.1, 1.2)), seed=3, time_s=60.0)  # type: ignore[arg-type]
    for kind in ("delivered", "consumed"):
        for tau, version, base in rows(run, kind, "staleness", "version", "base_version"):
            assert type(tau) is int
            assert 0 <= tau == version - base <= version


def test_fedscale_158_events_happen_in_the_order_of_their_times() -> None:
    population = Population(30, Pareto(0.1, 1.1), availability=OnOff(Exponential(5.0), Exponential(5.0)))
    run = simulate(fedbuff(concurrency=20, buffer_size=3), population, seed=1, time_s=60.0)
    assert np.diff(run.events["time_s"].to_numpy()).min() >= 0
    started = dict(rows(run, "admitted", "lease", "time_s"))
    assert all(started[lease] <= t for lease, t in rows(run, "delivered", "lease", "time_s"))


@pytest.mark.parametrize("simultaneous", ["one_by_one", "together"])
def test_two_arrivals_at_one_instant_are_mixed_in_dispatch_order(
    simultaneous: Literal["one_by_one", "together"],
) -> None:
    """w = 0, α = 1/2, models 1 then 2: 1.25; the other order gives 1, and averaging both 0.75."""
    workload = Mapped(2, lambda client, w: w * 0 + (client + 1))
    strategy = fedasync(
        concurrency=2,
        alpha=0.5,
        staleness=PLAIN,
        proximal_mu=0.0,
        simultaneous=simultaneous,
    )
    run = simulate(strategy, constant_times(1.0, 1.0), workload, time_s=1.0, selection="same_client")
    assert series(run)[1.0] == 1.25


def test_ties_are_ordered_by_dispatch_even_when_the_later_lease_was_the_shorter() -> None:
    """Client 0 takes 4 s; client 1 works 1 s at a time and meets it at 4: the older lease comes first."""
    run = simulate(fedasync(concurrency=2), constant_times(4.0, 1.0), time_s=4.0, selection="same_client")
    assert [worker for t, worker in rows(run, "delivered", "time_s", "worker") if t == 4.0] == [0, 1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_fedscale_132_one_word_switches_between_synchronous_and_asynchronous(name: str) -> None:
    size = {"cohort": 4} if name in ("fedavg", "fedprox") else {"concurrency": 4}
    run = simulate(STRATEGIES[name](**size), Population(duration_s=Exponential(1.0)), Quadratic(6), time_s=30.0)
    assert run.summary["strategy"] == name
    assert run.summary["versions"] > 3


def test_nvflare_5239_the_degenerate_setting_equals_fedavg() -> None:
    """Buffer = concurrency = clients and equal times: the curve of FedAvg."""
    buff = fedbuff(concurrency=5, buffer_size=5, staleness=PLAIN, simultaneous="together")
    curves = [
        series(simulate(s, constant_times(*[2.0] * 5), Quadratic(5, start=3.0), time_s=20.0, evaluate_every_s=1.0))
        for s in (buff, fedavg(cohort=5))
    ]
    assert curves[0].keys() == curves[1].keys()
    assert list(curves[0].values()) == pytest.approx(list(curves[1].values()), abs=1e-12)


def test_flower_1963_a_large_population_costs_nothing_an_event() -> None:
    """A hundred thousand clients, twenty at work: the log holds the leases of those, and nobody else."""
    run = simulate(fedasync(concurrency=20), Population(100_000, Exponential(1.0)), updates=50)
    assert run.summary["admitted"] == 70
    assert run.summary["consumed"] == 50
