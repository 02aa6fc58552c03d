"""The server's shared link: closed forms of a fluid, its order and its ends, and a run against a slow reference."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import Concurrency, Strategy, Tumbling
from fedasync.simulation.availability import Intervals, OnOff
from fedasync.simulation.laws import Constant, Exponential, Lognormal, Values
from fedasync.simulation.network import SharedLink
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff
from fedasync.workloads import Quadratic

from .worlds import column, play

# -- the link --------------------------------------------------------------------------------------------------


def drained(link: SharedLink) -> list[tuple[float, int]]:
    """(end, transfer) of all that are under way when nobody joins or leaves."""
    ends = []
    while link.due_s < inf:
        at = link.due_s
        ends += [(at, transfer) for transfer in link.pop_due(at)]
    return ends


@given(n=st.integers(1, 40), size=st.integers(1, 10**9), rate=st.integers(1, 10**9), begin=st.integers(0, 10**6))
def test_n_equal_transfers_that_begin_together_take_n_times_bytes_over_rate(
    n: int, size: int, rate: int, begin: int
) -> None:
    link = SharedLink(rate)
    for transfer in range(n):
        link.join(transfer, size, begin)
    ends = drained(link)
    assert [transfer for _, transfer in ends] == list(range(n))
    assert {end for end, _ in ends} == {begin + size * n / rate}


joins = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 100)), min_size=1, max_size=12)


@given(joins=joins)
def test_staggered_transfers_end_as_a_fluid_cut_into_small_steps_says(joins: list[tuple[int, int]]) -> None:
    """Processor sharing by hand: between two changes everybody gets rate/n."""
    rate = 4.0
    expected: dict[int, float] = {}
    left = {}
    waiting = sorted((begin / 8, transfer, float(size)) for transfer, (begin, size) in enumerate(joins))
    t = 0.0
    while waiting or left:
        through = t + min(left.values()) * len(left) / rate if left else inf
        joining = waiting[0][0] if waiting else inf
        after = min(through, joining)
        left = {k: v - (after - t) * rate / len(left) for k, v in left.items()}
        t = after
        for transfer in [k for k, v in left.items() if v <= 1e-9]:
            expected[transfer] = t
            del left[transfer]
        while waiting and waiting[0][0] == t:
            _, transfer, size = waiting.pop(0)
            left[transfer] = size

    link, found = SharedLink(rate), {}
    for begin, transfer, size in sorted((b / 8, k, float(s)) for k, (b, s) in enumerate(joins)):
        while link.due_s <= begin:
            at = link.due_s
            found.update((done, at) for done in link.pop_due(at))
        link.join(transfer, size, begin)
    found.update((done, at) for at, done in drained(link))
    assert found == pytest.approx(expected)
    assert sum(size for _, size in joins) / rate <= max(found.values()) + 1e-9


def test_who_leaves_gives_its_share_to_the_others_and_says_what_is_left() -> None:
    link = SharedLink(10.0)
    link.join(0, 100.0, 0.0)
    link.join(1, 100.0, 0.0)
    assert link.leave(0, 4.0) == 80.0  # 5 bytes/s each
    assert drained(link) == [(12.0, 1)]
    assert len(link) == 0


# -- runs ------------------------------------------------------------------------------------------------------


def world(n: int, duration_s: float = 1.0, **keys: object) -> Population:
    return Population(n, Constant(duration_s), model_bytes=1000, **keys)  # type: ignore[arg-type]


def delivered(strategy: Strategy, population: Population, seed: int = 0, **limits: object) -> np.ndarray:
    return column(play(strategy, population, seed=seed, **limits).log, "time_s", "delivered")


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_round_of_n_equal_clients_takes_n_times_bytes_over_both_links_and_the_work(n: int) -> None:
    links = world(n, server_downlink_bytes_per_second=500.0, server_uplink_bytes_per_second=250.0)
    ends = column(play(fedavg(cohort=n), links, versions=3).log, "time_s", "committed")
    one_s = n * 1000 / 500 + 1.0 + n * 1000 / 250
    assert ends == pytest.approx([one_s, 2 * one_s, 3 * one_s])


@pytest.mark.parametrize(("own", "expected"), [(100.0, 10.0), (500.0, 2.0), (9000.0, 2.0)])
def test_one_alone_takes_bytes_over_the_slower_of_both_links(own: float, expected: float) -> None:
    alone = world(1, uplink_bytes_per_second=Constant(own), server_uplink_bytes_per_second=500.0)
    assert delivered(fedasync(concurrency=1), alone, updates=2) == pytest.approx([1 + expected, 2 * (1 + expected)])
    assert Clients(alone, 0).mean_work_s(0) == 1 + expected


def test_a_link_nobody_can_fill_changes_nothing() -> None:
    """An endless link against none: the same ends, from the client's own rates."""
    own = {
        "downlink_bytes_per_second": Lognormal(400.0, 0.5),
        "uplink_bytes_per_second": Lognormal(300.0, 0.5),
        "dropout_probability": 0.2,
    }
    strategy = fedbuff(concurrency=6, buffer_size=3)
    without = play(strategy, Population(9, Exponential(5.0), model_bytes=1000, **own), seed=2, updates=60)
    endless = {"server_downlink_bytes_per_second": 1e15, "server_uplink_bytes_per_second": 1e15}
    shared = play(strategy, Population(9, Exponential(5.0), model_bytes=1000, **own, **endless), seed=2, updates=60)
    for kind in ("delivered", "failed"):
        assert column(shared.log, "worker", kind).tolist() == column(without.log, "worker", kind).tolist()
        assert column(shared.log, "time_s", kind) == pytest.approx(column(without.log, "time_s", kind))


