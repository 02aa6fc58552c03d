"""The calendar of lease ends gives them out in order, whatever they are and however they come."""

from __future__ import annotations

from heapq import heappop

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.simulation import ends as module
from fedasync.simulation.ends import Ends
from fedasync.streams import Stream

Entry = tuple[float, int]


def drain(ends: Ends[Entry], most: int) -> list[Entry]:
    found = []
    while len(found) < most:
        if not ends.near:
            ends.refill()
        if not ends.near:
            break
        found.append(heappop(ends.near))
    return found


TIMES = st.one_of(
    st.floats(0, 1e9, allow_subnormal=False),
    st.floats(0, 1e-6),
    st.sampled_from([0.0, 1.0, 5e-324, 1e300, 0.1 + 0.2, 0.3]),
    st.integers(0, 40).map(float),
)


@settings(max_examples=300, deadline=None)
@given(waves=st.lists(st.tuples(st.lists(TIMES, max_size=60), st.integers(0, 50)), max_size=8), near=st.integers(1, 9))
def test_entries_come_out_as_from_one_sorted_list(waves: list[tuple[list[float], int]], near: int) -> None:
    """New ones are never before what came out already, as for leases; in stretches of a few entries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NEAR", near)
        ends: Ends[Entry] = Ends()
        waiting: list[Entry] = []
        now, number = 0.0, 0
        for delays, taken in waves:
            for delay in delays:
                entry = (now + delay, number)
                number += 1
                ends.add(entry)
                waiting.append(entry)
                if len(ends.near) > ends.most_near:
                    ends.divide()
            waiting.sort()
            assert len(ends) == len(waiting)
            expected, waiting = waiting[:taken], waiting[taken:]
            assert drain(ends, taken) == expected
            now = expected[-1][0] if expected else now
        assert drain(ends, 10**9) == sorted(waiting)


@pytest.mark.parametrize("law", ["exponential", "alike", "few values", "huge tail"])
def test_a_hundred_thousand_in_flight(law: str) -> None:
    """At full size, with every law that strains the stretches: all at once, clumps, and a tail over ten decades."""
    draw = Stream(0, law).uniform
    duration = {
        "exponential": lambda i: draw(i) / (1.000001 - draw(i, 1)),
        "alike": lambda i: 100.0,
        "few values": lambda i: float(int(draw(i) * 3)),
        "huge tail": lambda i: 10 ** (10 * draw(i)),
    }[law]
    ends: Ends[Entry] = Ends()
    for i in range(50_000):
        ends.add((duration(i), i))
    ends.divide()
    last, number = (0.0, -1), 50_000
    for _ in range(100_000):
        (entry,) = drain(ends, 1)
        assert entry > last
        last = entry
        ends.add((entry[0] + duration(number), number))
        number += 1
        if len(ends.near) > ends.most_near:
            ends.divide()
    assert len(ends) == 50_000
