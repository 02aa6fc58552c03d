"""Algebra between methods: each line holds for every implementation of them, update for update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation.server_optimizers import Adagrad, Adam, Sgd, Yogi
from fedasync.aggregation.update import Inputs
from fedasync.core import Concurrency, Constant, Strategy
from fedasync.runs.run import Run
from fedasync.simulation import laws
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import (
    ca2fl,
    fadas,
    fedadagrad,
    fedadam,
    fedasync,
    fedavg,
    fedavgm,
    fedbuff,
    fedfa,
    fednova,
    fedprox,
    fedyogi,
    mifa,
    scaffold,
)
from fedasync.workloads import Quadratic

from .rows import KNOBS, row
from .worlds import LAWS, Mapped, Watched, column, constant_times, play, series, watch

PLAIN = Constant()
quick = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def quadratic(clients: int, **arguments: Any) -> Quadratic:
    return Quadratic(clients, **{"dimensions": 3, "contraction": 0.5, "start": 5.0, "seed": 2, **arguments})


def versions_of(strategy: Strategy, workload: Any, times: Population, **arguments: Any) -> list[Tensor]:
    return watch(strategy, times, workload, **arguments)[0].versions


def assert_same(left: list[Tensor], right: list[Tensor], rel: float = 1e-12) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rel, atol=rel)


def waves(strategy: Strategy) -> Strategy:
    """All arrivals of one instant are looked at before anybody starts again."""
    assert isinstance(strategy.admission, Concurrency)
    return replace(strategy, admission=replace(strategy.admission, simultaneous="together"))


EQUAL = Population(6, laws.Constant(1.0))


@quick
@given(law=st.sampled_from(tuple(LAWS)), n=st.integers(1, 6), seed=st.integers(0, 1000))
def test_fedfa_with_a_window_of_1_is_fedasync_with_alpha_1(law: str, n: int, seed: int) -> None:
    """Bit for bit, and event for event."""
    population = Population(8, LAWS[law])
    fa, fa_run = watch(fedfa(concurrency=n, window=1), population, quadratic(8), seed=seed, updates=60)
    mixing = fedasync(concurrency=n, alpha=1.0, staleness=PLAIN, proximal_mu=0.0)
    asynchronous, asynchronous_run = watch(mixing, population, quadratic(8), seed=seed, updates=60)
    assert len(fa.versions) == 61
    assert all(torch.equal(x, y) for x, y in zip(fa.versions, asynchronous.versions, strict=True))
    assert fa_run.events.equals(asynchronous_run.events)


def test_fedfas_full_waves_are_unweighted_fedavg_and_its_arrivals_in_between_mix_old_and_new() -> None:
    """After j arrivals of a wave w holds n − j models of the last wave and j of this one."""
    n = 6
    workload = quadratic(n, samples=(1, 2, 3, 4, 5, 6))
    fa, _ = watch(waves(fedfa(concurrency=n, window=n)), EQUAL, workload, selection="same_client", time_s=5.0)
    average = versions_of(fedavg(cohort=n), quadratic(n), EQUAL, selection="same_client", time_s=5.0)
    assert len(average) == 6
    full_waves = [fa.versions[0], *fa.versions[1::n]]
    assert_same(full_waves, average)
    wave = [[x.values for x in fa.given[0].entering]]
    wave += [[fa.given[1 + n * r + j].entering[0].values for j in range(n)] for r in range(4)]
    for r in range(4):
        for j in range(1, n + 1):
            mixture = sum(wave[r][j:] + wave[r + 1][:j], torch.zeros(3, dtype=torch.float64)) / n
            torch.testing.assert_close(fa.versions[1 + n * r + j], mixture, rtol=1e-12, atol=1e-12)


def test_fedbuff_of_a_whole_wave_is_fedavg() -> None:
    n = 6
    buff = waves(fedbuff(concurrency=n, buffer_size=n, staleness=PLAIN))
    ours = versions_of(buff, quadratic(n), EQUAL, selection="same_client", versions=8)
    assert_same(ours, versions_of(fedavg(cohort=n), quadratic(n), EQUAL, versions=8))


def test_fedbuff_of_a_whole_wave_is_the_same_under_random_selection() -> None:
    n = 6
    buff = waves(fedbuff(concurrency=n, buffer_size=n, staleness=PLAIN))
    left = versions_of(buff, quadratic(9), Population(9, laws.Constant(1.0)), versions=8, seed=4)
    right = versions_of(fedavg(cohort=n), quadratic(9), Population(9, laws.Constant(1.0)), versions=8, seed=4)
    assert_same(left, right)


@pytest.mark.parametrize("eta", [0.25, 0.7, 1.0])
def test_fedbuff_of_1_takes_each_delta_alone(eta: float) -> None:
    """w ← w + η·(x − w_start), with w_start a version of the past."""
    population = Population(5, laws.Exponential(1.0))
    strategy = fedbuff(concurrency=5, buffer_size=1, server_learning_rate=eta, staleness=PLAIN)
    watched, run = watch(strategy, population, quadratic(5), updates=60)
    consumed = run.events.filter(run.events["kind"] == "consumed").select("worker", "base_version").rows()
    centres = torch.from_numpy(quadratic(5).centres)
    w = [watched.versions[0]]
    for worker, base in consumed:
        x = centres[worker] + 0.5 * (w[base] - centres[worker])
        w.append(w[-1] + eta * (x - w[base]))
    assert_same(watched.versions, w)


@pytest.mark.parametrize("alpha", [0.25, 0.7, 1.0])
def test_fedbuff_of_1_is_fedasync_when_nothing_is_stale(alpha: float) -> None:
    population = Population(5, laws.Exponential(1.0))
    buff = fedbuff(concurrency=1, buffer_size=1, server_learning_rate=alpha)
    mixing = fedasync(concurrency=1, alpha=alpha, proximal_mu=0.0)
    assert_same(
        versions_of(buff, quadratic(5), population, updates=40),
        versions_of(mixing, quadratic(5), population, updates=40),
    )


def test_with_one_client_at_work_every_asynchronous_method_is_sequential() -> None:
    population = Population(5, laws.Exponential(1.0))
    x = versions_of(fedasync(concurrency=1, alpha=1.0, proximal_mu=0.0), quadratic(5), population, updates=40)
    watched, run = watch(fedfa(concurrency=1, window=1), population, quadratic(5), updates=40)
    assert_same(watched.versions, x, rel=0)
    assert_same(versions_of(fedbuff(concurrency=1, buffer_size=1), quadratic(5), population, updates=40), x)
    workers = run.events.filter(run.events["kind"] == "consumed")["worker"].to_list()
    w = x[0]
    for version, worker in enumerate(workers, start=1):
        centre = torch.from_numpy(quadratic(5).centres)[worker]
        w = centre + 0.5 * (w - centre)
        torch.testing.assert_close(x[version], w, rtol=1e-12, atol=1e-12)


def test_fedfa_of_3_with_one_client_is_a_lagged_average() -> None:
    """Each model starts from the mean of the last three, not from its predecessor."""
    workload = Mapped(1, lambda _, w: w / 2 + 1, start=(8.0,))
    watched, _ = watch(
        fedfa(concurrency=1, window=3, warm_up="average_what_is_there"), constant_times(1.0), workload, updates=12
    )
    models: list[float] = []
    w = 8.0
    for version in watched.versions[1:]:
        models = [*models, w / 2 + 1][-3:]
        w = sum(models) / len(models)
        assert float(version) == pytest.approx(w, rel=1e-14)


def test_clients_that_learn_nothing_leave_fedbuff_bit_identical_and_others_within_a_rounding() -> None:
    start = (0.1, -1.7, 1e-30, 3e20)
    idle = Mapped(7, lambda _, w: w, start=start, samples=[1, 2, 3, 4, 5, 6, 7])
    population = Population(7, laws.Exponential(1.0))
    buff = versions_of(fedbuff(concurrency=7, buffer_size=3), idle, population, updates=60)
    assert all(torch.equal(w, buff[0]) for w in buff)
    mixed = versions_of(fedasync(concurrency=7), idle, population, updates=60)
    assert all(torch.equal(w, mixed[0]) for w in mixed)
    for strategy in (fedfa(concurrency=7, window=3), fedavg(cohort=7)):
        for w in versions_of(strategy, idle, population, updates=63):
            torch.testing.assert_close(w, torch.tensor(start, dtype=torch.float64), rtol=4e-16 * 7, atol=0)


@pytest.mark.parametrize(
    "name", ["fedbuff", "ca2fl", "area", "fadas", "mifa", "fedstaleweight", "fedfix", "fedcompass"]
)
def test_clients_that_learn_nothing_leave_what_adds_deltas_bit_identical(name: str) -> None:
    start = (0.1, -1.7, 1e-30, 3e20)
    idle = Mapped(8, lambda _, w: w, start=start, samples=[1, 2, 3, 4, 5, 6, 7, 8])
    versions = versions_of(row(name), idle, Population(8, laws.Exponential(1.0)), updates=60)
    assert len(versions) > 10
    assert all(torch.equal(w, torch.tensor(start, dtype=torch.float64)) for w in versions)


METHODS = {name: row(name) for name in KNOBS}
ELEMENTARY = ("fedavg", "fedasync", "fedbuff", "fedfa")


@pytest.mark.parametrize("method", METHODS)
def test_shifting_start_and_optima_shifts_every_version(method: str) -> None:
    shift = 37.5
    here = quadratic(6, centres=(0.0, 1.0, -2.0, 4.0, 5.0, 6.5))
    there = quadratic(6, centres=tuple(c + shift for c in (0.0, 1.0, -2.0, 4.0, 5.0, 6.5)), start=5.0 + shift)
    population = Population(6, laws.Exponential(1.0))
    strategy = row(method, concurrency=6) if method == "safa" else METHODS[method]
    left = versions_of(strategy, here, population, versions=30)
    right = versions_of(strategy, there, population, versions=30)
    assert_same([w + shift for w in left], right, rel=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_relabelling_the_clients_changes_nothing(method: str) -> None:
    """Client i with its time, its data and its optimum becomes client π(i)."""
    strategy = row(method, concurrency=4) if method == "safa" else METHODS[method]
    times, centres, samples = (1.0, 1.37, 2.11, 3.3), (0.0, 4.0, -3.0, 9.0), (1, 2, 3, 4)
    order = (2, 0, 3, 1)

    def run(order: tuple[int, ...]) -> list[Tensor]:
        workload = quadratic(4, centres=tuple(centres[i] for i in order), samples=tuple(samples[i] for i in order))
        population = constant_times(*(times[i] for i in order))
        return versions_of(strategy, workload, population, time_s=20.0, selection="same_client")

    assert_same(run((0, 1, 2, 3)), run(order))


@pytest.mark.parametrize("law", ["exponential", "ties", "pareto"])
@pytest.mark.parametrize("k", [2, 5])
def test_fedfa_moves_by_the_difference_of_the_new_model_and_the_dropped_one(law: str, k: int) -> None:
    """K·(w_v − w_{v−1}) = x_new − x_dropped, and w lies in the hull of the last K models, coordinate by coordinate."""
    population = Population(8, LAWS[law])
    strategy = fedfa(concurrency=8, window=k, recompute_every=10)
    watched, run = watch(strategy, population, quadratic(8), updates=120)
    arrived = []
    for version, inputs in enumerate(watched.given, start=1):
        arrived += [x.values for x in inputs.entering]
        w = watched.versions[version]
        last = torch.stack(arrived[-k:])
        assert [x.values.tolist() for x in inputs.window] == last.tolist()
        torch.testing.assert_close(w, last.mean(dim=0), rtol=1e-12, atol=1e-12)
        assert bool((last.amin(dim=0) - 1e-12 <= w).all())
        assert bool((w <= last.amax(dim=0) + 1e-12).all())
        if version > 1:
            (new,), (dropped,) = inputs.entering, inputs.leaving
            assert dropped.values.tolist() == arrived[-k - 1].tolist()
            moved = k * (w - watched.versions[version - 1])
            torch.testing.assert_close(moved, new.values - dropped.values, rtol=1e-9, atol=1e-9)
    assert run.summary["versions"] == 120 - k + 1


def test_fedprox_without_a_proximal_term_is_fedavg_bit_for_bit() -> None:
    population = Population(6, laws.Exponential(1.0))
    prox = fedprox(cohort=4, proximal_mu=0.0)
    average = versions_of(fedavg(cohort=4), quadratic(6), population, versions=20)
    assert all(
        torch.equal(x, y)
        for x, y in zip(versions_of(prox, quadratic(6), population, versions=20), average, strict=True)
    )
    held_back = versions_of(fedprox(cohort=4, proximal_mu=1.0), quadratic(6), population, versions=20)
    assert not torch.equal(held_back[-1], average[-1])


def test_fedprox_and_fedasync_tell_their_clients_the_proximal_weight() -> None:
    told = set()

    class Asked(Quadratic):
        def train(self, task: Any) -> Any:
            told.add(task.proximal_mu)
            return super().train(task)

    for strategy in (fedprox(cohort=2, proximal_mu=0.25), fedasync(concurrency=2, proximal_mu=0.5), fedavg(cohort=2)):
        simulate(strategy, constant_times(1.0, 2.0), Asked(2), versions=2)
    assert told == {0.25, 0.5, 0.0}


def scaled(population: Population, factor: float) -> Population:
    """All times of a population, longer by a factor."""
    return replace(population, slowness=laws.Constant(factor))


@pytest.mark.parametrize("method", ELEMENTARY)
@pytest.mark.parametrize("law", ["exponential", "lognormal", "ties", "pareto_cut"])
def test_scaling_all_durations_by_a_power_of_two_scales_times_exactly_and_changes_nothing_else(
    method: str, law: str
) -> None:
    base = Population(6, LAWS[law])
    runs = [simulate(METHODS[method], scaled(base, factor), quadratic(6), seed=3, versions=30) for factor in (1.0, 8.0)]
    ours, theirs = (run.events for run in runs)
    assert (ours["time_s"] * 8.0).to_list() == theirs["time_s"].to_list()
    assert ours.drop("time_s").equals(theirs.drop("time_s"))
    assert all(run.model is not None for run in runs)
    assert weights(runs[0]) == weights(runs[1])


@quick
@given(
    factor=st.floats(1e-3, 1e3),
    method=st.sampled_from(tuple(m for m in METHODS if m not in ("fedfix", "safa"))),
    seed=st.integers(0, 1000),
)
def test_scaling_by_any_constant_keeps_the_sequence_of_versions(factor: float, method: str, seed: int) -> None:
    base = Population(6, laws.Lognormal(1.0, 0.7))
    one, other = (play(METHODS[method], scaled(base, f), seed=seed, versions=30).log for f in (1.0, factor))
    for name in ("kind", "lease", "worker", "base_version", "version", "staleness"):
        assert column(one, name).tolist() == column(other, name).tolist()
    assert column(other, "time_s") == pytest.approx(factor * column(one, "time_s"), rel=1e-9)


def weights(run: Run) -> bytes:
    assert run.model is not None
    return bytes(run.model.values.numpy().tobytes())


def test_the_grid_of_evaluations_changes_nothing_of_the_run() -> None:
    population = Population(6, laws.Exponential(1.0))
    bare, watched = (
        simulate(METHODS["fedbuff"], population, quadratic(6), time_s=20.0, evaluate_every_s=e) for e in (None, 0.3)
    )
    assert bare.events.equals(watched.events)
    assert weights(bare) == weights(watched)
    assert list(series(watched)) == [k * 0.3 for k in range(67)] + [20.0]


# -- server optimisers on a wave ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "average"),
    [
        (Sgd(0.5, 0.8), fedavgm(cohort=6, server_learning_rate=0.5, server_momentum=0.8)),
        (Adam(0.2), fedadam(cohort=6, server_learning_rate=0.2)),
        (Adam(0.2, convention="flower"), fedadam(cohort=6, server_learning_rate=0.2, convention="flower")),
        (Yogi(0.2), fedyogi(cohort=6, server_learning_rate=0.2)),
        (Adagrad(0.2), fedadagrad(cohort=6, server_learning_rate=0.2)),
    ],
)
def test_fedbuff_of_a_whole_wave_with_a_server_optimiser_is_fedavg_with_it(optimizer: Any, average: Strategy) -> None:
    buff = waves(fedbuff(concurrency=6, buffer_size=6, staleness=PLAIN, server_optimizer=optimizer))
    ours = versions_of(buff, quadratic(6), EQUAL, selection="same_client", versions=12)
    assert_same(ours, versions_of(average, quadratic(6), EQUAL, versions=12), rel=1e-11)


def test_fedadam_without_memory_and_with_a_large_tau_is_fedavg_shortened() -> None:
    """b1 = b2 = 0: w ← w + η·D/(|D| + τ), so η = τ gives FedAvg's step up to |D|/τ."""
    tau = 1e9
    adam = fedadam(cohort=6, server_learning_rate=tau, beta_1=0.0, beta_2=0.0, tau=tau)
    ours = versions_of(adam, quadratic(6), EQUAL, versions=10)
    assert_same(ours, versions_of(fedavg(cohort=6), quadratic(6), EQUAL, versions=10), rel=1e-7)
    tenth = fedadam(cohort=6, server_learning_rate=tau / 10, beta_1=0.0, beta_2=0.0, tau=tau)
    first = versions_of(tenth, quadratic(6), EQUAL, versions=1)
    torch.testing.assert_close(first[1] - first[0], (ours[1] - ours[0]) / 10, rtol=1e-7, atol=0)


