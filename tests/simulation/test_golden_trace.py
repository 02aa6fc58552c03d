"""A trace worked out by hand in exact rationals: three clients, three rules, every number compared with ==.

Clients A, B, C take 2, 3.5 and 5.2 s and start together from w = 16; x = (w_start + c)/2 with c = 0, 4, 8. The same
client starts again at once after the server step; K = 2 where there is a buffer. No two arrivals meet before t = 14.
"""

from __future__ import annotations

from typing import Literal

import pytest

from fedasync.core import Constant, Strategy
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedbuff, fedfa
from fedasync.workloads import Quadratic

from .worlds import constant_times, play, rows, series, total_staleness

A, B, C = 0, 1, 2
ARRIVALS = [(2.0, A), (3.5, B), (4.0, A), (5.2, C), (6.0, A), (7.0, B), (8.0, A)]
CLIENTS = constant_times(2.0, 3.5, 5.2)

FEDFA = fedfa(concurrency=3, window=2)
FEDBUFF = fedbuff(concurrency=3, buffer_size=2, server_learning_rate=1.0, staleness=Constant())
FEDASYNC = fedasync(concurrency=3, alpha=0.5, staleness=Constant(), proximal_mu=0.0)

TRACES = {
    "fedfa": (FEDFA, [16, 9, 9, 10, 33 / 4, 11 / 2, 85 / 16], [0, 0, 1, 2, 1, 3, 1]),
    "fedbuff": (FEDBUFF, [16, 9, 9, 3, 3, -1 / 2, -1 / 2], [0, 0, 1, 1, 1, 1, 1]),
    "fedasync": (FEDASYNC, [12, 11, 17 / 2, 41 / 4, 29 / 4, 59 / 8, 11 / 2], [0, 1, 1, 3, 1, 3, 1]),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", TRACES)
def test_the_golden_trace_is_met_exactly(name: str, dtype: Literal["float32", "float64"]) -> None:
    strategy, values, staleness = TRACES[name]
    workload = Quadratic(3, centres=(0.0, 4.0, 8.0), contraction=0.5, start=16.0, dtype=dtype)
    run = simulate(strategy, CLIENTS, workload, time_s=8.0, evaluate_every_s=0.1, selection="same_client")
    measured = series(run)
    assert [measured[time_s] for time_s, _ in ARRIVALS] == values
    assert measured[0.0] == 16
    assert measured[19 * 0.1] == 16, "the grid point before the first arrival still sees version 0"
    assert rows(run, "delivered", "time_s", "worker", "staleness") == [
        (time_s, client, tau) for (time_s, client), tau in zip(ARRIVALS, staleness, strict=True)
    ]
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])


def test_fedfas_first_events_come_in_the_order_that_the_rules_prescribe() -> None:
    run = simulate(FEDFA, CLIENTS, time_s=4.0, selection="same_client")
    told = run.events.select("time_s", "kind", "lease", "worker", "base_version", "version", "staleness").rows()
    assert told == [
        (0.0, "admitted", 0, A, 0, 0, None),
        (0.0, "admitted", 1, B, 0, 0, None),
        (0.0, "admitted", 2, C, 0, 0, None),
        (2.0, "delivered", 0, A, 0, 0, 0),
        (2.0, "admitted", 3, A, 0, 0, None),
        (3.5, "delivered", 1, B, 0, 0, 0),
        (3.5, "consumed", 0, A, 0, 0, 0),
        (3.5, "consumed", 1, B, 0, 0, 0),
        (3.5, "committed", None, None, None, 1, None),
        (3.5, "published", None, None, None, 1, None),
        (3.5, "admitted", 4, B, 1, 1, None),
        (4.0, "delivered", 3, A, 0, 1, 1),
        (4.0, "consumed", 3, A, 0, 1, 1),
        (4.0, "committed", None, None, None, 2, None),
        (4.0, "published", None, None, None, 2, None),
        (4.0, "admitted", 5, A, 2, 2, None),
    ]


@pytest.mark.parametrize(
    ("strategy", "arrived", "in_flight", "versions"), [(FEDFA, 17, 3, 10), (FEDBUFF, 9, 1, 5)], ids=["fedfa", "fedbuff"]
)
def test_the_worked_check_of_the_conservation_law(
    strategy: Strategy, arrived: int, in_flight: int, versions: int
) -> None:
    simulation = play(strategy, CLIENTS, time_s=12.0, selection="same_client")
    assert simulation.coordinator.version == versions
    assert total_staleness(simulation) == arrived + in_flight == versions * (3 - 1)
    ages = [versions - lease.base_version for lease in simulation.coordinator.leases]
    assert sum(ages) == in_flight
