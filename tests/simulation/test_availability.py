"""When clients are there: against references that look at every instant, and what a run makes of it."""

from __future__ import annotations

from fractions import Fraction
from math import inf, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import Strategy
from fedasync.runs.run import Run
from fedasync.simulation.availability import Intervals, OnOff, Presence
from fedasync.simulation.laws import Constant, Exponential, Law, Uniform, Values
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedavg, fedbuff

from .worlds import rows

Pairs = tuple[tuple[float, float], ...]

# -- calendars -------------------------------------------------------------------------------------------------


def pairs(unit: float, most: int = 40) -> st.SearchStrategy[Pairs]:
    """Up to three [start, end) intervals whose ends are multiples of ``unit``; some touch."""

    def join(cuts: list[int]) -> Pairs:
        places = sorted(cuts)
        found = [(a * unit, b * unit) for a, b in zip(places[::2], places[1::2], strict=False) if a < b]
        return tuple(found)

    return st.lists(st.integers(0, most), max_size=6).map(join)


def online(intervals: Pairs, cycle_s: float | None, t: float) -> bool:
    """By definition, in exact arithmetic."""
    moment = Fraction(t)
    if cycle_s is not None:
        moment -= moment // Fraction(cycle_s) * Fraction(cycle_s)
    return any(Fraction(start) <= moment < Fraction(end) for start, end in intervals)


def check_against_every_instant(
    intervals: Pairs, cycle_s: float | None, t: float, unit: float, horizon_s: float
) -> None:
    presence = Intervals((intervals,), cycle_s).presence(1, 0)
    state, until = presence(0, t)
    assert state is online(intervals, cycle_s, t)
    moment = t
    while moment < min(until, horizon_s):
        assert online(intervals, cycle_s, moment) is state
        moment = (moment // unit + 1) * unit
    if until < inf:
        assert online(intervals, cycle_s, until) is not state
    else:
        assert moment >= horizon_s


@given(intervals=pairs(0.25), t=st.integers(0, 100).map(lambda k: k / 8))
def test_intervals_agree_with_a_look_at_every_instant(intervals: Pairs, t: float) -> None:
    check_against_every_instant(intervals, None, t, 0.125, 15.0)


@given(intervals=pairs(0.25), slack=st.integers(0, 8), t=st.integers(0, 600).map(lambda k: k / 8))
def test_cyclic_intervals_agree_with_a_look_at_every_instant(intervals: Pairs, slack: int, t: float) -> None:
    """Also across the turn of the cycle, which two intervals may join."""
    last = intervals[-1][1] if intervals else 0.0
    cycle_s = max(0.25, last + slack / 4)
    check_against_every_instant(intervals, cycle_s, t, 0.125, t + 2 * cycle_s + 1)


@given(
    cuts=st.lists(st.integers(0, 50), min_size=2, max_size=6, unique=True),
    cycle_s=st.floats(0.1, 1e5),
    t=st.floats(0, 1e6),
)
def test_the_next_change_lies_ahead_and_changes_the_state_in_any_cycle(
    cuts: list[int], cycle_s: float, t: float
) -> None:
    """Whatever rounding does: a clock that jumps from change to change goes forward, on and off in turns."""
    places = [cycle_s if cut == 50 else cut * cycle_s / 50 for cut in sorted(cuts)]
    intervals = tuple(zip(places[::2], places[1::2], strict=False))
    presence = Intervals((intervals,), cycle_s).presence(1, 0)
    state, until = presence(0, t)
    for _ in range(12):
        if until == inf:
            break
        assert until > t
        t = until
        following, until = presence(0, t)
        assert following is not state
        state = following


def test_a_day_of_24_1_hours_does_not_stop_the_clock() -> None:
    """The client of a cycle that no float divides evenly: its changes must be met, not missed by a rounding."""
    presence = Intervals((((3.75, 14.2), (22.3, 23.6)),), 24.1).presence(1, 0)
    t, changes = 0.0, list[float]()
    while t < 241.0 and len(changes) < 100:
        _, until = presence(0, t)
        assert until > t
        t = until
        changes.append(until)
    assert len(changes) == 41


# -- on and off at random --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "off"), [(Exponential(30.0), Exponential(10.0)), (Uniform(1.0, 3.0), Exponential(6.0))], ids=["3/4", "1/4"]
)
def test_the_share_of_time_online_is_e_on_over_e_on_plus_e_off(on: Law, off: Law) -> None:
    """400 clients at independent times: three standard errors of a fraction."""
    presence = OnOff(on, off).presence(400, 3)
    share = on.mean / (on.mean + off.mean)
    seen = np.mean([[presence(client, t)[0] for t in (0.0, 150.0, 517.0, 900.0)] for client in range(400)])
    assert abs(seen - share) < 3 * sqrt(share * (1 - share) / 1600)


