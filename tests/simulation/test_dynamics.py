"""Closed-form dynamics: the drift of a biased population, and where delay makes a method unstable."""

from __future__ import annotations

from math import cos, pi

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedasync.core import Constant, Strategy
from fedasync.simulation.laws import Exponential, Lognormal, Pareto, Values
from fedasync.simulation.population import Population
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa
from fedasync.workloads import Quadratic

from .worlds import LAWS, watch

PLAIN = Constant()
DRIFT = 0.25


def velocity(strategy: Strategy, population: Population, arrivals_a_version: int = 1, versions: int = 2000) -> float:
    """Mean movement an arrival, after the first sixth of a run whose clients all return w + d."""
    assert population.clients is not None
    workload = Quadratic(population.clients, contraction=1.0, drift=DRIFT)
    watched, _ = watch(strategy, population, workload, versions=versions, seed=1)
    start = versions // 6
    moved = float(watched.versions[-1] - watched.versions[start])
    return moved / ((versions - start) * arrivals_a_version)


@pytest.mark.parametrize(
    ("law", "n", "k"),
    [(Exponential(1.0), 20, 5), (Exponential(1.0), 10, 10), (Lognormal(1.0, 1.0), 10, 10)],
    ids=lambda x: getattr(x, "kind", x),
)
def test_fedfa_drifts_by_d_over_n_plus_half_of_k_minus_1_an_arrival(law: Exponential, n: int, k: int) -> None:
    v = velocity(fedfa(concurrency=n, window=k), Population(n, law))
    assert v == pytest.approx(DRIFT / (n + (k - 1) / 2), rel=0.03)


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_fedasync_drifts_by_alpha_d_over_1_plus_alpha_n_minus_1(alpha: float) -> None:
    n = 20
    strategy = fedasync(concurrency=n, alpha=alpha, staleness=PLAIN, proximal_mu=0.0)
    v = velocity(strategy, Population(n, Exponential(1.0)))
    assert v == pytest.approx(alpha * DRIFT / (1 + alpha * (n - 1)), rel=0.03)


@pytest.mark.parametrize(("k", "eta"), [(1, 0.5), (5, 1.0), (30, 1.0)])
def test_fedbuff_drifts_by_eta_d_over_k_an_arrival_however_stale(k: int, eta: float) -> None:
    strategy = fedbuff(concurrency=20, buffer_size=k, server_learning_rate=eta, staleness=PLAIN)
    v = velocity(strategy, Population(20, Exponential(1.0)), arrivals_a_version=k, versions=60)
    assert v == pytest.approx(eta * DRIFT / k, rel=1e-12)


def test_fedbuff_drifts_by_the_mean_of_its_staleness_weights() -> None:
    strategy = fedbuff(concurrency=20, buffer_size=5)
    workload = Quadratic(20, contraction=1.0, drift=DRIFT)
    watched, run = watch(strategy, Population(20, Exponential(1.0)), workload, versions=60)
    tau = run.events.filter(run.events["kind"] == "consumed")["staleness"].to_numpy()
    assert float(watched.versions[-1]) == pytest.approx(DRIFT / 5 * ((1.0 + tau) ** -0.5).sum(), rel=1e-12)


def test_fedavg_drifts_by_d_a_round() -> None:
    v = velocity(fedavg(cohort=10), Population(10, Exponential(1.0)), versions=50)
    assert v == pytest.approx(DRIFT, rel=1e-12)


def constant_delay(tau: int, rate: float, versions: int) -> list[float]:
    """w under x = 0 (so Δ = −w_start) with every τ the same: τ + 1 clients of equal time, evenly staggered.

    The first leases take 1, 2, …, n seconds and all later ones n, so one ends each second, n − 1 versions late.
    """
    n = tau + 1
    times = tuple(float(min(lease + 1, n)) for lease in range(versions + n))
    strategy = fedbuff(concurrency=n, buffer_size=1, server_learning_rate=rate, staleness=PLAIN)
    workload = Quadratic(n, contraction=0.0, centres=(0.0,) * n, start=1.0)
    watched, run = watch(strategy, Population(n, Values(times, by="lease")), workload, versions=versions)
    late = run.events.filter(run.events["kind"] == "consumed")["staleness"].to_list()
    assert late == [min(version, tau) for version in range(versions)]
    return [float(w) for w in watched.versions]


def recursion(tau: int, rate: float, versions: int) -> list[float]:
    """w_{t+1} = w_t − a·w_{t−τ}, where w is 1 before time 0."""
    w = [1.0]
    for t in range(versions):
        w.append(w[-1] - rate * w[max(0, t - tau)])
    return w


@pytest.mark.parametrize("tau", [0, 1, 2, 5, 10, 20])
def test_delayed_steps_follow_the_delay_recursion(tau: int) -> None:
    assert constant_delay(tau, 0.3, 120) == pytest.approx(recursion(tau, 0.3, 120), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("tau", "bound"), [(0, 2.0), (1, 1.0), (2, 0.61803), (5, 0.28463), (10, 0.14946), (20, 0.07661)]
)
def test_a_delay_of_tau_is_stable_up_to_2_cos_of_pi_tau_over_2_tau_plus_1(tau: int, bound: float) -> None:
    """Two per cent below the bound the oscillation dies away, two per cent above it grows."""
    exact = 2 * cos(tau * pi / (2 * tau + 1))
    assert exact == pytest.approx(bound, abs=5e-6)
    for factor, grows in ((0.98, False), (1.02, True)):
        # A period takes 4τ + 2 versions, and 2 % of the bound change the amplitude by a share of some 0.01/τ a version.
        w = np.abs(constant_delay(tau, factor * exact, 500 + 60 * tau))
        quarter = len(w) // 4
        assert bool(w[-quarter:].max() > w[quarter : 2 * quarter].max()) == grows


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    strategy=st.sampled_from(
        [fedfa(concurrency=9, window=4), fedfa(concurrency=9, window=9), fedasync(concurrency=9, alpha=0.9)]
    ),
    law=st.sampled_from((*LAWS, "wild")),
    contraction=st.floats(0, 1),
    common=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_fedfa_and_fedasync_with_contracting_clients_stay_in_the_hull_whatever_the_delay(
    strategy: Strategy, law: str, contraction: float, common: bool, seed: int
) -> None:
    """The hull of the start and the centres; with one common centre the distance from it never grows."""
    centres = (1.0,) * 9 if common else tuple(float(c) for c in range(-4, 5))
    workload = Quadratic(9, centres=centres, contraction=contraction, start=6.0)
    delays = Pareto(0.01, 1.05) if law == "wild" else LAWS[law]
    watched, _ = watch(strategy, Population(9, delays), workload, versions=80, seed=seed)
    w = torch.cat(watched.versions)
    rounding = 1e-12
    assert float(w.max()) <= 6.0 + rounding
    assert float(w.min()) >= min(centres) - rounding
