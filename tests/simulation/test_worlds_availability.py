"""When clients are online: by what data they hold, by the hour of their day, as recorded, and region by region."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import cos, inf, lcm, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedasync.runs.run import Run
from fedasync.simulation.availability import (
    AvailabilityFile,
    ByLabels,
    Daily,
    Intervals,
    OnOff,
    Presence,
)
from fedasync.simulation.laws import Constant, Exponential, Lognormal, Pareto, Uniform, Values
from fedasync.simulation.outages import Cycle, InRegions, OutagesOnOff, OutageTimes, never_meet
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.refusals import check_turns
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync

from .worlds import Mapped, column, play


def share_online(presence: Presence, clients: Sequence[int], at: Sequence[float]) -> float:
    return float(np.mean([presence(client, t)[0] for client in clients for t in at]))


def check_changes(presence: Presence, client: int, until_s: float, probe: int = 3) -> list[float]:
    """Walk a client's history: every change lies ahead, changes the state, and nothing changes between two."""
    t, changes = 0.0, list[float]()
    state, until = presence(client, t)
    while until < until_s:
        assert until > t
        for k in range(1, probe + 1):
            between = t + (until - t) * k / (probe + 1)
            assert presence(client, between) == (state, until)
        t = until
        following, until = presence(client, t)
        assert following is not state
        state = following
        changes.append(t)
    return changes


# -- by labels -------------------------------------------------------------------------------------------------


def test_shares_are_mifas() -> None:
    """p = p_min + (1 − p_min)·min(label)/9, with ten classes."""
    labels = [[0, 5], [9], [3, 4], [8, 1, 7]]
    expected = [0.1, 1.0, 0.1 + 0.9 * 3 / 9, 0.1 + 0.9 * 1 / 9]
    assert ByLabels(0.1, 60.0).shares(labels) == pytest.approx(expected)
    assert ByLabels(0.1, 60.0, classes=19).shares([[9]]) == pytest.approx([0.1 + 0.9 * 9 / 18])


def test_a_client_is_online_in_its_share_of_slots_independently_of_each_other() -> None:
    """Four standard errors of a fraction over 20,000 slots; neighbours agree as often as strangers."""
    presence = ByLabels(0.2, 10.0, classes=10).presence(2, 7, [[3], [9, 2]])
    slots = np.array([[presence(client, 10.0 * k + 5)[0] for k in range(20_000)] for client in range(2)])
    for client, p in enumerate((0.2 + 0.8 * 3 / 9, 0.2 + 0.8 * 2 / 9)):
        assert abs(slots[client].mean() - p) < 4 * sqrt(p * (1 - p) / 20_000)
        both = (slots[client][1:] & slots[client][:-1]).mean()
        assert abs(both - p * p) < 4 * sqrt(p * p / 20_000)


def test_slots_change_where_they_say() -> None:
    presence = ByLabels(0.5, 0.7, classes=10).presence(3, 1, [[0], [4], [9]])
    changes = check_changes(presence, 0, 300.0)
    assert all(abs(t / 0.7 - round(t / 0.7)) < 1e-9 for t in changes)
    assert len(changes) > 100
    check_changes(presence, 1, 300.0)
    assert presence(2, 5.0) == (True, inf)


class Labelled(Mapped):
    """A workload that knows its labels."""

    def client_labels(self) -> list[list[int]]:
        return [[client % 10] for client in range(self.clients)]


def starts_by_client(run: Run) -> np.ndarray:
    return np.bincount(run.events.filter(run.events["kind"] == "admitted")["worker"].to_numpy(), minlength=10)


def test_clients_of_rare_labels_work_less() -> None:
    world = Labelled(10, lambda _, w: w)
    population = Population(duration_s=Constant(1.0), availability=ByLabels(0.1, 2.0))
    run = simulate(fedasync(concurrency=2), population, world, seed=1, time_s=1200.0)
    starts = starts_by_client(run)
    assert starts[0] < 0.5 * starts[5] < starts[9]


