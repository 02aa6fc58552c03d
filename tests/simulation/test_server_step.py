"""A server step that takes time: nobody starts during it, exactly K are used, and the rest waits."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fedasync.core import Concurrency, Strategy, Tumbling
from fedasync.simulation.laws import Constant, Exponential, Values
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff, fedfa

from .worlds import Mapped, column, constant_times, play, rows, series, timing


def arrive_together(clients: int) -> Population:
    """The first lease of each takes 1 s, every later one very long."""
    return Population(clients, Values((1.0,) * clients + (1000.0,) * 3 * clients, by="lease"))


def test_flower_7503_eight_ready_and_k_7_use_seven_and_keep_one() -> None:
    strategy = fedbuff(concurrency=8, buffer_size=7)
    run = simulate(strategy, arrive_together(8), versions=1, server_step_s=2.0)
    assert run.summary["time_s"] == 3.0
    assert run.summary["consumed"] == 7
    assert run.summary["ledger"]["buffered"] == 1


def test_two_ready_buffers_are_two_steps_one_after_the_other() -> None:
    run = simulate(fedbuff(concurrency=8, buffer_size=3), arrive_together(8), time_s=6.5, server_step_s=2.0)
    assert [t for (t,) in rows(run, "committed", "time_s")] == [3.0, 5.0]
    first = [lease for t, lease in rows(run, "consumed", "time_s", "lease") if t == 3.0]
    assert first == [0, 1, 2]


@pytest.mark.parametrize("strategy", [fedasync(concurrency=5), fedavg(cohort=4), fedfa(concurrency=5)])
def test_no_lease_starts_while_a_step_is_under_way(strategy: Strategy) -> None:
    run = simulate(strategy, Population(8, Exponential(1.0)), seed=1, time_s=60.0, server_step_s=0.25)
    ends = [t for (t,) in rows(run, "committed", "time_s")]
    starts = [t for (t,) in rows(run, "admitted", "time_s")]
    assert len(ends) > 20
    for end_s in ends:
        assert not any(end_s - 0.25 < t < end_s for t in starts)
    assert all(later - sooner >= 0.25 - 1e-12 for sooner, later in pairwise(ends))


def test_before_step_slots_are_given_out_during_the_step_from_the_old_version() -> None:
    strategy = timing(Concurrency(2, redispatch="before_step"), Tumbling(1))
    run = simulate(strategy, constant_times(1.0, 10.0), time_s=1.5, server_step_s=1.0, selection="same_client")
    assert rows(run, "admitted", "time_s", "worker", "base_version") == [(0.0, 0, 0), (0.0, 1, 0), (1.0, 0, 0)]


def test_the_servers_share_is_its_steps_time() -> None:
    """A round of constant clients takes 3 s and a step 1 s: a quarter of the time belongs to the server."""
    run = simulate(fedavg(cohort=4), Population(4, Constant(3.0)), versions=10, server_step_s=1.0)
    assert run.summary["time_s"] == 40.0
    assert run.summary["utilisation"]["server"] == 0.25
    assert run.summary["utilisation"]["waiting"] == 0.25
    none = simulate(fedavg(cohort=4), Population(4, Constant(3.0)), versions=10)
    assert none.summary["utilisation"]["server"] == 0.0


def test_the_model_changes_when_the_step_is_done_not_when_it_begins() -> None:
    workload = Mapped(1, lambda _, w: w + 1)
    run = simulate(
        fedasync(concurrency=1, alpha=1.0, proximal_mu=0.0),
        constant_times(1.0),
        workload,
        time_s=7.5,
        server_step_s=2.0,
        evaluate_every_s=0.5,
    )
    assert {t: w for t, w in series(run).items() if t in (2.5, 3.0, 5.5, 6.0)} == {
        2.5: 0.0,
        3.0: 1.0,
        5.5: 1.0,
        6.0: 2.0,
    }


def test_staleness_counts_the_versions_made_while_a_contribution_waited() -> None:
    """Six arrive at once, K = 2 and steps of 1 s: the pairs are consumed 0, 1 and 2 versions late."""
    run = simulate(fedbuff(concurrency=6, buffer_size=2), arrive_together(6), versions=3, server_step_s=1.0)
    assert rows(run, "delivered", "staleness") == [(0,)] * 6
    assert rows(run, "consumed", "time_s", "staleness") == [(2.0, 0)] * 2 + [(3.0, 1)] * 2 + [(4.0, 2)] * 2


def test_what_grew_too_stale_while_it_waited_for_the_server_is_rejected() -> None:
    strategy = fedbuff(concurrency=6, buffer_size=2, max_staleness=1)
    run = simulate(strategy, arrive_together(6), time_s=4.5, server_step_s=1.0)
    assert rows(run, "rejected", "time_s", "lease", "staleness") == [(3.0, 4, 2), (3.0, 5, 2)]
    assert run.summary["staleness"]["max"] <= 1
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])


def test_a_slow_server_bounds_the_versions_a_second() -> None:
    simulation = play(
        timing(Concurrency(50), Tumbling(5)), Population(50, Exponential(1.0)), time_s=50.0, server_step_s=2.0
    )
    assert simulation.coordinator.version <= 25
    assert set(column(simulation.log, "version", "consumed")) == set(range(simulation.coordinator.version))