def test_fednova_of_equal_local_steps_is_fedavg() -> None:
    population = Population(6, laws.Exponential(1.0))
    workload = quadratic(6, samples=(1, 2, 3, 4, 5, 6))
    ours = versions_of(fednova(cohort=4), workload, population, versions=20)
    assert_same(ours, versions_of(fedavg(cohort=4), workload, population, versions=20))


def test_scaffold_whose_variates_stay_0_is_fedavg() -> None:
    """Clients that all pull to one centre from one start: c_i = c in every round of all of them."""
    workload = quadratic(6, centres=(2.0,) * 6)
    population = Population(6, laws.Exponential(1.0))
    ours = versions_of(scaffold(cohort=6), workload, population, versions=10)
    assert_same(ours, versions_of(fedavg(cohort=6), workload, population, versions=10))


def test_fadas_below_its_delay_threshold_is_plain_fadas_and_beyond_it_not() -> None:
    population = Population(6, laws.Exponential(1.0))

    def run(threshold: int, adaptive: bool) -> list[Tensor]:
        strategy = fadas(
            concurrency=6,
            buffer_size=3,
            server_learning_rate=0.1,
            delay_adaptive=adaptive,
            delay_threshold=threshold,
        )
        return versions_of(strategy, quadratic(6), population, versions=40)

    plain = run(1, adaptive=False)
    assert all(torch.equal(x, y) for x, y in zip(plain, run(1000, adaptive=True), strict=True))
    assert not torch.equal(plain[-1], run(1, adaptive=True)[-1])