@pytest.mark.parametrize("workload", [None, Mapped(10, lambda _, w: w)], ids=["timing only", "no labels"])
def test_availability_by_labels_needs_a_workload_that_says_them(workload: Any) -> None:
    population = Population(10, duration_s=Constant(1.0), availability=ByLabels(0.1, 2.0))
    with pytest.raises(ValueError, match=r"by_labels: a workload that says its clients' labels \(client_labels\)"):
        simulate(fedasync(concurrency=2), population, workload, time_s=5.0)


@pytest.mark.parametrize(
    ("labels", "classes", "told"),
    [
        ([[0], []], None, "client 1 has labels \\[\\]"),
        ([[0], [-1]], None, "client 1 has labels \\[-1\\]"),
        ([[0], [12]], 10, "classes = 10, but a client has label 12; 13 would do"),
        ([[0]], None, "gives labels of 1 clients, but has 2"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: list[list[int]], classes: int | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ByLabels(0.5, 1.0, classes).presence(2, 0, labels)


# -- the day ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turnover_s", [0.5, 4.0, 40.0])
def test_the_share_online_follows_the_day_through_a_low_pass_filter(turnover_s: float) -> None:
    """At some hours of two days, over 1000 clients: four standard errors of a fraction, at every hour."""
    law = Daily(0.5, 0.4, turnover_s, day_s=24.0, peak_s=20.0)
    presence = law.presence(1000, 5)
    for hour in (0.0, 3.0, 7.5, 20.0, 24.0, 37.0):
        expected = law.expected_share(hour)
        found = share_online(presence, range(1000), [hour])
        assert abs(found - expected) < 4 * sqrt(expected * (1 - expected) / 1000), hour


def test_a_quick_turnover_follows_the_target_and_a_slow_one_its_mean() -> None:
    at = np.linspace(0, 24, 25)
    quick, slow = Daily(0.4, 0.3, 1e-3, 24.0, 5.0), Daily(0.4, 0.3, 1e5, 24.0, 5.0)
    assert [quick.expected_share(t) for t in at] == pytest.approx(
        [0.4 + 0.3 * cos(2 * pi * (t - 5) / 24) for t in at], abs=1e-3
    )
    assert [slow.expected_share(t) for t in at] == pytest.approx([0.4] * 25, abs=1e-3)


def test_without_a_swing_it_is_the_on_off_renewal() -> None:
    """On for turnover/(1 − share), off for turnover/share on average, both exponential."""
    presence = Daily(0.25, 0.0, 3.0, 24.0).presence(1, 2)
    changes = np.diff(check_changes(presence, 0, 40_000.0, probe=1))
    first_on = presence(0, 0.0)[0]
    on, off = (changes[first_on::2], changes[not first_on :: 2]) if first_on else (changes[::2], changes[1::2])
    for lengths, mean in ((on, 4.0), (off, 12.0)):
        assert abs(lengths.mean() - mean) < 4 * mean / sqrt(len(lengths))
        assert lengths.std() == pytest.approx(mean, rel=0.15)


def test_a_time_zone_shifts_the_day() -> None:
    """A client whose clock leads by 6 of 24 hours sees its evening 6 hours sooner."""
    law = Daily(0.5, 0.45, 0.5, 24.0, peak_s=18.0, phase_s=Values((0.0, 6.0)))
    assert law.expected_share(12.0, 6.0) == law.expected_share(18.0, 0.0)
    days = [24.0 * k for k in range(400)]
    presence = law.presence(2, 9)
    noon = [share_online(presence, [client], [12.0 + day for day in days]) for client in (0, 1)]
    for client, phase in ((0, 0.0), (1, 6.0)):
        expected = law.expected_share(12.0, phase)
        assert abs(noon[client] - expected) < 4 * sqrt(expected * (1 - expected) / 400)
    assert noon[1] > noon[0] + 0.2


def test_a_client_online_for_certain_at_its_peak_still_gets_on() -> None:
    check_changes(Daily(0.5, 0.5, 2.0, 24.0).presence(2, 3), 1, 600.0)


def test_the_order_of_questions_does_not_matter() -> None:
    law = Daily(0.3, 0.2, 600.0, phase_s=Uniform(0.0, 86400.0))
    ahead, back = law.presence(3, 1), law.presence(3, 1)
    times = [float(t) for t in range(0, 200_000, 7919)]
    asked = {(c, t): ahead(c, t) for c in range(3) for t in times}
    assert {(c, t): back(c, t) for c in (2, 0, 1) for t in reversed(times)} == asked


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"share": 0.5, "swing": 0.6}, "daily: swing must be a finite number ≥ 0 and ≤ 0.5, got 0.6"),
        ({"share": 1.0}, "daily: share must be a finite number > 0 and < 1"),
        ({"turnover_s": 0.0}, "daily: turnover_s must be a finite number > 0"),
        ({"day_s": inf}, "daily: day_s must be a finite number > 0"),
    ],
)
def test_days_that_are_none_are_refused(keys: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Daily(**keys)  # type: ignore[arg-type]


# -- as recorded -----------------------------------------------------------------------------------------------

RECORDED = """client,active_s,inactive_s,finish_time_s
7,10,20,100
7,40,50,100
3,0,30,60
9,5,200,90
"""


def test_recorded_times_repeat_with_their_own_period(tmp_path: Path) -> None:
    """Client 3 of the file is our first; one that is online beyond its finish is cut there."""
    file = tmp_path / "behaviour.csv"
    file.write_text(RECORDED)
    presence = AvailabilityFile(str(file)).presence(4, 0)
    for turn in (0, 1, 5):
        assert presence(0, 60 * turn + 10.0) == (True, 60 * turn + 30)
        assert presence(1, 100 * turn + 15.0) == (True, 100 * turn + 20)
        assert presence(1, 100 * turn + 20.0) == (False, 100 * turn + 40)
        assert presence(1, 100 * turn + 50.0) == (False, 100 * turn + 110)
        assert presence(2, 90 * turn + 2.0) == (False, 90 * turn + 5)
        assert presence(2, 90 * turn + 89.0) == (True, 90 * turn + 90)
    assert [presence(3, t) for t in (0.0, 33.0, 61.0)] == [presence(0, t) for t in (0.0, 33.0, 61.0)]


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True),
    finish=st.integers(1, 50),
    t=st.integers(0, 400),
)
def test_a_recorded_client_is_online_when_fedscale_says(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], finish: int, t: int
) -> None:
    """By FedScale's rule: the time modulo finish_time, looked for between active[i] and inactive[i]."""
    edges = sorted(cuts)[: len(cuts) // 2 * 2]
    pairs = list(zip(edges[::2], edges[1::2], strict=True))
    file = tmp_path_factory.mktemp("recorded") / "one.csv"
    rows = [f"0,{start},{end},{finish}" for start, end in pairs]
    file.write_text("\n".join(["client,active_s,inactive_s,finish_time_s", *rows]))
    norm = (t + 0.5) % finish
    expected = any(start <= norm <= end for start, end in pairs)
    assert AvailabilityFile(str(file)).presence(1, 0)(0, t + 0.5)[0] is expected


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("0,5,3,10\n", "row 1: \\[5, 3\\] must have 0 ≤ active_s ≤ inactive_s and come after 0"),
        ("0,5,8,10\n0,7,9,10\n", "row 2: \\[7, 9\\] must have .* come after 8"),
        ("0,5,8,10\n0,8,9,11\n", "row 2: finish_time_s = 11; one number > 0 for all rows of a client"),
        ("0,5,8,10\n0,9,,10\n", "row 2: a value is missing"),
        ("a,5,6,10\n", "column 'client' does not hold numbers alone"),
        ("", "has no rows"),
    ],
)
def test_recorded_times_that_cannot_be_are_refused(tmp_path: Path, rows: str, told: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("client,active_s,inactive_s,finish_time_s\n" + rows)
    with pytest.raises(ValueError, match=told):
        AvailabilityFile(str(file)).presence(1, 0)


# -- regions ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    dark=st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
    online=st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
    t=st.integers(0, 700).map(lambda k: k / 10),
)
def test_a_client_is_online_when_it_and_its_region_are(dark: list[int], online: list[int], t: float) -> None:
    """Against a look at every instant."""

    def pairs(cuts: list[int]) -> tuple[tuple[float, float], ...]:
        edges = sorted(cuts)[: len(cuts) // 2 * 2]
        return tuple((float(a), float(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))

    def inside(intervals: tuple[tuple[float, float], ...], at: float) -> bool:
        return any(start <= at < end for start, end in intervals)

    darkness, presence_ = pairs(dark), pairs(online)
    both = InRegions(OutageTimes((darkness,)), Intervals((presence_,)).presence(1, 0), 1, 0)

    def expected(at: float) -> bool:
        return inside(presence_, at) and not inside(darkness, at)

    state, until = both(0, t)
    assert state is expected(t)
    later = range(int(t) + 1, 62)
    change = next((float(k) for k in later if expected(float(k)) is not state), inf)
    assert until == change


def test_all_clients_of_a_region_go_dark_at_once_and_no_others() -> None:
    outages = OutageTimes((((10.0, 20.0),), ()), shares=(0.25, 0.75))
    clients = Clients(Population(40, Constant(1.0), outages=outages), 3)
    assert clients.presence is not None
    assert clients.region_of is not None
    assert [clients.region_of.count(0), clients.region_of.count(1)] == [10, 30]
    for client in range(40):
        in_dark = clients.region_of[client] == 0
        assert clients.presence(client, 15.0) == ((False, 20.0) if in_dark else (True, inf))


def test_the_share_of_time_lit_is_e_up_over_e_up_plus_e_down() -> None:
    regions = 400
    presence = InRegions(OutagesOnOff(regions, Exponential(30.0), Exponential(10.0)), None, regions, 3)
    assert sorted(presence.region_of) == list(range(regions))
    found = share_online(presence, range(regions), [7.0, 500.0, 1000.0, 1500.0])
    assert abs(found - 0.75) < 4 * sqrt(0.75 * 0.25 / (4 * regions))


def test_outages_change_no_clients_own_luck() -> None:
    """The same people are on and off; a region only hides them."""
    own = OnOff(Exponential(50.0), Exponential(20.0))
    without = Clients(Population(20, Constant(1.0), availability=own), 4).presence
    within = Clients(Population(20, Constant(1.0), availability=own, outages=OutagesOnOff(2)), 4).presence
    assert without is not None
    assert within is not None
    for client in range(20):
        for t in range(0, 5000, 37):
            assert within(client, float(t))[0] <= without(client, float(t))[0]


def turns(*pairs: tuple[float, float], cycle_s: float) -> Presence:
    return Intervals((pairs,), cycle_s).presence(1, 0)


NEVER = {
    "half a turn each": (turns((0.0, 5.0), cycle_s=10.0), OutageTimes((((0.0, 5.0),),), 10.0)),
    "turns of one and of three": (turns((0.0, 1.0), cycle_s=2.0), OutageTimes((((0.0, 1.0), (2.0, 6.0)),), 6.0)),
    "in decimals, if not in binary": (turns((0.0, 0.05), cycle_s=0.1), OutageTimes((((0.0, 0.06), (0.09, 0.3)),), 0.3)),
}


@pytest.mark.parametrize("name", NEVER)
def test_a_client_that_is_on_in_its_regions_darkness_alone_is_off_for_ever(name: str) -> None:
    own, outages = NEVER[name]
    both = InRegions(outages, own, 1, 0)
    assert [both(0, t) for t in (0.0, 7.3, 1e6)] == [(False, inf)] * 3


@pytest.mark.parametrize("seed", range(8))
def test_turns_of_constant_length_meet_at_once_or_never(seed: int) -> None:
    """On for 5 s and off for 5 s, both: in step, or in turns."""
    steady = OnOff(Constant(5.0), Constant(5.0))
    own = steady.presence(1, seed)
    both = InRegions(OutagesOnOff(1, Constant(5.0), Constant(5.0)), own, 1, seed)
    lit = OutagesOnOff(1, Constant(5.0), Constant(5.0)).lit(seed)
    if lit(0, 0.0)[0] is own(0, 0.0)[0]:
        assert both(0, 0.0) == (own(0, 0.0)[0], 5.0)
    else:
        assert both(0, 0.0) == (False, inf)


@pytest.mark.parametrize("limit", [{"updates": 3}, {"time_s": 100.0}])
def test_a_run_in_which_nobody_can_ever_work_ends(limit: dict[str, Any]) -> None:
    population = Population(
        1,
        Constant(1.0),
        availability=Intervals((((0.0, 5.0),),), cycle_s=10.0),
        outages=OutageTimes((((0.0, 5.0),),), cycle_s=10.0),
    )
    run = simulate(fedasync(concurrency=1), population, **limit)
    assert run.summary["versions"] == 0
    assert run.summary["ended"].startswith("nothing can happen any more")


def test_a_client_that_meets_its_region_once_in_many_turns_is_told_when_to_ask_again() -> None:
    """Turns of 10 s and of 10.001 s, on for 1 s each: apart by 5 s at first, they meet after some 4,000 turns."""
    own = turns((0.0, 1.0), cycle_s=10.0)
    both = InRegions(OutageTimes((((0.0, 5.0), (6.0, 10.001)),), cycle_s=10.001), own, 1, 0)
    t, asked, online = 0.0, 0, False
    while not online:
        online, until = both(0, t)
        if not online:
            assert t < until < inf
            t = until
        asked += 1
    assert 1 < asked < 20
    # The region's k-th second on begins at 5 + 10.001·k, the client's at 10·(k + 1): k = 4001 is the first to reach it.
    assert t == pytest.approx(40_020.0)
    assert until > t
    run = simulate(
        fedasync(concurrency=1),
        Population(
            1,
            Constant(0.009),
            availability=Intervals((((0.0, 1.0),),), cycle_s=10.0),
            outages=OutageTimes((((0.0, 5.0), (6.0, 10.001)),), cycle_s=10.001),
            when_offline="pause",
        ),
        updates=1,
    )
    assert run.summary["versions"] == 1
    assert run.summary["time_s"] == pytest.approx(t + 30.0, abs=1.0)  # 1, 2, 3 and 3 of 4 milliseconds


@settings(max_examples=150, deadline=None)
@given(
    one=st.lists(st.integers(0, 12), min_size=2, max_size=4, unique=True),
    other=st.lists(st.integers(0, 12), min_size=2, max_size=4, unique=True),
    spare=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    starts_on=st.tuples(st.booleans(), st.booleans()),
    unit=st.sampled_from([Fraction(1), Fraction(1, 10), Fraction(7, 3)]),
)
@example(one=[0, 3, 5], other=[0, 5, 11], spare=(2, 4), starts_on=(True, True), unit=Fraction(1))
def test_cycles_never_meet_just_when_no_instant_of_their_common_turn_has_both(
    one: list[int], other: list[int], spare: tuple[int, int], starts_on: tuple[bool, bool], unit: Fraction
) -> None:
    """Against a look at every instant of the common multiple of both turns."""
    lengths = [max(edges) + 1 + more for edges, more in zip((one, other), spare, strict=True)]

    def on(edges: list[int], length: int, first: bool, at: int) -> bool:
        return (sum(edge <= at % length for edge in edges) % 2 == 1) != first

    meet = any(
        on(one, lengths[0], starts_on[0], at) and on(other, lengths[1], starts_on[1], at) for at in range(lcm(*lengths))
    )
    cycles = [
        Cycle(tuple(edge * unit for edge in sorted(edges)), first, length * unit)
        for edges, first, length in zip((one, other), starts_on, lengths, strict=True)
    ]
    assert never_meet(*cycles) is not meet
    assert not never_meet(cycles[0], None)
    assert not never_meet(None, cycles[1])


@pytest.mark.parametrize(("when_offline", "ends", "lost"), [("lose", [], 4), ("pause", [13.0] * 4, 0)])
def test_leases_in_work_are_lost_with_their_region_or_pause(when_offline: Any, ends: list[float], lost: int) -> None:
    """Four leases of 8 s; the only region is dark from 5 s to 10 s."""
    population = Population(4, Constant(8.0), outages=OutageTimes((((5.0, 10.0),),)), when_offline=when_offline)
    simulation = play(fedasync(concurrency=4), population, time_s=14.0)
    assert column(simulation.log, "time_s", "delivered").tolist() == ends
    assert column(simulation.log, "time_s", "failed").tolist() == [5.0] * lost


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: OutageTimes(()), "outages: dark is empty"),
        (lambda: OutageTimes((((5.0, 3.0),),)), "outages: region 0: \\[5.0, 3.0\\] must have 0 ≤ start < end"),
        (lambda: OutageTimes((((5.0, 30.0),),), cycle_s=20.0), "outages: region 0 is dark until 30 s, beyond cycle_s"),
        (lambda: OutageTimes(((),), shares=(0.5, 0.5)), "outages: 2 shares for 1 regions"),
        (lambda: OutagesOnOff(2, shares=(0.5, 0.6)), "outages: shares must add up to 1"),
        (lambda: OutagesOnOff(0), "outages: regions must be an integer ≥ 1"),
    ],
)
def test_outages_that_make_no_sense_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_classification_says_its_clients_labels() -> None:
    from fedasync.workloads.classification import Classification

    features, labels = np.zeros((6, 2)), np.array([3, 0, 3, 1, 2, 1])
    parts = [np.array([0, 2]), np.array([1, 3, 5]), np.array([4])]
    workload = Classification(features, labels, features, labels, parts, module=lambda: None)
    assert workload.client_labels() == [[3], [0, 1], [2]]
    assert ByLabels(0.2, 1.0).shares(workload.client_labels()) == pytest.approx([1.0, 0.2, 0.2 + 0.8 * 2 / 3])


