"""Contributions a second and the time of a round, against their closed forms.

Every bound is stated in standard errors of the measured mean, at fixed seeds.
"""

from __future__ import annotations

from math import gamma, sqrt

import numpy as np
import pytest

from fedasync.simulation.laws import Constant, Exponential, HalfNormal, Law, Lognormal, Pareto, Uniform, Values
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff

from .worlds import column, constant_times, play, rows


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def rounds_of(law: Law, size: int, keep: int | None = None, rounds: int = 250) -> np.ndarray:
    """Seconds of each round."""
    simulation = play(fedavg(cohort=size, keep=keep), Population(size, law), seed=3, versions=rounds)
    return np.diff(column(simulation.log, "time_s", "committed"), prepend=0.0)


def assert_mean_is(expected: float, sample: np.ndarray, errors: float = 3.5) -> None:
    error = sample.std(ddof=1) / sqrt(len(sample))
    assert abs(sample.mean() - expected) <= errors * error, (
        f"{sample.mean():.4f} ± {error:.4f}, expected {expected:.4f}"
    )


def pareto_maximum(n: int, alpha: float) -> float:
    """E[max of n] in units of the minimum."""
    return gamma(n + 1) * gamma(1 - 1 / alpha) / gamma(n + 1 - 1 / alpha)