@pytest.mark.parametrize("method", [ca2fl, mifa])
def test_when_everybody_takes_part_in_every_buffer_memory_cancels(method: Any) -> None:
    """K = N in waves: CA2FL and MIFA are FedAvg."""
    ours = versions_of(
        waves(method(concurrency=6, buffer_size=6)), quadratic(6), EQUAL, selection="same_client", versions=10
    )
    assert_same(ours, versions_of(fedavg(cohort=6), quadratic(6), EQUAL, versions=10))


# -- what a rule's memory holds, through whole runs ---------------------------------------------------------------


class Following(Watched):
    """Looks at a rule's state after every step."""

    def __init__(self, rule: Any, look: Any) -> None:
        super().__init__(rule)
        self.look, self.looked = look, 0

    def apply(self, values: Tensor, state: Any, inputs: Inputs) -> Any:
        state = super().apply(values, state, inputs)
        self.look(values, state, inputs)
        self.looked += 1
        return state


UNRELIABLE = Population(8, laws.Lognormal(1.0, 0.8), dropout_probability=0.15)


def follow(strategy: Strategy, look: Any, **arguments: Any) -> Following:
    following = Following(strategy.update, look)
    simulate(replace(strategy, update=following), UNRELIABLE, quadratic(8), config={}, **{"updates": 200, **arguments})
    assert following.looked > 20
    return following


