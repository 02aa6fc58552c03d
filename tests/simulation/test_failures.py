"""Dropouts, crashes and time-outs: what the ledger says, and that slots and clients come back."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from fedasync.core import EveryN, EveryVersion, StalenessBudget, Strategy, Tumbling
from fedasync.federated.driver import NothingAcceptedError
from fedasync.runs.measures import lease_table
from fedasync.runs.run import Run
from fedasync.simulation.laws import Constant, Exponential, Uniform
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa

from .worlds import column, constant_times, play, rows, timing

UNRELIABLE = Population(20, Uniform(0.5, 1.5), dropout_probability=0.2, crash_probability=0.1)


def holds(run: Run) -> bool:
    return all(verdict["holds"] for verdict in run.summary["verdicts"])


@pytest.mark.parametrize(
    "strategy",
    [
        fedasync(concurrency=8, lease_timeout_s=4.0),
        fedbuff(concurrency=8, buffer_size=3, lease_timeout_s=4.0, redispatch="before_step"),
        fedfa(concurrency=8, window=3, lease_timeout_s=4.0, simultaneous="together"),
        fedavg(cohort=8, keep=5, lease_timeout_s=4.0),
        timing(StalenessBudget(1, 4, limit=8), Tumbling(4), lease_timeout_s=4.0),
        timing(StalenessBudget(1, 4, limit=8), Tumbling(4), lease_timeout_s=4.0, publication=EveryVersion("abort")),
        timing(StalenessBudget(2, 4, limit=8), Tumbling(4), lease_timeout_s=4.0, publication=EveryN(2)),
    ],
    ids=lambda s: f"{s.name}-{type(s.publication).__name__}-{s.publication.in_flight}",
)
def test_failures_are_booked_by_reason_and_every_verdict_holds(strategy: Strategy) -> None:
    run = simulate(strategy, UNRELIABLE, seed=4, time_s=100.0)
    ledger = run.summary["ledger"]
    assert ledger["failed"]["dropout"] > 0
    assert sum(ledger["cancelled"].values()) + ledger["failed"].get("timeout", 0) > 20, "the crashed ones"
    assert set(ledger["failed"]) <= {"dropout", "timeout"}
    assert run.summary["versions"] > 20
    assert holds(run)


def test_shares_of_dropouts_and_crashes_are_their_probabilities() -> None:
    """Within three standard errors of a binomial share."""
    simulation = play(fedasync(concurrency=20, lease_timeout_s=4.0), UNRELIABLE, seed=4, time_s=150.0)
    ledger = simulation.coordinator.ledger
    ended = ledger.consumed + ledger.failed.total()
    for reason, p in (("dropout", 0.2), ("timeout", 0.1)):
        assert abs(ledger.failed[reason] / ended - p) < 3 * sqrt(p * (1 - p) / ended)


def test_a_dropout_is_heard_of_at_a_uniform_moment_of_its_work() -> None:
    population = Population(1, Constant(2.0), dropout_probability=1.0)
    clients = Clients(population, 6)
    moments = [clients.fate(0, turn, turn, 10.0) for turn in range(2000)]
    assert {(fate.failure, fate.silent) for fate in moments} == {("dropout", False)}
    assert all(10.0 < fate.end_s < 12.0 for fate in moments)
    mean = sum(fate.end_s - 10.0 for fate in moments) / 2000
    assert abs(mean - 1.0) < 3.5 * 2.0 / sqrt(12 * 2000)


def test_flower_846_a_crashed_client_falls_silent_and_works_again_after_the_time_out() -> None:
    population = Population(1, Constant(1.0), crash_probability=0.5)
    run = simulate(fedasync(concurrency=1, lease_timeout_s=3.0), population, seed=1, time_s=100.0)
    leases = lease_table(run.events, 100.0).filter(lease_table(run.events, 100.0)["outcome"] != "in flight")
    crashed = leases.filter(leases["outcome"] == "failed")
    assert len(crashed) > 5
    assert set((crashed["end_s"] - crashed["start_s"]).to_list()) == {3.0}
    starts = set(leases["start_s"].to_list())
    assert all(end_s in starts or end_s > 96.0 for end_s in crashed["end_s"].to_list()), "the slot comes back at once"
    assert run.summary["ledger"]["consumed"] > 5


def test_a_client_whose_crash_comes_after_its_time_out_works_on_until_then() -> None:
    """The slot is free at the time-out; the client is not, just as one that is merely slow."""
    population = Population(1, Constant(10.0), crash_probability=1.0)
    crashes = [Clients(population, 0).fate(0, turn, turn, 0.0).end_s for turn in range(100)]
    simulation = play(fedasync(concurrency=1, lease_timeout_s=5.0), population, time_s=300.0)
    waits = np.diff(column(simulation.log, "time_s", "admitted"))
    assert list(waits) == pytest.approx([max(5.0, crash_s) for crash_s in crashes[: len(waits)]])


def test_a_late_result_of_a_timed_out_client_is_ignored_and_the_client_works_again() -> None:
    """Two clients, one far too slow: it goes on after the server gave it up, and asks again when it is done."""
    run = simulate(fedasync(concurrency=1, lease_timeout_s=2.0), constant_times(7.0, 1.0), time_s=16.0)
    assert rows(run, "ignored", "time_s", "lease", "reason")[0] == (7.0, 0, "the lease had ended")
    first, *later = [t for t, worker in rows(run, "admitted", "time_s", "worker") if worker == 0]
    assert first == 0.0
    assert later
    assert all(t >= 7.0 for t in later), "a client that still works on a lost lease gets no other"
    assert run.summary["ledger"]["ignored"] == len(rows(run, "ignored", "time_s")) >= 1
    assert holds(run)


def test_a_result_at_the_very_instant_of_its_time_out_is_in_time() -> None:
    run = simulate(fedasync(concurrency=2, lease_timeout_s=2.0), constant_times(2.0, 2.0), time_s=10.0)
    assert run.summary["ledger"]["failed"] == {}
    assert run.summary["consumed"] == 10


def test_a_slot_given_up_by_a_time_out_goes_to_somebody_else_at_once() -> None:
    run = simulate(
        fedasync(concurrency=1, lease_timeout_s=2.0), constant_times(9.0, 1.0), time_s=4.0, selection="same_client"
    )
    assert rows(run, "admitted", "time_s", "worker") == [(0.0, 0), (2.0, 1), (3.0, 1), (4.0, 1)]


def test_a_round_in_which_all_fail_starts_anew() -> None:
    """Time-outs below the work time end every round without a result; the next begins at once."""
    with pytest.raises(NothingAcceptedError, match="timeout"):
        simulate(fedavg(cohort=2, lease_timeout_s=1.0), constant_times(3.0, 3.0), versions=3)
    run = simulate(fedavg(cohort=3, lease_timeout_s=1.0), Population(3, Uniform(0.5, 2.5)), seed=2, versions=30)
    per_round: dict[int, int] = {}
    for version, worker in rows(run, "consumed", "version", "worker"):
        per_round[version] = per_round.get(version, 0) + 1
        assert 0 <= worker < 3
    assert set(per_round.values()) >= {1, 2}
    ledger = run.summary["ledger"]
    assert ledger["failed"]["timeout"] > 30
    assert holds(run)


def test_a_round_takes_what_it_has_when_the_rest_failed() -> None:
    population = Population(10, Constant(1.0), dropout_probability=0.3)
    run = simulate(fedavg(cohort=10), population, seed=1, versions=20)
    ledger = run.summary["ledger"]
    assert ledger["consumed"] + ledger["failed"]["dropout"] == 200
    assert 0 < ledger["failed"]["dropout"] < 120


def test_everybody_dropping_out_for_ever_is_an_error_that_names_the_reason() -> None:
    population = Population(3, Constant(1.0), dropout_probability=1.0)
    for strategy in (fedasync(concurrency=2), fedavg(cohort=2), fedbuff(concurrency=3)):
        with pytest.raises(NothingAcceptedError) as given_up:
            simulate(strategy, population, versions=1)
        assert "dropout" in str(given_up.value)
        assert "\n" not in str(given_up.value)


def test_contributions_beyond_max_staleness_are_rejected_and_none_is_used() -> None:
    population = Population(20, Exponential(1.0))
    run = simulate(fedasync(concurrency=20, max_staleness=10), population, time_s=40.0)
    assert run.summary["staleness"]["max"] <= 10
    assert run.summary["ledger"]["rejected"]["stale"] > 50
    assert min(tau for (tau,) in rows(run, "rejected", "staleness")) == 11
    assert holds(run)


def test_a_bound_of_0_on_staleness_is_no_deadlock() -> None:
    for redispatch in ("after_step", "before_step"):
        strategy = fedbuff(concurrency=6, buffer_size=2, max_staleness=0, redispatch=redispatch)
        run = simulate(strategy, Population(6, Exponential(1.0)), versions=30)
        assert run.summary["staleness"]["histogram"] == {"0": 60}


def test_flower_async_2_every_client_returns_to_the_idle_ones_after_every_kind_of_end() -> None:
    """Half of the work is lost, cancelled or late, and still everybody goes on working."""
    population = Population(6, Uniform(0.5, 3.0), dropout_probability=0.2, crash_probability=0.2)
    for strategy in (
        fedavg(cohort=5, keep=3, lease_timeout_s=2.5),
        fedasync(concurrency=6, lease_timeout_s=2.5),
        timing(StalenessBudget(0, 4), Tumbling(4), lease_timeout_s=2.5, publication=EveryVersion("abort")),
    ):
        simulation = play(strategy, population, seed=8, time_s=300.0)
        late = column(simulation.log, "time_s", "admitted") > 250
        assert set(column(simulation.log, "worker", "admitted")[late]) == set(range(6))


def test_useful_wasted_and_waiting_time_add_up_to_the_slots() -> None:
    run = simulate(fedavg(cohort=8, keep=5, lease_timeout_s=4.0), UNRELIABLE, seed=4, time_s=100.0)
    shares = run.summary["utilisation"]
    assert shares["useful"] + shares["wasted"] + shares["waiting"] == pytest.approx(1.0, abs=1e-12)
    assert min(shares["useful"], shares["wasted"], shares["waiting"]) > 0.05
    full = simulate(fedasync(concurrency=5), Population(5, Exponential(1.0)), time_s=50.0).summary["utilisation"]
    assert full["useful"] == pytest.approx(1.0, abs=1e-12)
