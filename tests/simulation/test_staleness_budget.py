"""The staleness budget under the clock: η = 0 is a synchronous system, and step times of a known small system.

The system: 64 slots, batches of 64, lognormal work of mean 1 s and shape σ, a training step of 1 s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import erf, exp, log, sqrt
from typing import Literal

import numpy as np
import pytest

from fedasync.core import Barrier, Cohort, StalenessBudget, Strategy, SyncBudget, Tumbling
from fedasync.runs.measures import event_table
from fedasync.simulation.federated import FederatedSimulation
from fedasync.simulation.laws import Constant, Exponential, Lognormal
from fedasync.simulation.population import Population

from .worlds import column, play, timing

SLOTS = 64


@cache
def system(sigma: float, eta: int, steps: int = 200) -> FederatedSimulation:
    law = Lognormal(1.0, sigma) if sigma else Constant(1.0)
    budget = timing(StalenessBudget(eta, SLOTS, limit=SLOTS), Tumbling(SLOTS))
    return play(budget, Population(SLOTS, law), seed=1, versions=steps, server_step_s=1.0)


def step_time(simulation: FederatedSimulation) -> float:
    return simulation.now / simulation.coordinator.version


def expected_maximum(sigma: float, n: int) -> float:
    """E[max of n] of the lognormal: ∫ (1 − F(t)^n) dt."""
    t = np.exp(np.linspace(-12, 8, 20_001))
    cdf = np.array([0.5 * (1 + erf((log(x) + sigma * sigma / 2) / (sigma * sqrt(2)))) for x in t])
    return float(np.trapezoid(1 - cdf**n, t) + exp(-12))


@pytest.mark.parametrize("workers", [5, 9])
@pytest.mark.parametrize("server_step_s", [0.0, 0.5])
@pytest.mark.parametrize(
    "admission",
    [
        StalenessBudget(0, 5),
        StalenessBudget(0, 5, limit=5),
        StalenessBudget(0, 5, limit=100),
        StalenessBudget(0, 5, in_batches=True),
        StalenessBudget(0, 5, limit_samples=20, samples=4),
        SyncBudget(0.0, 5, 1),
    ],
    ids=repr,
)
def test_eta_0_is_a_synchronous_system_event_for_event(
    workers: int, server_step_s: float, admission: StalenessBudget | SyncBudget
) -> None:
    budget = Strategy("either", admission, Tumbling(5), None)
    cohort = replace(budget, admission=Cohort(5), buffer=Barrier())
    ours, theirs = (
        play(s, Population(workers, Exponential(1.0)), seed=3, versions=30, server_step_s=server_step_s)
        for s in (budget, cohort)
    )
    left, right = event_table(ours.log), event_table(theirs.log)
    shorter = min(len(left), len(right))
    assert left[:shorter].equals(right[:shorter])
    assert len(left) - shorter <= 5, "a barrier gives out the next leases a moment later"
    assert set(column(ours.log, "staleness", "consumed")) == {0}


@pytest.mark.parametrize(("eta", "seconds"), [(0, 2.0), (1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)])
def test_equal_work_takes_2_s_a_step_in_turn_and_1_s_overlapped(eta: int, seconds: float) -> None:
    """Exactly, from the second step on: the first needs its work before it can begin."""
    times = column(system(0.0, eta, steps=30).log, "time_s", "committed")
    assert set(np.diff(times)) == {seconds}
    assert times[0] == 2.0


@cache
def one_step(sigma: float, steps: int = 300) -> FederatedSimulation:
    law = Lognormal(1.0, sigma) if sigma else Constant(1.0)
    strategy = timing(StalenessBudget(1, SLOTS, in_batches=True), Tumbling(SLOTS))
    return play(strategy, Population(SLOTS, law), seed=1, versions=steps, server_step_s=1.0)


def test_without_a_tail_any_budget_is_one_step_overlap() -> None:
    """Exactly: every version comes at the same time."""
    overlapped = column(one_step(0.0, 30).log, "time_s", "committed").tolist()
    for eta in (1, 2, 8):
        assert column(system(0.0, eta, steps=30).log, "time_s", "committed").tolist() == overlapped


@pytest.mark.parametrize(("sigma", "seconds"), [(0.5, 2.95), (1.0, 7.19)])
def test_one_step_overlap_hides_the_training_and_not_the_slowest(sigma: float, seconds: float) -> None:
    """max(T, generation) a step, within 3.5 standard errors; 2.95 and 7.19 s in the table, to its sampling error."""
    times = np.diff(column(one_step(sigma).log, "time_s", "committed"))
    expected = expected_maximum(sigma, SLOTS)
    assert expected == pytest.approx(seconds, rel=0.02)
    assert abs(times.mean() - expected) < 3.5 * times.std(ddof=1) / sqrt(len(times))
    assert set(column(one_step(sigma).log, "staleness", "consumed")) == {0, 1}


@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("order", ["oldest_first", "dispatch"])
def test_a_bound_that_the_trainer_waits_at_is_met_and_costs_time_but_no_work(
    sigma: float, order: Literal["oldest_first", "dispatch"]
) -> None:
    """Between a gate alone, which is faster, and one-step overlap, which waits for its slowest every time."""
    budget = StalenessBudget(2, SLOTS, limit=SLOTS)
    waiting = timing(budget, Tumbling(SLOTS, order), max_staleness=2, at_bound="wait")
    law = Lognormal(1.0, sigma)
    simulation = play(waiting, Population(SLOTS, law), seed=1, versions=200, server_step_s=1.0)
    ledger = simulation.coordinator.ledger
    assert column(simulation.log, "staleness", "consumed").max() <= 2
    assert ledger.consumed == 200 * SLOTS
    assert not ledger.rejected
    assert step_time(system(sigma, 2)) <= step_time(simulation) <= step_time(one_step(sigma))


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_without_overlap_a_step_takes_training_and_the_slowest(sigma: float) -> None:
    """T + E[max of 64] within 3.5 standard errors; 3.95 and 8.17 s in the table, to its sampling error."""
    times = np.diff(column(system(sigma, 0).log, "time_s", "committed"), prepend=0.0)
    expected = 1.0 + expected_maximum(sigma, SLOTS)
    assert expected == pytest.approx({0.5: 3.95, 1.0: 8.17}[sigma], rel=0.02)
    assert abs(times.mean() - expected) < 3.5 * times.std(ddof=1) / sqrt(len(times))


@pytest.mark.parametrize(
    ("sigma", "eta", "seconds", "room"),
    [(0.5, 1, 1.45, 0.04), (1.0, 1, 1.40, 0.06), (0.5, 2, 1.02, 0.03), (1.0, 2, 1.03, 0.04), (1.0, 4, 1.01, 0.03)],
)
def test_step_times_of_the_table_are_met(sigma: float, eta: int, seconds: float, room: float) -> None:
    assert step_time(system(sigma, eta)) == pytest.approx(seconds, rel=room)


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_a_larger_budget_never_makes_steps_slower_and_none_beats_training_and_generation(sigma: float) -> None:
    times = [step_time(system(sigma, eta)) for eta in (0, 1, 2, 4)]
    assert all(sooner >= later - 0.02 for sooner, later in pairwise(times))
    assert all(time >= 1.0 for time in times)


@pytest.mark.parametrize(("sigma", "eta"), [(0.5, 1), (1.0, 1), (0.5, 2), (1.0, 4)])
def test_mean_age_is_work_held_over_batch_and_at_most_eta(sigma: float, eta: int) -> None:
    """Little: mean age = (in flight + buffered) / B, within half a version; the maximum may exceed η.

    What the server is applying counts as neither: one batch for as long as it steps.
    """
    simulation = system(sigma, eta)
    log = simulation.log
    change = {"admitted": 1, "consumed": -1}
    moves = np.concatenate([np.full(len(column(log, "time_s", kind)), sign) for kind, sign in change.items()])
    times = np.concatenate([column(log, "time_s", kind) for kind in change])
    order = np.argsort(times, kind="stable")
    held = np.cumsum(moves[order])[:-1] @ np.diff(times[order]) / (times.max() - times.min())
    age = column(log, "staleness", "consumed").mean()
    stepping = simulation.server_busy_s / simulation.now
    assert abs(age - (held / SLOTS - stepping)) <= 0.5
    assert age <= eta
    assert column(log, "staleness", "consumed").max() > eta


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_a_budget_with_dropouts_and_crashes_goes_on(eta: int) -> None:
    strategy = timing(StalenessBudget(eta, 8, limit=16), Tumbling(8, "oldest_first"), lease_timeout_s=5.0)
    population = Population(16, Exponential(1.0), dropout_probability=0.2, crash_probability=0.1)
    simulation = play(strategy, population, seed=2, versions=40, server_step_s=0.5)
    assert simulation.coordinator.version == 40
    assert simulation.coordinator.ledger.imbalance == 0
    assert simulation.coordinator.ledger.failed.total() > 50