@pytest.mark.parametrize(
    ("law", "variation"),
    [
        (Constant(1.0), 0.0),
        (Exponential(1.0), 1.0),
        (Uniform(0.0, 2.0), 1 / sqrt(3)),
        (HalfNormal(sqrt(np.pi / 2)), sqrt(np.pi / 2 - 1)),
        (Lognormal(1.0, 0.6), sqrt(np.exp(0.36) - 1)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_concurrency_of_n_brings_n_over_mean_duration_contributions_a_second(law: Law, variation: float) -> None:
    """Renewal theory: of n processes over T, n·(T/μ + (c² − 1)/2) ± c·√(n·T/μ); a constant one ends at T itself."""
    n, end_s = 50, 80.0
    simulation = play(fedasync(concurrency=n), Population(n, law), seed=1, time_s=end_s)
    arrivals = simulation.coordinator.ledger.consumed
    offset = (variation**2 - 1) / 2 if variation else 0.0
    assert abs(arrivals - n * (end_s / law.mean + offset)) <= 3.5 * variation * sqrt(n * end_s / law.mean)


def test_always_on_clients_of_different_speed_bring_the_sum_of_their_rates() -> None:
    """Exponential times make the sum a Poisson process: its variance is its mean."""
    slowness = tuple(np.linspace(0.5, 5.0, 20))
    population = Population(20, Exponential(1.0), slowness=Values(slowness))
    expected = 300 * sum(1 / s for s in slowness)
    for strategy in (fedasync(concurrency=20), fedbuff(concurrency=20, buffer_size=7)):
        simulation = play(strategy, population, seed=2, time_s=300.0, selection="same_client")
        ledger = simulation.coordinator.ledger
        arrivals = ledger.consumed + ledger.buffered
        assert abs(arrivals - expected) <= 3 * sqrt(expected)
        assert simulation.coordinator.version == (arrivals if strategy.name == "fedasync" else arrivals // 7)


@pytest.mark.parametrize("n", [2, 10, 30])
def test_a_round_of_exponential_clients_takes_the_harmonic_number(n: int) -> None:
    assert_mean_is(harmonic(n), rounds_of(Exponential(1.0), n))


@pytest.mark.parametrize("n", [2, 10, 30])
def test_a_round_of_uniform_clients_takes_2n_over_n_plus_1(n: int) -> None:
    assert_mean_is(2 * n / (n + 1), rounds_of(Uniform(0.0, 2.0), n))


@pytest.mark.parametrize("n", [2, 10])
def test_a_round_of_pareto_clients_takes_its_gamma_form(n: int) -> None:
    assert pareto_maximum(n, 2.5) * 0.6 == pytest.approx({2: 1.25, 10: 2.271}[n], abs=5e-4)
    assert_mean_is(pareto_maximum(n, 2.5), rounds_of(Pareto(1.0, 2.5), n))


def test_a_round_of_shifted_exponential_clients_takes_shift_plus_scaled_harmonic_number() -> None:
    population = Population(10, Exponential(0.5), seconds_per_sample=Constant(0.25), samples=Constant(2.0))
    simulation = play(fedavg(cohort=10), population, seed=5, versions=400)
    lengths = np.diff(column(simulation.log, "time_s", "committed"), prepend=0.0)
    assert_mean_is(0.5 + 0.5 * harmonic(10), lengths)


def test_over_selection_takes_h_n_minus_h_n_minus_g() -> None:
    lengths = rounds_of(Exponential(1.0), 13, keep=10)
    assert_mean_is(harmonic(13) - harmonic(3), lengths)
    assert harmonic(13) - harmonic(3) == pytest.approx(1.347, abs=5e-4)


def test_over_selection_cancels_who_is_late_and_gives_the_slots_back() -> None:
    simulation = play(fedavg(cohort=13, keep=10), Population(13, Exponential(1.0)), seed=3, versions=50)
    ledger = simulation.coordinator.ledger
    assert ledger.consumed == 500
    assert ledger.cancelled == {"over-selected": 150}
    assert ledger.admitted == 650
    assert simulation.coordinator.round_started == 0


def test_speed_up_over_waiting_is_e_max_over_e_t() -> None:
    """The ratio of measured rates at equal concurrency: H_10 = 2.929."""
    population = Population(10, Exponential(1.0))
    eager = play(fedasync(concurrency=10), population, seed=4, time_s=400.0).coordinator.ledger.consumed
    waiting = play(fedavg(cohort=10), population, seed=4, time_s=400.0).coordinator.ledger.consumed
    assert eager / waiting == pytest.approx(harmonic(10), rel=0.08)


def test_a_deadline_ends_the_round_with_those_who_made_it() -> None:
    """Three clients of 1, 2 and 10 s and a time-out of 5 s: the round takes 5 s and has two participants."""
    run = simulate(fedavg(cohort=3, lease_timeout_s=5.0), constant_times(1.0, 2.0, 10.0), versions=1)
    assert run.summary["time_s"] == 5.0
    assert rows(run, "consumed", "time_s", "worker") == [(5.0, 0), (5.0, 1)]
    assert rows(run, "failed", "time_s", "worker", "reason") == [(5.0, 2, "timeout")]


def test_fedbuff_makes_its_first_step_of_two_from_the_same_clients_at_2_s() -> None:
    run = simulate(
        fedbuff(concurrency=3, buffer_size=2), constant_times(1.0, 2.0, 10.0), selection="same_client", versions=1
    )
    assert run.summary["time_s"] == 2.0


def test_a_megabyte_at_300_megabit_takes_26_7_ms_each_way() -> None:
    rate = Constant(300e6 / 8)
    one_way = Population(1, Constant(0.0), downlink_bytes_per_second=rate, model_bytes=1_000_000)
    both = Population(
        1, Constant(0.0), downlink_bytes_per_second=rate, uplink_bytes_per_second=rate, model_bytes=1_000_000
    )
    assert Clients(one_way, 0).work_s(0, 0, 0) == pytest.approx(0.0266667, abs=5e-8)
    assert Clients(both, 0).work_s(0, 0, 0) == pytest.approx(0.0533333, abs=5e-8)
    assert simulate(fedasync(concurrency=1), both, updates=1).summary["time_s"] == pytest.approx(0.0533333, abs=5e-8)


def test_work_is_slowness_times_duration_and_samples_plus_the_network() -> None:
    population = Population(
        2,
        Constant(3.0),
        seconds_per_sample=Constant(0.5),
        slowness=Values((1.0, 4.0)),
        samples=Values((10.0, 20.0)),
        downlink_bytes_per_second=Values((100.0, 50.0)),
        uplink_bytes_per_second=Values((10.0, 20.0)),
        model_bytes=1000,
    )
    clients = Clients(population, 0)
    assert clients.work_s(0, 0, 0) == 1 * (3 + 5) + 10 + 100
    assert clients.work_s(1, 0, 0) == 4 * (3 + 10) + 20 + 50
