"""Time-outs that follow what was seen: learning-at-home/hivemind#676, in our words."""

from __future__ import annotations

import json
from collections import deque
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import AdaptiveTimeout, Concurrency, Coordinator, Strategy, Tumbling

RULE = AdaptiveTimeout(first_s=60.0, factor=3.0, memory=5, at_least=3, margin=1.0)


def run(rule: AdaptiveTimeout = RULE) -> Coordinator:
    return Coordinator(Strategy("s", Concurrency(9), Tumbling(1), None, lease_timeout_s=rule))


def work(c: Coordinator, start_s: float, seconds: float) -> float:
    """A lease that takes so long, and the time-out that it was given."""
    lease = c.request(0, start_s)
    assert lease is not None
    assert lease.deadline_s is not None
    c.deliver(lease.id, start_s + seconds)
    if c.step is not None:
        c.commit(start_s + seconds)
    return lease.deadline_s - lease.admitted_s


def test_the_median_and_three_median_deviations_of_the_last_five() -> None:
    c = run()
    given_ = [work(c, 100.0 * i, seconds) for i, seconds in enumerate([2.0, 4.0, 9.0, 3.0, 5.0, 5.0])]
    assert given_[:3] == [60.0] * 3, "too few were seen"
    assert given_[3] == pytest.approx(4 + 3 * 2)  # of 2, 4, 9: deviations 2, 0, 5
    assert given_[5] == pytest.approx(4 + 3 * 1)  # of 2, 4, 9, 3, 5: deviations 2, 0, 5, 1, 1
    assert work(c, 900.0, 5.0) == pytest.approx(5 + 3 * 1)  # 2 is forgotten: 4, 9, 3, 5, 5


def test_a_lease_that_timed_out_counts_with_its_time_so_that_time_outs_grow() -> None:
    c = run()
    for i in range(5):
        work(c, 100.0 * i, 1.0)
    seen = []
    for i in range(5, 12):
        lease = c.request(0, 100.0 * i)
        assert lease is not None
        assert lease.deadline_s is not None
        seen.append(lease.deadline_s - lease.admitted_s)
        c.on_timer(lease.deadline_s)
    assert seen[0] == 1.0
    assert c.ledger.failed["timeout"] == 7
    assert seen == sorted(seen)


def test_durations_that_do_not_differ_time_nobody_out() -> None:
    c = run(AdaptiveTimeout(first_s=60.0, at_least=3))
    for i in range(50):
        work(c, 0.3 * i, 0.1)
    assert c.ledger.failed == {}


@given(st.lists(st.floats(0.01, 1e3), min_size=5, max_size=5), st.floats(0.1, 10.0))
def test_it_scales_with_time_and_forgets_order(durations: list[float], scale: float) -> None:
    plain = RULE.seconds(deque(durations))
    assert plain >= median(durations)
    assert RULE.seconds(deque(reversed(durations))) == plain
    assert RULE.seconds(deque(x * scale for x in durations)) == pytest.approx(plain * scale)


def test_a_snapshot_keeps_what_was_seen() -> None:
    c = run()
    for i in range(5):
        work(c, 10.0 * i, 1.0 + i)
    again = Coordinator.restore(c.strategy, json.loads(json.dumps(c.snapshot())))
    assert again.request(3, 99.0) == c.request(3, 99.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("first_s", 0.0), ("factor", -1.0), ("memory", 2), ("at_least", 0), ("margin", 0.5), ("first_s", float("nan"))],
)
def test_what_is_no_time_out_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"adaptive time-out: {field}"):
        AdaptiveTimeout(**{"first_s": 1.0, "at_least": 3, field: value})  # type: ignore[arg-type]
