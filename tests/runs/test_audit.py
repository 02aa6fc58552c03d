"""The audit against a plain recount, for any log, wherever its rows are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedasync.core.log import CONSUMED, DELIVERED, KINDS
from fedasync.runs.audit import Audit
from fedasync.runs.measures import ENDS
from fedasync.runs.rows import Rows, chunks_of
from fedasync.runs.verdicts import judge

from . import recount
from .logs import Row, Story, cut, record, table

SEEDS = st.integers(0, 2**32)
BLOCKS = st.sampled_from([1, 2, 3, 7, 16, 2**16])


def packed(rows: list[Row]) -> Rows:
    return next(record(rows).chunks(), None) if rows else next(chunks_of(table([])), None)  # type: ignore[return-value]


def numbers(audit: Audit) -> dict[str, Any]:
    names = (
        "rows steps_back misplaced unlawful wrong_versions wrong_staleness most_in_flight last_version_s "
        "admitted applied area work_s lost_s applied_by"
    )
    return {
        **{name: getattr(audit, name) for name in names.split()},
        **{kind: audit.count(code) for code, kind in enumerate(KINDS)},
        "histogram": audit.histogram.tolist(),
    }


@settings(max_examples=150, deadline=None)
@given(SEEDS, BLOCKS)
@example(0, 1)
def test_the_audit_of_a_valid_log_agrees_with_a_recount(seed: int, block: int) -> None:
    story = Story(seed)
    events = table(story.rows)
    moments = [0.0, story.end_s / 2, story.end_s]
    audit = Audit(record(story.rows).chunks(), story.end_s, moments, block=block)
    assert audit.misplaced == audit.unlawful == 0
    assert all(verdict.holds for verdict in judge(audit, story.ledger, story.most))
    assert recount.broken(events, story.ledger, story.end_s, story.most) == set()

    named = {"in flight": 0, "buffered": DELIVERED, "consumed": CONSUMED, **{kind: KINDS.index(kind) for kind in ENDS}}
    counted = recount.outcomes(events, story.end_s)
    assert {outcome: audit.count(kind) for outcome, kind in named.items() if audit.count(kind)} == counted
    assert audit.applied_by == [recount.applied_by(events, moment) for moment in moments]
    assert audit.last_version_s == recount.last_version_s(events)
    assert (audit.work_s, audit.lost_s) == pytest.approx(recount.work_s(events, story.end_s), abs=1e-9)
    assert (audit.most_in_flight, audit.area) == pytest.approx(recount.in_flight(events, story.end_s), abs=1e-9)
    histogram = {str(tau): count for tau, count in enumerate(audit.histogram.tolist()) if count}
    assert histogram == recount.staleness(events)["histogram"]


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 200), max_size=12), BLOCKS)
def test_where_the_rows_are_cut_makes_no_difference_to_the_last_digit(seed: int, places: list[int], block: int) -> None:
    story = Story(seed)
    rows = packed(story.rows)
    if rows is None:
        return
    whole = numbers(Audit([rows], story.end_s, [story.end_s / 3], block=block))
    pieces = cut(rows, [place % len(rows) for place in places])
    assert numbers(Audit(pieces, story.end_s, [story.end_s / 3], block=block)) == whole


@settings(max_examples=100, deadline=None)
@given(SEEDS, BLOCKS, BLOCKS)
def test_blocks_of_another_size_give_the_same_up_to_rounding(seed: int, one: int, other: int) -> None:
    story = Story(seed)
    a, b = (numbers(Audit(record(story.rows).chunks(), story.end_s, block=size)) for size in (one, other))
    exact = [name for name in a if name not in ("area", "work_s", "lost_s")]
    assert {name: a[name] for name in exact} == {name: b[name] for name in exact}
    assert a["area"] == pytest.approx(b["area"], rel=1e-12)
    assert a["work_s"] == pytest.approx(b["work_s"], rel=1e-12)
    assert a["lost_s"] == pytest.approx(b["lost_s"], rel=1e-12)


@settings(max_examples=300, deadline=None)
@given(SEEDS, st.data())
def test_what_a_recount_finds_in_a_doctored_log_the_audit_finds_too(seed: int, data: st.DataObject) -> None:
    """It may find more: rows out of order that still add up, among which the cap and Little's law mean nothing."""
    story = Story(seed)
    rows = list(story.rows)
    for _ in range(data.draw(st.integers(1, 3))):
        if not rows:
            return
        place = data.draw(st.integers(0, len(rows) - 1))
        match data.draw(st.sampled_from(["drop", "repeat", "move", "change"])):
            case "drop":
                rows.pop(place)
            case "repeat":
                rows.insert(data.draw(st.integers(0, len(rows))), rows[place])
            case "move":
                rows.insert(data.draw(st.integers(0, len(rows) - 1)), rows.pop(place))
            case "change":
                row: list[Any] = list(rows[place])
                field = data.draw(st.sampled_from([0, 1, 2, 4, 5, 6]))
                kind = st.sampled_from(KINDS)
                row[field] = data.draw({0: st.floats(0, 50), 1: kind}.get(field, st.integers(-1, 12)))
                rows[place] = tuple(row)  # type: ignore[assignment]
    block = data.draw(BLOCKS)
    judged = judge(Audit(record(rows).chunks(), story.end_s, block=block), story.ledger, story.most)
    broken = {verdict.name for verdict in judged if not verdict.holds}
    expected = recount.broken(table(rows), story.ledger, story.end_s, story.most)
    if "conservation of work" in broken:
        expected -= {"in flight within the cap", "Little's law"}
    assert expected <= broken


@pytest.mark.parametrize("seed", range(5))
def test_packed_rows_a_table_and_a_scan_of_a_file_are_audited_alike(seed: int, tmp_path: Path) -> None:
    story = Story(seed, steps=300)
    events = table(story.rows)
    events.write_parquet(tmp_path / "events.parquet", row_group_size=100)
    expected = numbers(Audit(record(story.rows).chunks(), story.end_s))
    assert numbers(Audit(chunks_of(events, 17), story.end_s)) == expected
    assert numbers(Audit(chunks_of(pl.scan_parquet(tmp_path / "events.parquet"), 64), story.end_s)) == expected


def test_little_s_law_holds_to_its_tolerance_over_many_rows_and_late_times() -> None:
    story = Story(3, steps=60_000)
    late = [(row[0] + 1e7, *row[1:]) for row in story.rows]
    audit = Audit(record(late).chunks(), story.end_s + 1e7)
    assert audit.work_s > 1e5
    assert audit.area == pytest.approx(audit.work_s, rel=1e-11)
