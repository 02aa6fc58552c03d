"""The closed forms that stand beside measured values: their own numbers, and that runs meet them."""

from __future__ import annotations

import warnings
from math import gamma

import pytest

from fedasync.simulation.closed_forms import expected_order_statistic, speedup_ceiling
from fedasync.simulation.laws import (
    Constant,
    Exponential,
    HalfNormal,
    Law,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Values,
)
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa
from fedasync.workloads import Quadratic

HARMONIC = {n: sum(1 / i for i in range(1, n + 1)) for n in (2, 10, 30, 100, 1000)}


@pytest.mark.parametrize("n", [1, 2, 10, 100, 1000])
def test_exact_maxima_are_met(n: int) -> None:
    harmonic = sum(1 / i for i in range(1, n + 1))
    pareto = gamma(1 - 1 / 2.5) * (gamma(n + 1) / gamma(n + 0.6) if n < 150 else (n + 0.3) ** 0.4)
    assert expected_order_statistic(Exponential(2.0), n, n) == pytest.approx(2 * harmonic, rel=1e-6)
    assert expected_order_statistic(ShiftedExponential(1.0, 2.0), n, n) == pytest.approx(1 + 2 * harmonic, rel=1e-6)
    assert expected_order_statistic(Uniform(0.0, 2.0), n, n) == pytest.approx(2 * n / (n + 1), rel=1e-6)
    assert expected_order_statistic(Pareto(1.0, 2.5), n, n) == pytest.approx(pareto, rel=2e-3)


@pytest.mark.parametrize(
    ("law", "row", "rel"),
    [
        (HalfNormal(1.0), (1.415, 2.359, 2.909, 3.442, 4.316), 5e-3),
        (Lognormal(1.0, 0.25), (1.140, 1.440, 1.628, 1.824, 2.192), 5e-3),
        (Lognormal(1.0, 0.6), (1.328, 2.243, 2.981, 3.89, 5.96), 1e-2),
        (Lognormal(1.0, 1.0), (1.519, 3.411, 5.36, 8.22, 16.5), 2e-2),
        (Pareto(1.0, 2.5), (1.25, 2.271, 3.497, 5.644, 14.16), 2e-3),
        (Exponential(1.0), tuple(HARMONIC.values()), 1e-5),
        (Constant(3.0), (1.0,) * 5, 1e-9),
    ],
    ids=lambda x: getattr(x, "kind", ""),
)
def test_speed_up_ceilings_are_those_of_the_table(law: Law, row: tuple[float, ...], rel: float) -> None:
    for n, ceiling in zip(HARMONIC, row, strict=True):
        assert speedup_ceiling(law, n) == pytest.approx(ceiling, rel=rel)


@pytest.mark.parametrize(
    ("law", "rounds"),
    [
        (Exponential(1.0), (1.347, 1.454, 1.465)),
        (HalfNormal((3.141592653589793 / 2) ** 0.5), (1.387, 1.491, 1.501)),
        (Lognormal(1.0, 0.6), (1.227, 1.292, 1.299)),
        (Lognormal(1.0, 1.0), (1.184, 1.254, 1.269)),
    ],
    ids=lambda x: getattr(x, "kind", ""),
)
def test_over_selection_by_30_per_cent_takes_what_the_table_says(law: Law, rounds: tuple[float, ...]) -> None:
    for g, expected in zip((10, 100, 1000), rounds, strict=True):
        assert expected_order_statistic(law, g, round(1.3 * g)) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.5, 2.0])
def test_heavy_tails_are_integrated_well_and_without_a_warning(alpha: float) -> None:
    for n in (2, 9, 100):
        exact = gamma(n + 1) * gamma(1 - 1 / alpha) / gamma(n + 1 - 1 / alpha)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert expected_order_statistic(Pareto(2.0, alpha), n, n) == pytest.approx(2 * exact, rel=1e-5)


@pytest.mark.parametrize("k", [0, 6])
def test_a_rank_outside_the_sample_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="k must lie in 1 … n = 5"):
        expected_order_statistic(Exponential(1.0), k, 5)


ALIKE = Population(10, Exponential(1.0))
MIXED = Population(4, Exponential(1.0), slowness=Values((1.0, 2.0, 4.0, 8.0)))


@pytest.mark.parametrize(
    ("strategy", "population", "names"),
    [
        (fedasync(concurrency=10), ALIKE, {"mean staleness", "contributions per second"}),
        (fedbuff(concurrency=10, buffer_size=4), ALIKE, {"mean staleness", "contributions per second"}),
        (
            fedbuff(concurrency=10, buffer_size=4, redispatch="before_step"),
            ALIKE,
            {"mean staleness", "contributions per second"},
        ),
        (fedfa(concurrency=4, window=3), MIXED, {"mean staleness", "contributions per second"}),
        (fedavg(cohort=10), ALIKE, {"round time (s)"}),
        (fedavg(cohort=10, keep=7), ALIKE, {"round time (s)"}),
    ],
)
def test_runs_meet_the_forms_that_apply_to_them(strategy: object, population: Population, names: set[str]) -> None:
    """To 5 %: some thousand contributions."""
    run = simulate(strategy, population, seed=1, time_s=500.0, selection="same_client")  # type: ignore[arg-type]
    found = {form["name"]: form for form in run.summary["closed_forms"]}
    assert found.keys() == names
    for form in found.values():
        assert form["measured"] == pytest.approx(form["predicted"], rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "moves"),
    [
        (fedavg(cohort=5), 0.5 / 5),
        (fedavg(cohort=5, keep=4), 0.5 / 4),
        (fedfa(concurrency=5, window=3), 0.5 / 6),
        (fedbuff(concurrency=5, buffer_size=2), None),
    ],
)
def test_the_drift_of_a_biased_workload_is_predicted_where_it_is_known(strategy: object, moves: float | None) -> None:
    workload = Quadratic(5, contraction=1.0, drift=0.5)
    population = Population(5, Exponential(1.0))
    run = simulate(strategy, population, workload, seed=1, time_s=100.0, evaluate_every_s=5.0)  # type: ignore[arg-type]
    drift = [form for form in run.summary["closed_forms"] if form["name"] == "drift per contribution"]
    assert len(drift) == (moves is not None)
    for form in drift:
        assert form["predicted"] == pytest.approx(moves)
        assert form["measured"] == pytest.approx(moves, rel=0.1)


def test_no_closed_form_is_claimed_where_something_is_lost_or_late() -> None:
    lossy = Population(10, Exponential(1.0), dropout_probability=0.1)
    for population, server_step_s in ((lossy, 0.0), (ALIKE, 0.5)):
        run = simulate(fedasync(concurrency=10), population, time_s=30.0, server_step_s=server_step_s)
        assert run.summary["closed_forms"] == []