def mean_over_all(known: dict[int, Tensor], others: Tensor, clients: int) -> Tensor:
    missing = clients - len(known)
    return (sum(known.values(), torch.zeros_like(others)) + missing * others) / clients


@pytest.mark.parametrize("k", [1, 3])
def test_areas_model_is_the_mean_of_all_uploads_after_every_flush(k: int) -> None:
    def look(w: Tensor, state: Any, _: Inputs) -> None:
        torch.testing.assert_close(w, mean_over_all(state.last, state.start, 8), rtol=1e-11, atol=1e-11)

    following = follow(row("area", buffer_size=k), look)
    start = following.versions[0]
    assert torch.equal(start, torch.full_like(start, 5.0))


@pytest.mark.parametrize("k", [1, 3])
def test_ca2fls_mean_is_that_of_its_cache_after_every_step(k: int) -> None:
    last: dict[int, Tensor] = {}

    def look(w: Tensor, state: Any, inputs: Inputs) -> None:
        last.update({x.worker: x.values.clone() for x in inputs.entering})
        assert state.cache.keys() == last.keys()
        assert all(torch.equal(state.cache[worker], last[worker]) for worker in last)
        torch.testing.assert_close(
            state.mean, mean_over_all(state.cache, torch.zeros_like(w), 8), rtol=1e-11, atol=1e-11
        )

    follow(row("ca2fl", buffer_size=k), look)


