"""When versions are published: closed forms of counters, laws of what measures, truth tables of what combines them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import product
from math import floor, inf, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import (
    AllOf,
    AnyOf,
    AtLeast,
    Concurrency,
    Coordinator,
    DeterminantDoubled,
    Disagreement,
    Distance,
    EpisodeEnd,
    EveryN,
    EveryVersion,
    Exponential,
    FeatureCosine,
    ForceAfter,
    Kl,
    Linear,
    MinEigenvalueDoubled,
    Publication,
    Published,
    StalenessBudget,
    Tumbling,
    VisitsDoubled,
    WithinStaleness,
)
from fedasync.core.publication import State

from .driving import admit, strategy

Measure = Callable[[int, int], Mapping[str, float]]
"""Version about to be made and published version → measures."""

EQUAL = {
    "disagreement": 0.0,
    "kl": 0.0,
    "feature_cosine": 1.0,
    "distance": 0.0,
    "episodes": 0.0,
    "visit_doublings": 0.0,
    "log_det": 0.0,
    "min_eigenvalue": 0.0,
}


def nothing(version: int, published: int) -> Mapping[str, float]:
    return {}


def run(rule: Publication, versions: int, measure: Measure = nothing, restored_every: int = 0) -> Coordinator:
    """A coordinator after so many versions of one contribution each."""
    made = strategy(Concurrency(1), Tumbling(1), rule)
    coordinator = Coordinator(made)
    for version in range(1, versions + 1):
        step(coordinator, measure)
        if restored_every and version % restored_every == 0:
            coordinator = Coordinator.restore(made, json.loads(json.dumps(coordinator.snapshot())))
    return coordinator


def step(coordinator: Coordinator, measure: Measure = nothing) -> bool:
    """One more version; whether it was published. Only what is asked for is measured."""
    now = float(coordinator.version)
    coordinator.deliver(admit(coordinator, 0, now).id, now)
    everything = measure(coordinator.version + 1, coordinator.published)
    events = coordinator.commit(now, {name: everything[name] for name in coordinator.asks})
    return any(isinstance(event, Published) for event in events)


def published_at(rule: Publication, versions: int, measure: Measure = nothing) -> list[int]:
    made = Coordinator(strategy(Concurrency(1), Tumbling(1), rule))
    return [version for version in range(1, versions + 1) if step(made, measure)]


# -- counters ------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 40), versions=st.integers(0, 200))
def test_fixed_publishes_every_nth_version_and_no_other(n: int, versions: int) -> None:
    assert published_at(EveryN(n), versions) == [n * k for k in range(1, versions // n + 1)]


@given(base=st.integers(2, 10), versions=st.integers(1, 600))
def test_exponential_publishes_at_the_powers(base: int, versions: int) -> None:
    powers = [base**k for k in range(12) if base**k <= versions]
    assert published_at(Exponential(base), versions) == powers
    assert run(Exponential(base), versions).publications == len(powers)


def test_exponential_after_more_publications_than_a_power_can_hold_is_silent() -> None:
    state = State(version=10**9, published=10**9 - 1, publications=5000, measured={})
    assert not Exponential(2.0).due(state, {})


@given(start=st.integers(1, 8), increment=st.integers(0, 5), more=st.integers(0, 30), versions=st.integers(0, 300))
def test_linear_intervals_grow_until_the_most(start: int, increment: int, more: int, versions: int) -> None:
    most, at, expected = start + more, 0, []
    for k in range(versions):
        at += min(start + k * increment, most)
        expected.append(at)
    rule = Linear(start, increment, most)
    assert published_at(rule, versions) == [version for version in expected if version <= versions]


def test_what_counts_asks_for_no_measure() -> None:
    for rule in (EveryVersion(), EveryN(3), Linear(), Exponential()):
        made = run(rule, 50)
        assert (made.checks, made.asks, rule.measures) == (0, frozenset(), frozenset())


# -- measures ------------------------------------------------------------------------------------------------------

MEASURING = st.one_of(
    st.builds(Disagreement, st.floats(0, 0.99)),
    st.builds(Kl, st.floats(0, 5)),
    st.builds(FeatureCosine, st.floats(-0.99, 1)),
    st.builds(Distance, st.floats(0, 5)),
    st.just(EpisodeEnd()),
    st.just(VisitsDoubled()),
    st.just(DeterminantDoubled()),
    st.just(MinEigenvalueDoubled()),
)


@given(rule=MEASURING, version=st.integers(1, 1000), gathered=st.just(0.0) | st.floats(1e-6, 1e6))
def test_nothing_fires_while_the_versions_are_equal(rule: Publication, version: int, gathered: float) -> None:
    """Also where much was gathered: what counts is the gain since the last publication."""
    before = dict.fromkeys(rule.references, gathered)
    now = {**EQUAL, **before}
    if gathered > 0 and isinstance(rule, MinEigenvalueDoubled):
        now["min_eigenvalue"] = 1.999 * gathered
    assert not rule.due(State(version, 0, 0, before), now)


@given(rate=st.floats(0.1, 3), above=st.floats(0.01, 3))
def test_publishing_starts_the_measure_anew(rate: float, above: float) -> None:
    """A divergence that grows with the lag passes its threshold after the same lag every time."""
    needed = next(lag for lag in range(1, 2000) if rate * lag > above)
    versions = 4 * needed + 1
    drift = published_at(Kl(above), versions, lambda version, published: {"kl": rate * (version - published)})
    assert drift == published_at(EveryN(needed), versions)


@pytest.mark.parametrize(
    ("rule", "name", "gains"),
    [
        (EpisodeEnd(), "episodes", 1.0),
        (VisitsDoubled(), "visit_doublings", 1.0),
        (DeterminantDoubled(), "log_det", log(2)),
    ],
)
def test_what_is_gathered_counts_from_the_last_publication(rule: Publication, name: str, gains: float) -> None:
    """A measure that rises at versions 3, 4, 5 and 9, by just enough, is published then."""
    rises = [3, 4, 5, 9]
    found = published_at(rule, 12, lambda version, _: {name: sum(version >= rise for rise in rises) * gains})
    assert found == rises


def test_the_smallest_eigenvalue_doubles_from_its_value_at_the_last_publication() -> None:
    found = published_at(MinEigenvalueDoubled(), 40, lambda version, _: {"min_eigenvalue": max(0, version - 2)})
    assert found == [3, 4, 6, 10, 18, 34]


def test_of_several_blocks_one_that_doubles_is_enough_and_all_start_anew() -> None:
    rule = DeterminantDoubled(blocks=3)
    assert rule.measures == {"log_det_0", "log_det_1", "log_det_2"}

    def measure(version: int, _: int) -> Mapping[str, float]:
        return {"log_det_0": 0.0, "log_det_1": 0.3 * version, "log_det_2": log(2) * (version >= 2)}

    # at 2 for block 2; block 1 then needs 0.69 more than its 0.6: at 5, at 8
    assert published_at(rule, 9, measure) == [2, 5, 8]


def test_a_reference_is_renewed_by_every_publication_whatever_caused_it() -> None:
    """Where another rule publishes, what the determinant had reached then is what it must double from."""
    rule = AnyOf((EveryN(2), DeterminantDoubled()))
    found = published_at(rule, 6, lambda version, _: {"log_det": 0.36 * version})
    assert found == [2, 4, 6], "log det grows by 0.72 in two versions and by 0.36 in one"
    made = run(rule, 6, lambda version, _: {"log_det": 0.36 * version})
    assert made.snapshot()["remembered"] == {"log_det": pytest.approx(0.36 * 6)}


DRIFTS = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3, 1.0]) | st.floats(0, 2), min_size=1, max_size=60)


@given(drifts=DRIFTS, thresholds=st.tuples(st.floats(0, 0.98), st.floats(0, 0.98)))
def test_a_looser_threshold_never_publishes_more(drifts: list[float], thresholds: tuple[float, float]) -> None:
    """On any path along which divergence adds up; the law need not hold for a policy that turns back."""
    total = [sum(drifts[:version]) for version in range(len(drifts) + 1)]
    strict, loose = sorted(thresholds)

    def apart(version: int, published: int) -> Mapping[str, float]:
        kl = total[version] - total[published]
        return {"kl": kl, "distance": kl, "disagreement": min(1.0, kl), "feature_cosine": max(-1.0, 1 - kl)}

    pairs: list[tuple[Publication, Publication]] = [
        (Kl(strict), Kl(loose)),
        (Distance(strict), Distance(loose)),
        (Disagreement(strict), Disagreement(loose)),
        (FeatureCosine(1 - strict), FeatureCosine(1 - loose)),
    ]
    for tight, wide in pairs:
        often, seldom = published_at(tight, len(drifts), apart), published_at(wide, len(drifts), apart)
        assert len(often) >= len(seldom)
        assert all(first <= second for first, second in zip(often, seldom, strict=False))


@given(every=st.integers(1, 7), versions=st.integers(0, 40))
def test_a_measure_is_taken_at_every_cth_version_only(every: int, versions: int) -> None:
    made = run(Kl(1e9, check_every=every), versions, lambda *_: {"kl": 1.0})
    assert (made.checks, made.publications) == (versions // every, 0)
    assert run(Kl(0, check_every=every), versions, lambda *_: {"kl": 1.0}).publications == versions // every


# -- combinations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fired", list(product([False, True], repeat=3)))
def test_and_and_or_are_what_they_say(fired: tuple[bool, bool, bool]) -> None:
    kl, distance, counted = fired
    measured = {"kl": 2.0 if kl else 0.0, "distance": 2.0 if distance else 0.0}
    state = State(version=4, published=0 if counted else 3, publications=0, measured={})
    rules = (Kl(1), Distance(1), EveryN(4))
    assert AllOf(rules).due(state, measured) is (kl and distance and counted)
    assert AnyOf(rules).due(state, measured) is (kl or distance or counted)
    assert AnyOf((AllOf(rules[:2]), rules[2])).due(state, measured) is ((kl and distance) or counted)
    assert AllOf((AnyOf(rules[:2]), rules[2])).due(state, measured) is ((kl or distance) and counted)


@pytest.mark.parametrize(("lag", "fired"), list(product(range(1, 7), [False, True])))
def test_intervals_around_a_rule(lag: int, fired: bool) -> None:
    state, measured = State(10, 10 - lag, 0, {}), {"kl": 2.0 if fired else 0.0}
    assert AtLeast(Kl(1), 3).due(state, measured) is (fired and lag >= 3)
    assert ForceAfter(Kl(1), 4).due(state, measured) is (fired or lag >= 4)
    assert WithinStaleness(Kl(1), 4).due(state, measured) is (fired or lag > 4)
    assert WithinStaleness(AtLeast(Kl(1), 3), 1).due(state, measured) is (lag >= 2 and (lag > 1 or fired))


def test_counters_that_decide_spare_the_check() -> None:
    always: Measure = lambda *_: {"kl": 0.0, "distance": 0.0}  # noqa: E731
    assert run(AnyOf((Kl(1), EveryN(4))), 12, always).checks == 9, "not at every fourth version"
    assert run(AllOf((Kl(1), EveryN(4))), 12, always).checks == 9, "only from the fourth version on"
    assert run(AtLeast(Kl(1), 5), 12, always).checks == 8
    assert run(ForceAfter(Kl(1), 3), 12, always).checks == 8
    assert run(WithinStaleness(Kl(1), 0), 12, always).checks == 0
    assert run(AllOf((Kl(1), Distance(1))), 12, always).checks == 24
    assert run(AnyOf((EveryVersion(), Kl(1), Distance(1))), 12, always).checks == 0
    assert run(AllOf((Kl(1, check_every=2), Distance(1, check_every=3))), 12, always).checks == 4


COUNTING = st.one_of(
    st.just(EveryVersion()),
    st.builds(EveryN, st.integers(1, 5)),
    st.builds(lambda start, step, more: Linear(start, step, start + more), *[st.integers(1, 4)] * 3),
    st.builds(Exponential, st.sampled_from([1.5, 2.0, 3.0])),
)
CHECKED = st.one_of(
    MEASURING, st.builds(Kl, st.just(1.0), st.integers(1, 3)), st.builds(DeterminantDoubled, st.integers(1, 2))
)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, min_size=1, max_size=3).map(tuple)
    small = st.integers(1, 6)
    return st.one_of(
        st.builds(AllOf, few),
        st.builds(AnyOf, few),
        st.builds(AtLeast, inner, small),
        st.builds(ForceAfter, inner, small),
        st.builds(WithinStaleness, inner, st.integers(0, 5)),
    )


RULES = st.recursive(st.one_of(COUNTING, CHECKED), _around, max_leaves=5)
LUCK = st.lists(st.floats(0, 2), min_size=1, max_size=30)


def luck(numbers: list[float]) -> Measure:
    """Measures that jump as they like; what is gathered never falls."""

    def measure(version: int, _: int) -> Mapping[str, float]:
        x, total = numbers[version % len(numbers)], sum(numbers[k % len(numbers)] for k in range(version + 1))
        found = {"kl": x, "distance": x, "disagreement": min(1.0, x), "feature_cosine": 1 - x}
        gathered = {
            "episodes": floor(total),
            "visit_doublings": floor(total),
            "log_det": total,
            "min_eigenvalue": total,
        }
        blocks = {f"log_det_{block}": total * block for block in range(2)}
        return {**found, **gathered, **blocks}

    return measure


@given(rule=RULES, numbers=LUCK)
def test_what_is_asked_for_is_enough_and_no_rule_lags_beyond_its_bound(rule: Publication, numbers: list[float]) -> None:
    """The decision on the measures asked for is the one on all of them; ``most_lag`` holds after every commit."""
    measure = luck(numbers)
    coordinator = Coordinator(strategy(Concurrency(1), Tumbling(1), rule))
    for version in range(1, 31):
        state = State(version, coordinator.published, coordinator.publications, coordinator.snapshot()["remembered"])
        everything = rule.due(state, measure(version, coordinator.published))
        assert rule.references <= rule.measures
        assert coordinator.asks <= rule.measures
        checks = coordinator.checks + len(coordinator.asks)
        assert step(coordinator, measure) is everything
        assert coordinator.checks == checks
        assert coordinator.version - coordinator.published <= rule.most_lag


@given(rule=RULES, eta=st.integers(0, 4), numbers=LUCK)
def test_within_staleness_the_lag_never_exceeds_eta(rule: Publication, eta: int, numbers: list[float]) -> None:
    bounded = WithinStaleness(rule, eta)
    assert bounded.most_lag <= eta
    coordinator = Coordinator(strategy(Concurrency(1), Tumbling(1), bounded, max_staleness=eta))
    for _ in range(40):
        step(coordinator, luck(numbers))
        assert coordinator.version - coordinator.published <= eta


@given(rule=RULES, numbers=LUCK, every=st.integers(1, 5))
def test_a_snapshot_changes_nothing(rule: Publication, numbers: list[float], every: int) -> None:
    undisturbed, restored = (run(rule, 25, luck(numbers), restored_every) for restored_every in (0, every))
    assert restored.snapshot() == undisturbed.snapshot()


def test_a_snapshot_with_a_step_outstanding_asks_for_the_same() -> None:
    made = strategy(Concurrency(1), Tumbling(1), AnyOf((Kl(1), DeterminantDoubled())))
    coordinator = Coordinator(made)
    coordinator.deliver(admit(coordinator, 0, 0.0).id, 0.0)
    again = Coordinator.restore(made, json.loads(json.dumps(coordinator.snapshot())))
    assert again.asks == coordinator.asks == {"kl", "log_det"}
    for one in (coordinator, again):
        one.commit(1.0, {"kl": 0.0, "log_det": 1.0})
    assert (again.publications, again.checks) == (1, 2)
    assert again.snapshot() == coordinator.snapshot()


@pytest.mark.parametrize(
    ("rule", "bound"),
    [
        (EveryVersion(), 0),
        (EveryN(5), 4),
        (Linear(2, 3, 9), 8),
        (Linear(2, 0, 9), 1),
        (Exponential(), inf),
        (Kl(), inf),
        (AllOf((EveryN(2), EveryN(7))), 6),
        (AnyOf((Kl(), EveryN(7))), 6),
        (AtLeast(EveryN(2), 5), 4),
        (ForceAfter(Kl(), 5), 4),
        (WithinStaleness(EveryN(3), 5), 2),
        (WithinStaleness(Kl(), 5), 5),
    ],
    ids=repr,
)
def test_how_far_the_published_version_may_lag(rule: Publication, bound: float) -> None:
    assert rule.most_lag == bound


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "got"),
    [
        (None, "got none"),
        ({}, "got none"),
        ({"distance": 1.0}, "got distance"),
        ({"kl": float("nan")}, "got kl = nan"),
        ({"kl": float("inf")}, "got kl = inf"),
    ],
)
def test_a_measure_that_is_missing_or_not_finite_leaves_the_step_outstanding(
    measured: dict[str, float] | None, got: str
) -> None:
    coordinator = Coordinator(strategy(Concurrency(1), Tumbling(1), Kl(1)))
    coordinator.deliver(admit(coordinator, 0, 0.0).id, 0.0)
    before = coordinator.snapshot()
    with pytest.raises(ValueError, match=rf"commit of version 1: publication 'kl' wants kl, {got}; a finite number"):
        coordinator.commit(1.0, measured)
    assert coordinator.snapshot() == before
    assert coordinator.commit(1.0, {"kl": 2.0})[0] == Published(1, "continue")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EveryVersion("sometimes"), "in_flight must be 'continue' or"),
        (lambda: Linear(0), "start must be an integer ≥ 1, got 0"),
        (lambda: Linear(5, 1, 4), "most must be an integer ≥ 5, got 4"),
        (lambda: Exponential(1), "base must be a finite number > 1, got 1"),
        (lambda: Disagreement(1.0), "above must be a finite number ≥ 0 and < 1, got 1.0"),
        (lambda: Kl(-0.1), "above must be a finite number ≥ 0, got -0.1"),
        (lambda: FeatureCosine(1.1), "below must be a finite number > -1 and ≤ 1, got 1.1"),
        (lambda: Distance(float("nan")), "above must be a finite number ≥ 0, got nan"),
        (lambda: Kl(check_every=0), "check_every must be an integer ≥ 1, got 0"),
        (lambda: DeterminantDoubled(blocks=0), "blocks must be an integer ≥ 1, got 0"),
        (lambda: AnyOf(()), "must hold at least one rule"),
        (lambda: AllOf((3,)), "got 3 as a rule"),
        (lambda: AtLeast(Kl(), 0), "versions must be an integer ≥ 1, got 0"),
        (lambda: WithinStaleness(Kl(), -1), "eta must be an integer ≥ 0, got -1"),
        (lambda: ForceAfter(EveryN(3, "abort"), 5), "in_flight belongs to the outermost rule"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: strategy(Concurrency(2), Tumbling(1), Kl(), max_staleness=3),
            "'kl' lets it lag without bound; within_staleness with eta ≤ 3",
        ),
        (
            lambda: strategy(Concurrency(2), Tumbling(1), ForceAfter(Kl(), 6), max_staleness=3),
            "lets it lag by 5; max_staleness ≥ 5, or within_staleness with eta ≤ 3",
        ),
        (lambda: strategy(StalenessBudget(2, 4), Tumbling(4), Kl()), "within_staleness with eta ≤ 2"),
        (lambda: strategy(StalenessBudget(2, 4), Tumbling(4), EveryN(4)), "lets it lag by 3; within_staleness"),
    ],
)
def test_a_publication_that_may_lag_beyond_a_bound_on_staleness_is_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_publication_within_the_bounds_is_accepted() -> None:
    rule = WithinStaleness(Kl(), 2)
    assert strategy(Concurrency(2), Tumbling(1), rule, max_staleness=2).publication is rule
    assert strategy(StalenessBudget(2, 4), Tumbling(4), rule).publication is rule