@pytest.mark.parametrize("t", [0.0, 3.0, 11.0, 40.0])
def test_exponential_presence_is_stationary_from_the_start(t: float) -> None:
    presence = OnOff(Exponential(5.0), Exponential(15.0)).presence(3000, 8)
    seen = np.mean([presence(client, t)[0] for client in range(3000)])
    assert abs(seen - 0.25) < 3.5 * sqrt(0.25 * 0.75 / 3000)


@given(times=st.lists(st.floats(0, 500), min_size=1, max_size=20), seed=st.integers(0, 1000))
def test_asking_about_late_times_first_changes_nothing(times: list[float], seed: int) -> None:
    law = OnOff(Exponential(7.0), Uniform(0.0, 10.0))
    in_order, backwards = law.presence(3, seed), law.presence(3, seed)
    backwards(1, 1000.0)
    asked = [(client, t) for client in range(3) for t in sorted(times)]
    left = {key: in_order(*key) for key in asked}
    right = {key: backwards(*key) for key in reversed(asked)}
    assert left == right


@given(t=st.floats(0, 1e4), seed=st.integers(0, 1000))
def test_the_next_change_of_a_renewal_lies_ahead_and_changes_the_state(t: float, seed: int) -> None:
    presence = OnOff(Values((0.0, 3.0, 5.0)), Exponential(4.0)).presence(1, seed)
    state, until = presence(0, t)
    assert until > t
    assert presence(0, (t + until) / 2)[0] is state or (t + until) / 2 == until


# -- work that is interrupted ----------------------------------------------------------------------------------


def finish_by_ticks(presence: Presence, start_s: float, work_s: float, pause: bool, tick: float) -> tuple[float, bool]:
    """When the work ends, and whether it is done: tick by tick. All times are multiples of a tick."""
    t, left = start_s, work_s
    while left > 0:
        if t > 1000:
            return inf, False
        if presence(0, t)[0]:
            left -= tick
        elif not pause:
            return t, False
        t += tick
    return t, True


@settings(deadline=None)
@given(
    intervals=pairs(0.25),
    cyclic=st.booleans(),
    start=st.integers(0, 80).map(lambda k: k / 4),
    work=st.integers(1, 60).map(lambda k: k / 4),
    pause=st.booleans(),
)
def test_work_ends_when_a_reference_that_ticks_says_so(
    intervals: Pairs, cyclic: bool, start: float, work: float, pause: bool
) -> None:
    plan = Intervals((intervals,), 12.0 if cyclic else None)
    presence = plan.presence(1, 0)
    if not presence(0, start)[0]:
        return
    population = Population(1, Constant(work), availability=plan, when_offline="pause" if pause else "lose")
    fate = Clients(population, 0).fate(0, 0, 0, start)
    end_s, done = finish_by_ticks(presence, start, work, pause, 0.25)
    assert fate.end_s == end_s
    assert fate.failure == (None if done else "offline")
    assert fate.silent is (end_s == inf)


# -- in a run --------------------------------------------------------------------------------------------------


def starts_and_states(run: Run, presence: Presence) -> list[bool]:
    return [presence(worker, t)[0] for t, worker in rows(run, "admitted", "time_s", "worker")]


@pytest.mark.parametrize("when_offline", ["lose", "pause"])
@pytest.mark.parametrize("selection", ["random_idle", "same_client"])
@pytest.mark.parametrize("strategy", [fedasync(concurrency=6), fedavg(cohort=4)], ids=lambda s: s.name)
def test_an_offline_client_is_never_given_a_lease(strategy: Strategy, selection: str, when_offline: str) -> None:
    law = OnOff(Exponential(3.0), Exponential(6.0))
    population = Population(12, Exponential(1.0), availability=law, when_offline=when_offline)  # type: ignore[arg-type]
    run = simulate(strategy, population, seed=2, time_s=80.0, selection=selection)
    states = starts_and_states(run, law.presence(12, 2))
    assert len(states) > 50
    assert all(states)
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])


def test_a_client_that_leaves_loses_its_work_and_the_slot_is_given_out_again() -> None:
    plan = Intervals((((0.0, 2.0), (6.0, 20.0)), ((1.0, 20.0),)))
    run = simulate(fedasync(concurrency=1), Population(2, Constant(3.0), availability=plan), time_s=9.0)
    assert rows(run, "failed", "time_s", "worker", "reason") == [(2.0, 0, "offline")]
    assert rows(run, "admitted", "time_s", "worker")[:2] == [(0.0, 0), (2.0, 1)]
    assert run.summary["ledger"]["failed"] == {"offline": 1}


