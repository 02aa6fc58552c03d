"""Laws of the trace and of the table of leases it is made from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.report import trace_events, write_trace
from fedasync.report.measures import leases, tracks
from fedasync.runs.run import Run

from .synthetic import SCHEMA, asynchronous, cohort

RUNS = {
    "cohort": cohort(end_s=20.0, timing_only=True),
    "asynchronous": asynchronous(end_s=20.0, timing_only=True, most_stale=2, failing=0.1),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_every_admitted_lease_is_one_slice_and_slices_never_overlap(run: Run) -> None:
    slices = [event for event in trace_events(run.events)["traceEvents"] if event["ph"] == "X"]
    admitted = run.events.filter(pl.col("kind") == "admitted")["lease"].to_list()
    assert sorted(event["args"]["lease"] for event in slices) == sorted(admitted)
    lanes: dict[int, list[tuple[int, int]]] = {}
    for event in slices:
        assert isinstance(event["ts"], int)
        assert event["dur"] >= 0
        lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        for (_, end), (begin, _) in pairwise(sorted(spans)):
            assert end <= begin
    # No worker of these logs has two leases at a time, so each has one track.
    assert len(lanes) == run.events["worker"].n_unique() - 1


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_outcomes_agree_with_the_ledger(run: Run) -> None:
    counted = dict(leases(run.events)["outcome"].value_counts().iter_rows())
    ledger = run.summary["ledger"]
    assert counted.get("in flight", 0) == ledger["in_flight"]
    for kind in ("consumed", "buffered"):
        assert counted.get(kind, 0) == ledger[kind]
    for kind in ("rejected", "failed", "cancelled"):
        assert counted.get(kind, 0) == sum(ledger[kind].values())


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_counters_end_at_the_ledger_and_versions_are_instants(run: Run) -> None:
    events = trace_events(run.events)["traceEvents"]
    last = [event for event in events if event["ph"] == "C"][-1]
    ledger = run.summary["ledger"]
    assert last["args"] == {"in flight": ledger["in_flight"], "buffered": ledger["buffered"]}
    assert all(min(event["args"].values()) >= 0 for event in events if event["ph"] == "C")
    versions = [event["args"]["version"] for event in events if event["ph"] == "i"]
    assert versions == list(range(1, run.summary["versions"] + 1))


def test_the_file_is_json_and_the_same_each_time(tmp_path: Path) -> None:
    run = RUNS["asynchronous"]
    first = write_trace(run.events, tmp_path / "trace.json").read_bytes()
    shuffled_ties = run.events.sort("time_s", maintain_order=True)
    assert write_trace(shuffled_ties, tmp_path / "again.json").read_bytes() == first
    trace = json.loads(first)
    tracked = {event["tid"] for event in trace["traceEvents"]}
    assert tracked == {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}


def test_a_hand_made_log() -> None:
    rows = [
        (0.0, "admitted", 0, 7, 0, 0, None, None),
        (0.0, "admitted", 1, 7, 0, 0, None, None),
        (1.5, "delivered", 0, 7, 0, 0, 0, None),
        (2.0, "consumed", 0, 7, 0, 0, 0, None),
        (2.0, "committed", None, None, None, 1, None, None),
        (2.5, "ignored", 0, 7, 0, 1, None, "duplicate"),
        (3.0, "admitted", 2, 8, 1, 1, None, None),
        (4.0, "delivered", 2, 8, 1, 1, 0, None),
        (5.0, "rejected", 2, 8, 1, 4, 3, "too stale"),
    ]
    events = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    table = leases(events)
    assert table["end_s"].to_list() == [1.5, 5.0, 4.0]
    assert leases(events, end_s=9.0)["end_s"].to_list() == [1.5, 9.0, 4.0]
    assert table["outcome"].to_list() == ["consumed", "in flight", "rejected"]
    assert table["track"].to_list() == [0, 1, 0]
    assert table["reason"].to_list() == [None, None, "too stale"]
    trace = trace_events(events)["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "thread_name"]
    assert names == ["server", "worker 7", "worker 7 (2)", "worker 8"]
    assert trace[-1] == {
        "ph": "C",
        "name": "leases",
        "pid": 1,
        "tid": 0,
        "ts": 5_000_000,
        "args": {"in flight": 1, "buffered": 0},
    }


def test_an_empty_log_has_no_slices() -> None:
    empty = pl.DataFrame([], schema=SCHEMA)
    assert [event["ph"] for event in trace_events(empty)["traceEvents"]] == ["M", "M", "M"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=40))
def test_tracks_are_as_few_as_the_most_at_once(spans: list[tuple[int, int]]) -> None:
    spans = sorted((begin, begin + length) for begin, length in spans if length)
    given_tracks = tracks([begin for begin, _ in spans], [end for _, end in spans])
    for track in set(given_tracks):
        on_it = [span for span, given_one in zip(spans, given_tracks, strict=True) if given_one == track]
        assert all(before[1] <= after[0] for before, after in pairwise(on_it))
    most = max((sum(b <= t < e for b, e in spans) for t in range(45)), default=0)
    assert len(set(given_tracks)) == most
