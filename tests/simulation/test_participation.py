"""Who takes part: always-on clients arrive in proportion to their speed, and pay for it with staleness."""

from __future__ import annotations

import numpy as np
import pytest

from fedasync.core import Concurrency, Tumbling
from fedasync.simulation.federated import FederatedSimulation
from fedasync.simulation.laws import Exponential, Law, Uniform, Values
from fedasync.simulation.population import Population
from fedasync.strategies import fedavg

from .worlds import column, constant_times, play, timing

SLOWNESS = (1.0, 1.5, 2.5, 4.0, 8.0, 10.5)


def always_on(law: Law, k: int, updates: int = 8000) -> FederatedSimulation:
    population = Population(len(SLOWNESS), law, slowness=Values(SLOWNESS))
    return play(timing(Concurrency(len(SLOWNESS)), Tumbling(k)), population, seed=11, updates=updates)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("law", [Exponential(1.0), Uniform(0.0, 2.0)], ids=lambda law: law.kind)
def test_arrival_shares_are_rates_and_share_times_staleness_is_one(law: Law, k: int) -> None:
    """p_i = (1/E[t_i]) / Σ 1/E[t_j] and p_i·(K·τ_i + 1) = 1, within 3 standard errors of a Poisson count."""
    simulation = always_on(law, k)
    workers = column(simulation.log, "worker", "delivered")
    tau = column(simulation.log, "staleness", "delivered")
    rates = 1 / np.array(SLOWNESS)
    for client, expected in enumerate(rates / rates.sum()):
        mine = workers == client
        count = mine.sum()
        share = count / len(workers)
        assert share == pytest.approx(expected, rel=3 / np.sqrt(count))
        assert share * (k * tau[mine].mean() + 1) == pytest.approx(1, rel=3 / np.sqrt(count))


@pytest.mark.parametrize("k", [1, 3])
def test_staleness_steps_and_age_of_each_client_add_up_to_the_versions(k: int) -> None:
    """Exactly: client i is on some version at every moment, so Σ τ + (steps that it completed) + its age = T."""
    simulation = always_on(Exponential(1.0), k, updates=900)
    workers = column(simulation.log, "worker", "delivered")
    tau = column(simulation.log, "staleness", "delivered")
    last_of_each_step = workers[k - 1 :: k]
    versions = simulation.coordinator.version
    for lease in simulation.coordinator.leases:
        mine = workers == lease.worker
        completed = int((last_of_each_step == lease.worker).sum())
        assert tau[mine].sum() + completed + (versions - lease.base_version) == versions


def test_a_large_pool_that_draws_at_random_gives_every_client_the_same_share_of_leases() -> None:
    """χ² of dispatches over 40 clients, 4 of them at work at a time: 39 degrees of freedom, mean 39, s.d. 8.8."""
    slow = tuple(1.0 + 9.0 * (client % 2) for client in range(40))
    population = Population(40, Exponential(1.0), slowness=Values(slow))
    simulation = play(timing(Concurrency(4), Tumbling(1)), population, seed=5, updates=4000)
    counts = np.bincount(column(simulation.log, "worker", "admitted"), minlength=40)
    expected = counts.sum() / 40
    assert ((counts - expected) ** 2 / expected).sum() < 39 + 4 * 8.8


def test_same_client_prefers_who_became_free_longest_ago() -> None:
    """A round of three that end at 2, 3 and 1 s: the next is given out in that order."""
    simulation = play(fedavg(cohort=3), constant_times(2.0, 3.0, 1.0, 1.0), versions=3, selection="same_client")
    assert list(column(simulation.log, "worker", "admitted")) == [0, 1, 2, 2, 0, 1, 2, 0, 1]


def test_same_client_keeps_the_first_clients_of_a_larger_population_at_work() -> None:
    simulation = play(
        timing(Concurrency(3), Tumbling(1)), Population(50, Exponential(1.0)), updates=200, selection="same_client"
    )
    assert set(column(simulation.log, "worker", "admitted")) == {0, 1, 2}