@pytest.mark.parametrize(
    "world",
    [
        {"availability": Daily(turnover_s=1e-300)},
        {"availability": Daily(turnover_s=1e-7)},
        {"availability": OnOff(Constant(1e-7), Constant(1e-7))},
        {"availability": OnOff(Lognormal(1.0, 16.0), Lognormal(1.0, 16.0))},
        {"availability": ByLabels(0.1, 1e-7)},
        {"availability": Intervals((((0.0, 5e-8),),) * 3, cycle_s=1e-7)},
        {"outages": OutagesOnOff(2, Constant(1e-7), Constant(1e-7))},
        {"outages": OutageTimes((((0.0, 5e-8),),), cycle_s=1e-7)},
    ],
)
def test_turns_too_short_for_the_run_are_refused(world: dict[str, Any]) -> None:
    clients = Clients(Population(3, Constant(1.0), **world), 0, labels=[[0], [1], [2]])
    with pytest.raises(ValueError, match=r"coming and going takes .* s on average, too little for time_s = 10"):
        check_turns(clients, 10.0)
    with pytest.raises(ValueError, match="too little for a lease of 1 s: at most 1,000,000 turns"):
        check_turns(clients, None)
    check_turns(Clients(Population(3, Constant(1.0), availability=Daily()), 0), 1e6)