def test_a_client_that_pauses_keeps_its_slot_and_finishes_later() -> None:
    plan = Intervals((((0.0, 2.0), (6.0, 20.0)),))
    population = Population(1, Constant(3.0), availability=plan, when_offline="pause")
    run = simulate(fedasync(concurrency=1), population, time_s=8.0)
    assert rows(run, "delivered", "time_s", "worker") == [(7.0, 0)]
    assert run.summary["ledger"]["failed"] == {}


@pytest.mark.parametrize("strategy", [fedasync(concurrency=2), fedavg(cohort=2), fedbuff(concurrency=2)])
def test_fedscale_148_with_nobody_online_the_clock_advances_to_the_next_check_in(strategy: Strategy) -> None:
    """Check-ins rarer than the buffer needs must not freeze the server."""
    plan = Intervals((((100.0, 101.5), (5000.0, 5001.5)), ((100.5, 101.75), (5000.0, 5001.5))))
    run = simulate(strategy, Population(2, Constant(1.0), availability=plan), time_s=6000.0)
    assert rows(run, "admitted", "time_s", "worker")[0] == (100.0, 0)
    starts = [t for t, _ in rows(run, "admitted", "time_s", "worker")]
    assert any(5000.0 <= t < 5001.5 for t in starts)
    arrivals = [t for (t,) in rows(run, "delivered", "time_s")]
    assert min(arrivals) < 102
    assert max(arrivals) > 5000


def test_easyfl_37_a_long_idle_gap_without_arrivals_is_no_error() -> None:
    plan = Intervals((((0.0, 2.5), (1e6, 1e6 + 2.5)),))
    run = simulate(fedasync(concurrency=1), Population(1, Constant(1.0), availability=plan), time_s=2e6)
    assert [t for (t,) in rows(run, "committed", "time_s")] == [1.0, 2.0, 1e6 + 1, 1e6 + 2]
    assert run.summary["time_s"] == 2e6


@pytest.mark.parametrize("limits", [{"time_s": 50.0}, {"versions": 10}, {"updates": 10}], ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("strategy", [fedasync(concurrency=2), fedavg(cohort=2)], ids=lambda s: s.name)
def test_when_nobody_ever_comes_back_the_run_ends_and_says_so(strategy: Strategy, limits: dict[str, Any]) -> None:
    plan = Intervals((((0.0, 3.5),), ((0.0, 2.5),)))
    run = simulate(strategy, Population(2, Constant(1.0), availability=plan), **limits)
    assert "nothing can happen any more" in run.summary["ended"]
    assert "nobody works" in run.summary["ended"]
    assert "\n" not in run.summary["ended"]
    assert run.summary["versions"] >= 2
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])


def test_a_client_paused_for_ever_is_waited_for_and_named() -> None:
    plan = Intervals((((0.0, 1.5),),))
    population = Population(1, Constant(1.0), availability=plan, when_offline="pause")
    run = simulate(fedasync(concurrency=1), population, time_s=50.0)
    assert run.summary["ledger"]["in_flight"] == 1
    assert "1 in flight at workers 0" in run.summary["ended"]


def test_a_time_out_takes_the_slot_back_from_a_client_paused_for_ever() -> None:
    plan = Intervals((((0.0, 1.5),), ((0.0, 60.0),)))
    population = Population(2, Constant(1.0), availability=plan, when_offline="pause")
    run = simulate(fedasync(concurrency=2, lease_timeout_s=5.0), population, time_s=20.0)
    assert rows(run, "failed", "time_s", "worker", "reason") == [(6.0, 0, "timeout")]
    assert run.summary["ledger"]["in_flight"] == 1


def test_a_cyclic_day_whose_length_no_float_divides_does_not_hang_a_run() -> None:
    plan = Intervals((((3.75, 14.2), (22.3, 23.6)),), 24.1)
    population = Population(1, Constant(1.0), availability=plan)
    run = simulate(fedasync(concurrency=1), population, time_s=1000.0)
    assert all(starts_and_states(run, plan.presence(1, 0)))
    assert run.summary["consumed"] > 41 * 10


def test_everybody_online_from_the_start_makes_intervals_like_always() -> None:
    plan = Intervals((((0.0, 1e9),),) * 4)
    ours, always = (
        simulate(fedbuff(concurrency=4, buffer_size=2), population, time_s=30.0)
        for population in (Population(4, Exponential(1.0), availability=plan), Population(4, Exponential(1.0)))
    )
    assert ours.events.equals(always.events)