def test_a_saturated_uplink_moves_its_rate_whatever_is_under_way() -> None:
    """Conservation: what has arrived and what is still under way (100 at most) is 500 bytes for each busy second."""
    busy = Population(200, Exponential(5.0), model_bytes=1000, server_uplink_bytes_per_second=500.0)
    arrivals = delivered(fedasync(concurrency=100), busy, updates=500)
    first_upload_s = 5 / 100 * 10  # the shortest of 100 works takes 0.05 s on average
    moved = 500 * arrivals
    arrived = 1000 * (1 + np.arange(len(arrivals)))
    assert np.all(arrived <= moved)
    assert np.all(moved - 500 * first_upload_s <= arrived + 100 * 1000)


def test_leases_that_a_link_ends_together_are_looked_at_in_the_order_of_dispatch() -> None:
    """Client 1's upload is bound by its own link and ends, by the calendar, with those of the shared link."""
    own = Values((1e9, 1000 / 6, 1e9))
    tied = world(3, uplink_bytes_per_second=own, server_uplink_bytes_per_second=500.0)
    simulation = play(fedasync(concurrency=3), tied, updates=3)
    assert column(simulation.log, "time_s", "delivered").tolist() == [7.0, 7.0, 7.0]
    assert column(simulation.log, "lease", "delivered").tolist() == [0, 1, 2]


def test_cancelled_clients_leave_the_link() -> None:
    """Of 4 the first is kept: the others' uploads stop, and the next round has the link to itself."""
    over_selected = world(4, server_uplink_bytes_per_second=1000.0, uplink_bytes_per_second=Values((2e3, 10, 10, 10)))
    ends = column(play(fedavg(cohort=4, keep=1), over_selected, versions=2).log, "time_s", "committed")
    # 4 s for a quarter of the link; the slow ones would hold it for 4 s as well, and then their own for 96 more.
    assert ends == pytest.approx([5.0, 10.0])


def timed(limit: int, timeout_s: float) -> Strategy:
    return Strategy("timed", Concurrency(limit), Tumbling(1), None, lease_timeout_s=timeout_s)


def test_a_transfer_that_times_out_frees_the_link_and_its_client() -> None:
    """Two begin together and time out half-way, again and again: nobody ever gets through, and nobody lingers."""
    jammed = world(2, 1.0, server_uplink_bytes_per_second=100.0)
    simulation = play(timed(2, 11.0), jammed, time_s=54.0)
    assert column(simulation.log, "time_s", "failed").tolist() == [11.0, 11.0, 22.0, 22.0, 33.0, 33.0, 44.0, 44.0]
    assert len(column(simulation.log, "time_s", "delivered")) == 0
    # One fewer, and every upload gets through: 1 s of work and 10 s of upload.
    alone = play(timed(1, 11.0), jammed, time_s=54.0)
    assert column(alone.log, "time_s", "delivered").tolist() == [11.0, 22.0, 33.0, 44.0]