def test_mifas_sum_is_that_of_its_table_after_every_step() -> None:
    def look(_: Tensor, state: Any, inputs: Inputs) -> None:
        torch.testing.assert_close(state.total, torch.stack(list(state.latest.values())).sum(0), rtol=0, atol=1e-11)

    follow(row("mifa"), look)


@pytest.mark.parametrize("cohort", [1, 4, 8])
def test_scaffolds_c_is_the_mean_of_all_c_i_for_ever(cohort: int) -> None:
    def look(_: Tensor, state: Any, inputs: Inputs) -> None:
        expected = mean_over_all(state.clients, torch.zeros_like(state.server), 8)
        torch.testing.assert_close(state.server, expected, rtol=1e-11, atol=1e-11)

    follow(row("scaffold", cohort=cohort), look, server_step_s=0.1)


def test_scaffold_finds_the_mean_of_the_optima_where_fedavg_of_few_clients_wanders() -> None:
    """With c − c_i in every gradient each client walks to the common optimum: no noise of selection is left."""
    population = Population(8, laws.Constant(1.0))
    workload = quadratic(8, contraction=0.5)
    centre = torch.from_numpy(workload.centres).mean(0)
    ends = {}
    for strategy in (scaffold(cohort=4), fedavg(cohort=4)):
        versions = versions_of(strategy, workload, population, versions=150)
        ends[strategy.name] = max(float((w - centre).norm()) for w in versions[-20:])
    assert ends["scaffold"] < 1e-3 < ends["fedavg"]


