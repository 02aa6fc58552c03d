"""Flower's server and the simulation, given the same durations, give the same log, metrics and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedasync as fa
from fedasync.core import Strategy
from fedasync.federated.limits import Limits
from fedasync.flower.serving import Deployment, serve
from fedasync.flower.settings import DeploymentSettings, with_deadline
from fedasync.runs.run import Run
from fedasync.simulation import Clients
from fedasync.simulation.laws import Exponential
from fedasync.workloads import Quadratic

from ..simulation.rows import CLIENTS, KNOBS, row
from .fake_grid import FakeGrid, VirtualClock


def both(strategy: Strategy, population: fa.Population, *, seed: int = 3, **limits: Any) -> tuple[Run, Run]:
    """The run under Flower, its replies as late as the simulation's, and the simulated run."""
    limits.setdefault("evaluate_every_s", 5.0)
    workload = Quadratic(clients=CLIENTS, seed=seed)
    clients = Clients(population, seed, workload.client_samples())
    clock = VirtualClock()
    most = getattr(strategy.admission, "most_steps", None)

    def ends(client: int, turn: int, lease: int, steps: int | None) -> float:
        return clients.lease_s(client, turn, lease, 1.0 if steps is None else steps / most)

    grid = FakeGrid(workload, clock, ends)
    settings = DeploymentSettings(profile_s=[clients.mean_work_s(client) for client in range(CLIENTS)])
    deployed = serve(grid, Deployment(strategy, workload, Limits(**limits), settings, seed), clock)
    simulated = fa.simulate(
        with_deadline(strategy, settings),
        population,
        workload,
        seed=seed,
        training="one_by_one",
        cancelled_clients="finish",
        **limits,
    )
    return deployed, simulated


def assert_same(deployed: Run, simulated: Run) -> None:
    assert deployed.events.equals(simulated.events)
    assert deployed.metrics.equals(simulated.metrics)
    assert deployed.model is not None
    assert simulated.model is not None
    assert torch.equal(deployed.model.values, simulated.model.values)
    assert deployed.summary["ledger"] == simulated.summary["ledger"]


@pytest.mark.parametrize("name", list(KNOBS))
def test_the_same_log_and_weights(name: str) -> None:
    deployed, simulated = both(row(name), fa.Population(CLIENTS, Exponential(10.0)), updates=60)
    assert deployed.summary["consumed"] >= 60
    assert_same(deployed, simulated)