def test_a_client_that_computes_past_its_time_out_is_refused_and_takes_no_link() -> None:
    """Client 0 computes for 50 s and has timed out long before: client 1's uploads have the whole link."""
    late = Population(
        2,
        Values((50.0, 1.0)),
        model_bytes=1000,
        server_uplink_bytes_per_second=1000.0,
        server_downlink_bytes_per_second=1e9,
    )
    simulation = play(timed(2, 10.0), late, time_s=60.0)
    workers = column(simulation.log, "worker", "delivered")
    times = column(simulation.log, "time_s", "delivered")
    assert set(workers) == {1}
    assert np.diff(times) == pytest.approx(np.full(len(times) - 1, 2.0), rel=1e-6)
    assert simulation.coordinator.ledger.ignored == 1


def test_a_client_that_goes_offline_loses_or_pauses_its_transfer() -> None:
    """Client 0 is away from 4 s to 8 s, in the middle of its upload, which then is client 1's alone."""
    away = {
        "availability": Intervals((((0.0, 4.0), (8.0, 99.0)), ((0.0, 99.0),))),
        "server_uplink_bytes_per_second": 250.0,
    }
    paused = play(fedasync(concurrency=2), world(2, 1.0, when_offline="pause", **away), updates=2)
    # By 4 s each has moved 375 bytes, and client 1 is through at 6.5 s. From 8 s client 0's other 625 share the link
    # with client 1's next upload.
    assert column(paused.log, "time_s", "delivered") == pytest.approx([6.5, 13.0])
    lost = play(fedasync(concurrency=2), world(2, 1.0, when_offline="lose", **away), updates=1)
    assert column(lost.log, "time_s", "failed").tolist() == [4.0]
    assert column(lost.log, "time_s", "delivered") == pytest.approx([6.5])


def test_a_client_that_never_comes_back_is_lost_with_its_transfer() -> None:
    gone = world(
        2,
        availability=Intervals((((0.0, 2.0),), ((0.0, 99.0),))),
        when_offline="pause",
        server_uplink_bytes_per_second=250.0,
    )
    simulation = play(fedasync(concurrency=2), gone, updates=1)
    assert column(simulation.log, "time_s", "delivered").tolist() == [5.5]  # 1 s shared, then 875 bytes alone
    assert simulation.coordinator.ledger.in_flight >= 1


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rates=st.tuples(st.sampled_from([None, 200.0, 1000.0]), st.sampled_from([150.0, 1000.0])),
    crash=st.sampled_from([0.0, 0.2]),
    kind=st.sampled_from(["fedavg", "fedasync", "fedbuff"]),
    offline=st.sampled_from(["lose", "pause"]),
)
def test_any_run_over_shared_links_balances_and_repeats(
    seed: int, rates: tuple[float | None, float], crash: float, kind: str, offline: str
) -> None:
    bounds = {"lease_timeout_s": 60.0}
    strategy = {
        "fedavg": fedavg(cohort=4, keep=3, **bounds),
        "fedasync": fedasync(concurrency=5, **bounds),
        "fedbuff": fedbuff(concurrency=5, buffer_size=3, **bounds),
    }[kind]
    population = Population(
        8,
        Exponential(4.0),
        uplink_bytes_per_second=Lognormal(400.0, 1.0),
        model_bytes=1000,
        server_downlink_bytes_per_second=rates[0],
        server_uplink_bytes_per_second=rates[1],
        crash_probability=crash,
        dropout_probability=0.1,
        availability=OnOff(Exponential(80.0), Exponential(20.0)),
        when_offline=offline,  # type: ignore[arg-type]
    )
    run, again = (simulate(strategy, population, seed=seed, time_s=400.0) for _ in range(2))
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])
    assert run.events.equals(again.events)


@pytest.mark.parametrize("kind", ["cancelled", "timed out", "lost"])
def test_what_is_learnt_over_a_shared_link_does_not_depend_on_when_it_is_computed(kind: str) -> None:
    """Results computed in batches or one by one: the same events and metrics, whatever becomes of leases."""
    strategy = fedavg(cohort=5, keep=3) if kind == "cancelled" else fedasync(concurrency=5, lease_timeout_s=40.0)
    population = Population(
        duration_s=Exponential(5.0),
        model_bytes=1000,
        server_downlink_bytes_per_second=500.0,
        server_uplink_bytes_per_second=400.0,
        availability=OnOff(Exponential(60.0), Exponential(20.0)),
        dropout_probability=0.2 if kind == "lost" else 0.0,
    )
    runs = [
        simulate(strategy, population, Quadratic(9), seed=3, time_s=600.0, evaluate_every_s=50.0, training=training)
        for training in ("batched", "one_by_one")
    ]
    assert runs[0].events.equals(runs[1].events)
    assert runs[0].metrics.equals(runs[1].metrics)
    assert runs[0].summary["consumed"] > 20