def test_fedats_weights_are_those_of_its_counts_through_a_whole_run() -> None:
    def look(w: Tensor, state: Any, inputs: Inputs) -> None:
        total = sum(state.counts)
        shares = [c / total for c in (state.counts[::-1] if min(state.counts) else state.counts)]
        assert sum(shares) == pytest.approx(1.0, rel=1e-12)
        expected = sum((share * state.models[m] for m, share in enumerate(shares) if share), torch.zeros_like(w))
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)

    following = follow(row("fedat"), look)
    assert not torch.equal(following.versions[1], following.versions[0])


@pytest.mark.parametrize("method", ["ca2fl", "area", "fedat", "fedcompass", "rennala"])
def test_scaling_all_durations_by_a_power_of_two_keeps_memory_and_groups_to_the_bit(method: str) -> None:
    base = Population(6, laws.Lognormal(1.0, 0.7))
    runs = [simulate(METHODS[method], scaled(base, factor), quadratic(6), seed=3, versions=30) for factor in (1.0, 8.0)]
    ours, theirs = (run.events for run in runs)
    assert (ours["time_s"] * 8.0).to_list() == theirs["time_s"].to_list()
    assert ours.drop("time_s").equals(theirs.drop("time_s"))
    assert weights(runs[0]) == weights(runs[1])