def test_recorded_turns_too_short_for_the_run_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("client,active_s,inactive_s,finish_time_s\n0,0,1e-9,2e-9\n")
    clients = Clients(Population(2, Constant(1.0), availability=AvailabilityFile(str(file))), 0)
    with pytest.raises(ValueError, match="takes 2e-09 s on average"):
        check_turns(clients, 10.0)


def test_more_regions_than_clients_are_refused() -> None:
    with pytest.raises(ValueError, match="1,000,000,000 regions for 8 clients"):
        Clients(Population(8, Constant(1.0), outages=OutagesOnOff(1_000_000_000)), 0)


def test_three_numbers_are_no_interval() -> None:
    with pytest.raises(ValueError, match=r"intervals: client 1: got \[0.0, 1.0, 2.0\]; a pair"):
        Intervals(((), ((0.0, 1.0, 2.0),)))
    with pytest.raises(ValueError, match=r"outages: region 0: got \[1.0\]; a pair"):
        OutageTimes((((1.0,),),))


def test_draws_beyond_what_floats_hold() -> None:
    assert Pareto(1.0, 0.001, 10.0).quantile(0.99) == 10.0
    with pytest.raises(ValueError, match="sigma must be ≤ 50, got 100"):
        Lognormal(1.0, 100.0)
