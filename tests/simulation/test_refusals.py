"""Runs that do not fit together are refused before they start, in one line that says what would do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest

from fedasync.aggregation.aggregators import TrimmedMean
from fedasync.aggregation.privacy import Privacy
from fedasync.core import Concurrency, EveryN, Hinge, Strategy, Tumbling
from fedasync.federated.arrays import WorkloadError
from fedasync.simulation.federated import StandstillError
from fedasync.simulation.laws import Constant, Exponential, Lognormal, Values
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.settings import Settings
from fedasync.simulation.simulate import simulate
from fedasync.strategies import STRATEGIES, fedasync, fedavg, fedbuff, fedfa, fedprox
from fedasync.workloads import Quadratic

from .worlds import Mapped, constant_times

NAN, INF = float("nan"), float("inf")
FIVE = Population(5, Exponential(1.0))


def population(**fields: Any) -> Callable[[], object]:
    return lambda: Clients(replace(FIVE, **fields), 0)


def run(strategy: Strategy, clients: Population = FIVE, workload: Any = None, **limits: Any) -> Callable[[], object]:
    return lambda: simulate(strategy, clients, workload, **(limits or {"versions": 3}))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    # strategies on their population
    "mifa that never sees everybody": (
        lambda: simulate(STRATEGIES["mifa"](concurrency=2), FIVE, Quadratic(5), time_s=9.0, selection="same_client"),
        "only 2 of 5 ever work; wait_for_all = false, or 'random_idle', would do",
    ),
    "fixed times without number": (
        lambda: simulate(STRATEGIES["fedfix"](concurrency=2, interval_s=1e-9), FIVE, time_s=9.0),
        "interval_s = 1e-09 makes 9e+09 intervals in 9 s; at most 10,000,000 would do",
    ),
    "a hinge that divides by nothing": (
        lambda: fedasync(concurrency=2, convention="flgo", staleness=Hinge(0.0, 0.0)),
        "hinge: a, without the “+ 1”, must be a finite number > 0, got 0.0",
    ),
    "a rejection that tells": (
        lambda: STRATEGIES["fedbuff"](concurrency=2, clip_norm=1.0, max_norm=2.0, privacy=Privacy(1.0)),
        "who is rejected by a max_norm depends on the client's data",
    ),
    "a trimmed mean that trims nothing": (
        lambda: STRATEGIES["fedbuff"](concurrency=9, buffer_size=4, aggregator=TrimmedMean(0.2)),
        "aggregator 'trimmed_mean' needs 5 contributions",
    ),
    # settings
    "no end": (Settings, "a run needs an end: give time_s, updates, or versions"),
    "no time": (lambda: Settings(time_s=0.0), "time_s must be > 0 and finite, got 0.0"),
    "time without end": (lambda: Settings(time_s=INF), "time_s must be > 0 and finite, got inf"),
    "no number of seconds": (lambda: Settings(time_s=NAN), "time_s must be > 0 and finite, got nan"),
    "no updates": (lambda: Settings(updates=0), "updates must be an integer ≥ 1, got 0"),
    "no versions": (lambda: Settings(versions=-2), "versions must be an integer ≥ 1, got -2"),
    "no grid": (lambda: Settings(time_s=1.0, evaluate_every_s=0.0), "evaluate_every_s must be > 0 and finite, got 0.0"),
    "step before its start": (lambda: Settings(time_s=1.0, server_step_s=-1.0), "server_step_s must be ≥ 0 and finite"),
    "step without end": (lambda: Settings(time_s=1.0, server_step_s=INF), "server_step_s must be ≥ 0 and finite"),
    # strategies
    "keep more than the cohort": (lambda: fedavg(cohort=3, keep=4), "keep = 4: the round could never end"),
    "empty cohort": (lambda: fedavg(cohort=0), "cohort size must be an integer ≥ 1, got 0"),
    "repelling clients": (lambda: fedprox(cohort=3, proximal_mu=-1.0), "proximal_mu must be ≥ 0 and finite, got -1.0"),
    "alpha": (lambda: fedasync(concurrency=3, alpha=1.5), "alpha must lie in (0, 1], got 1.5"),
    "server rate": (lambda: fedbuff(concurrency=3, server_learning_rate=0.0), "server_learning_rate must be > 0"),
    "buffer": (lambda: fedbuff(concurrency=3, buffer_size=0), "buffer size must be an integer ≥ 1, got 0"),
    "window": (lambda: fedfa(concurrency=3, window=0), "window size must be an integer ≥ 1, got 0"),
    "lag beyond the bound": (
        lambda: fedbuff(concurrency=3, publish_every=5, max_staleness=3),
        "max_staleness ≥ 4, or within_staleness",
    ),
    "time-out": (lambda: fedavg(cohort=3, lease_timeout_s=-1.0), "lease_timeout_s must be > 0 and finite, got -1.0"),
    # populations
    "nobody": (population(clients=0), "clients must be an integer ≥ 1, got 0"),
    "clients unknown": (population(clients=None), "clients is missing; an integer ≥ 1 would do"),
    "no work": (lambda: Population(5), "clients take no time: give duration_s, seconds_per_sample, or both"),
    "improbable": (population(dropout_probability=1.5), "dropout_probability must lie in [0, 1], got 1.5"),
    "less than never": (population(crash_probability=-0.1), "crash_probability must lie in [0, 1], got -0.1"),
    "more than always": (population(dropout_probability=0.7, crash_probability=0.7), "must be ≤ 1"),
    "negative bytes": (population(model_bytes=-1), "model_bytes must be an integer ≥ 0, got -1"),
    "network without bytes": (population(uplink_bytes_per_second=Constant(1.0)), "a network needs model_bytes"),
    "dead link": (
        population(uplink_bytes_per_second=Values((1.0, 1.0, 0.0, 1.0, 1.0)), model_bytes=10),
        "uplink_bytes_per_second: client 2 has 0; every client needs more than 0",
    ),
    "durations for others": (
        population(duration_s=Values((1.0, 2.0))),
        "duration_s: 2 values for 5 clients; one for each client would do",
    ),
    "slowness for others": (population(slowness=Values((1.0,) * 6)), "slowness: 6 values for 5 clients"),
    "slowness by lease": (
        population(slowness=Values((1.0, 2.0), by="lease")),
        "slowness is drawn once for each client: by = 'lease' has no meaning here",
    ),
    # what does not fit together
    "cohort beyond the clients": (run(fedavg(cohort=6)), "a cohort of 6 can never be filled by 5 clients; cohort ≤ 5"),
    "concurrency beyond the clients": (
        run(fedasync(concurrency=6)),
        "a concurrency of 6 can never be reached by 5 clients, one lease each; concurrency ≤ 5 would do",
    ),
    "updates below the first buffer": (
        run(fedbuff(concurrency=5, buffer_size=4), updates=3),
        "makes its first version from 4 contributions, which a run of updates = 3 can never reach",
    ),
    "updates below the first window": (run(fedfa(concurrency=5, window=4), updates=3), "first version from 4"),
    "updates below the first round": (run(fedavg(cohort=5, keep=4), updates=3), "first version from 4"),
    "crashes without a time-out": (
        run(fedasync(concurrency=5), replace(FIVE, crash_probability=0.1)),
        "a crashed client never answers, and strategy 'fedasync' would wait for ever; give it a lease_timeout_s",
    ),
    "nothing takes time": (
        run(fedasync(concurrency=5), replace(FIVE, duration_s=Constant(0.0)), time_s=9.0),
        "takes 0 s, so time_s may never be reached: give updates or versions as the run's end",
    ),
    "other clients than the workload's": (
        run(fedasync(concurrency=5), FIVE, Mapped(4, lambda _, w: w)),
        "population.clients = 5, but the workload has 4 clients",
    ),
    "negative seed": (
        lambda: simulate(fedasync(concurrency=5), FIVE, versions=1, seed=-1),
        "seed must be an integer ≥ 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_run_is_refused_in_one_line(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_knob_that_a_strategy_does_not_have_is_an_error(name: str) -> None:
    """A misspelt knob must not run with the default instead."""
    row = STRATEGIES[name]
    knobs = signature(row).parameters.values()
    needed = {knob.name: 4 for knob in knobs if knob.default is knob.empty and knob.kind is knob.KEYWORD_ONLY}
    with pytest.raises((TypeError, ValueError), match="bufer_size"):
        row(**needed, bufer_size=3)


def test_dispatch_knobs_mean_nothing_to_a_round() -> None:
    with pytest.raises((TypeError, ValueError), match="redispatch"):
        STRATEGIES["fedavg"](cohort=4, redispatch="before_step")


def test_a_limit_that_settings_do_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="seconds"):
        simulate(fedasync(concurrency=5), FIVE, seconds=3.0)


def test_settings_and_limits_together_are_an_error() -> None:
    """One of the two would be ignored in silence."""
    with pytest.raises((TypeError, ValueError)):
        simulate(fedasync(concurrency=5), FIVE, None, Settings(time_s=3.0), updates=7)


class Patience(Mapped):
    """A workload that gives up after some thousand leases: a run that never ends would hang the tests."""

    def train(self, task: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 5000:
            raise RuntimeError("the clock stands still")
        return super().train(task)


@pytest.mark.parametrize(
    "clients",
    [constant_times(0.0, 1.0), Population(2, Exponential(1.0), slowness=Values((0.0, 1.0)))],
    ids=["duration", "slowness"],
)
def test_one_client_that_takes_no_time_does_not_stop_the_clock(clients: Population) -> None:
    """It would ask again and again at time 0, and time_s would never come."""
    with pytest.raises((ValueError, RuntimeError)) as refused:
        simulate(fedasync(concurrency=2), clients, Patience(2, lambda _, w: w), time_s=10.0)
    assert not isinstance(refused.value, WorkloadError), "the run went on at one instant"


def test_instant_clients_that_need_not_wait_for_a_slow_server_do_not_stop_the_clock_either() -> None:
    """Slots given out before the step are free while the server works: a second would never pass."""
    strategy = fedbuff(concurrency=2, buffer_size=2, redispatch="before_step")
    with pytest.raises((ValueError, RuntimeError)) as refused:
        simulate(strategy, constant_times(0.0, 0.0), Patience(2, lambda _, w: w), time_s=10.0, server_step_s=1.0)
    assert not isinstance(refused.value, WorkloadError), "the run went on at one instant"


def test_appfl_439_a_client_without_a_duration_is_refused_and_not_taken_for_instant() -> None:
    with pytest.raises(ValueError, match="clients take no time"):
        Population(3, downlink_bytes_per_second=Constant(1e6), model_bytes=10)


def test_plato_195_a_buffer_larger_than_the_concurrency_still_makes_progress() -> None:
    """Slots are given out again at once, so K may exceed n; what can never be reached is refused."""
    made = simulate(fedbuff(concurrency=2, buffer_size=9), FIVE, versions=5)
    assert made.summary["versions"] == 5
    with pytest.raises(ValueError, match="can never be filled"):
        simulate(fedavg(cohort=501), Population(500, Exponential(1.0)), versions=1)


def test_a_publication_every_n_runs_within_its_bound() -> None:
    strategy = Strategy("rare", Concurrency(1), Tumbling(1), None, EveryN(4), max_staleness=3)
    made = simulate(strategy, FIVE, versions=40)
    assert made.summary["staleness"]["histogram"] == {str(tau): 10 for tau in range(4)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: fedfa(concurrency=3, warm_up="x"),
            "warm_up must be 'wait_until_full' or 'average_what_is_there', got 'x'",
        ),
        (lambda: fedbuff(concurrency=3, redispatch="later"), "redispatch must be 'after_step' or 'before_step'"),
        (lambda: fedbuff(concurrency=3, simultaneous="togehter"), "simultaneous must be 'one_by_one' or 'together'"),
        (lambda: fedbuff(concurrency=2.5), "concurrency must be an integer ≥ 1, got 2.5"),
        (lambda: fedbuff(concurrency=3, max_staleness=0.5), "max_staleness must be an integer ≥ 0, got 0.5"),
        (lambda: fedbuff(concurrency=3, publish_every=1.5), "n must be an integer ≥ 1, got 1.5"),
        (lambda: Population(3, Exponential(1.0), when_offline="loose"), "when_offline must be 'lose' or 'pause'"),
        (lambda: Settings(updates=3, selection="rand"), "selection must be 'random_idle' or 'same_client', got 'rand'"),
        (lambda: Settings(updates=2.5), "updates must be an integer ≥ 1, got 2.5"),
        (lambda: Settings(time_s=600.0, evaluate_every_s=1e-9), "at most 1,000,000 are made"),
    ],
)
def test_a_misspelt_choice_is_refused_in_python_as_it_is_in_toml(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


@pytest.mark.parametrize("law", [Constant(1e-300), Lognormal(10.0, 50.0)], ids=["constant", "lognormal"])
def test_a_clock_that_does_not_move_ends_the_run(law: Any) -> None:
    with pytest.raises(StandstillError, match="the clock stands still"):
        simulate(fedasync(concurrency=5), Population(10, law), time_s=1.0)


def test_a_target_without_a_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="target 'accuracy' needs a workload"):
        simulate(fedasync(concurrency=2), Population(4, Exponential(1.0)), time_s=1.0, target={"accuracy": 0.9})
