"""Verdicts hold on an honest log and fail on every doctored one, by name."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from fedasync.core.log import KINDS
from fedasync.runs.audit import Audit
from fedasync.runs.rows import chunks_of
from fedasync.runs.verdicts import Verdict, judge

from .logs import END_S, LEDGER, STORY, Row, record, table

CONSERVATION, TIME, STALENESS, VERSIONS, CAP, LITTLE = (
    "conservation of work",
    "time goes forward",
    "staleness is an integer ≥ 0",
    "versions follow the commits",
    "in flight within the cap",
    "Little's law",
)


def judged(
    rows: list[Row] = STORY, ledger: dict[str, Any] = LEDGER, cap: int = 3, bound: int | None = None
) -> dict[str, bool]:
    """The same of a log in its packed rows and of its table."""
    found = judge(Audit(record(rows).chunks(), END_S), ledger, cap, bound)
    assert found == judge(Audit(chunks_of(table(rows)), END_S), ledger, cap, bound)
    assert all("\n" not in verdict.detail for verdict in found)
    return {verdict.name: verdict.holds for verdict in found}


def broken(rows: list[Row] = STORY, **arguments: Any) -> set[str]:
    return {name for name, holds in judged(rows, **arguments).items() if not holds}


def without(kind: str, lease: int) -> list[Row]:
    return [row for row in STORY if row[1:3] != (kind, lease)]


def changed(place: int, **fields: Any) -> list[Row]:
    names = ("time_s", "kind", "lease", "worker", "base_version", "version", "staleness", "reason")
    row = {**dict(zip(names, STORY[place], strict=True)), **fields}
    return [*STORY[:place], tuple(row.values()), *STORY[place + 1 :]]


def test_an_honest_log_holds_every_verdict() -> None:
    assert judged() == dict.fromkeys((CONSERVATION, TIME, STALENESS, VERSIONS, CAP, LITTLE), True)


def test_verdicts_give_the_numbers_behind_them() -> None:
    details = {v.name: v.detail for v in judge(Audit(record().chunks(), END_S), LEDGER, 3, 1)}
    assert details[CONSERVATION] == (
        "7 admitted = 1 in flight + 1 buffered + 2 consumed + 1 rejected + 1 failed + 1 cancelled"
    )
    assert details[TIME] == "20 events, 0 steps back"
    assert details[STALENESS] == "2 applied, 0 wrong, 0 beyond the bound of 1"
    assert details[CAP] == "at most 2 of 3"
    assert "in flight on average = " in details[LITTLE]


@pytest.mark.parametrize(
    ("kind", "lease"),
    [("consumed", 1), ("failed", 2), ("rejected", 3), ("cancelled", 5), ("delivered", 4), ("admitted", 6)],
)
def test_a_lost_row_of_a_lease_breaks_conservation(kind: str, lease: int) -> None:
    assert CONSERVATION in broken(without(kind, lease))


@pytest.mark.parametrize("key", ["admitted", "in_flight", "buffered", "consumed"])
def test_a_ledger_that_counts_otherwise_breaks_conservation(key: str) -> None:
    assert broken(ledger={**LEDGER, key: LEDGER[key] + 1}) == {CONSERVATION}


def test_a_ledger_whose_reasons_do_not_add_up_breaks_conservation() -> None:
    assert broken(ledger={**LEDGER, "failed": {}}) == {CONSERVATION}
    assert broken(ledger={**LEDGER, "failed": {"crash": 1, "dropout": 1}}) == {CONSERVATION}


def test_a_contribution_used_twice_breaks_conservation() -> None:
    """Once is an update; twice is work invented, though the lease still has one last outcome."""
    twice = [*STORY, (5.5, "consumed", 0, 5, 0, 2, 2, None)]
    assert CONSERVATION in broken(twice)


def test_a_contribution_that_was_rejected_and_used_breaks_conservation() -> None:
    both = [*STORY[:3], (1.0, "rejected", 0, 5, 0, 0, 0, "not finite"), *STORY[3:]]
    assert CONSERVATION in broken(both)


def test_a_contribution_of_a_lease_that_was_never_admitted_breaks_conservation() -> None:
    stray = [*STORY, (5.5, "consumed", 99, 5, 2, 2, 0, None)]
    assert CONSERVATION in broken(stray)


def test_time_that_goes_back_is_found() -> None:
    assert TIME in broken(changed(12, time_s=2.0))


@pytest.mark.parametrize("staleness", [-1, -5, 0, 2])
def test_a_staleness_that_is_negative_or_not_the_difference_of_versions_is_found(staleness: int) -> None:
    assert broken(changed(8, staleness=staleness)) == {STALENESS}


def test_a_version_older_than_its_base_is_found() -> None:
    assert STALENESS in broken(changed(8, version=0, base_version=1, staleness=-1))


def test_a_base_that_was_not_the_published_version_is_found() -> None:
    """Consistent in its own row, and yet not what the server had shown by then."""
    admitted = next(i for i, row in enumerate(STORY) if row[1] == "admitted" and row[4] > 0)
    assert VERSIONS in broken(changed(admitted, base_version=0, version=0))
    consumed = next(i for i, row in enumerate(STORY) if row[1] == "consumed")
    later = STORY[consumed][5] + 3
    assert VERSIONS in broken(changed(consumed, version=later, staleness=later - STORY[consumed][4]))


def test_a_staleness_beyond_the_bound_is_found() -> None:
    assert broken(bound=0) == {STALENESS}
    assert broken(bound=1) == set()


def test_more_in_flight_than_the_cap_is_found() -> None:
    assert broken(cap=1) == {CAP}
    assert broken(cap=2) == set()


def test_little_breaks_when_leases_and_rows_disagree() -> None:
    """A lease given out again has another start than the one that its time in flight was counted from."""
    again = [*STORY[:12], (2.75, "admitted", 3, 6, 2, 2, -1, None), *STORY[12:]]
    assert {CONSERVATION, LITTLE} <= broken(again)


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_no_number_is_found(time_s: float) -> None:
    assert {TIME, LITTLE} <= broken(changed(12, time_s=time_s))


def test_an_admission_out_of_the_order_of_the_numbers_is_found() -> None:
    a, b = STORY[13], STORY[15]
    swapped = changed(13, lease=b[2])
    swapped[15] = (*b[:2], a[2], *b[3:])
    assert CONSERVATION in broken(swapped)


@pytest.mark.parametrize("lease", [2**62, -7])
def test_a_number_that_no_lease_can_have_is_found_and_costs_nothing(lease: int) -> None:
    assert CONSERVATION in broken(changed(12, lease=lease))
    assert CONSERVATION in broken([*STORY, (5.5, "delivered", lease, 5, 2, 2, 0, None)])


def test_a_row_of_the_server_that_names_a_lease_is_found() -> None:
    assert CONSERVATION in broken(changed(4, lease=0))


def test_a_staleness_that_no_version_allows_is_found_and_costs_nothing() -> None:
    assert STALENESS in broken(changed(8, staleness=2**31 - 1, version=2**31 - 1, base_version=0))


def test_a_contribution_used_before_it_arrived_is_found() -> None:
    early = [*STORY[:2], STORY[3], STORY[2], *STORY[4:]]
    assert CONSERVATION in broken(early)


def test_every_law_is_named_once() -> None:
    found = judge(Audit(record().chunks(), END_S), LEDGER, 3)
    assert all(isinstance(verdict, Verdict) for verdict in found)
    assert [v.name for v in found] == [CONSERVATION, TIME, STALENESS, VERSIONS, CAP, LITTLE]


def test_a_kind_that_does_not_exist_is_refused() -> None:
    rows = next(record().chunks()).copy()
    for code in (len(KINDS), -3):
        rows["kind"][5] = code
        with pytest.raises(ValueError, match=f"rows of kind {code}: no such kind"):
            Audit([rows], END_S)
    other = table().with_columns(kind=pl.col("kind").replace("failed", "lost"))
    with pytest.raises(ValueError, match="has the kind 'lost'; kinds are admitted, "):
        list(chunks_of(other))
    with pytest.raises(ValueError, match="has no column 'staleness'"):
        list(chunks_of(table().drop("staleness")))


def test_an_empty_run_holds_every_verdict() -> None:
    nothing = {
        "admitted": 0,
        "in_flight": 0,
        "buffered": 0,
        "consumed": 0,
        "rejected": {},
        "failed": {},
        "cancelled": {},
    }
    for chunks in (record([]).chunks(), chunks_of(table([]))):
        assert all(verdict.holds for verdict in judge(Audit(chunks, 0.0), nothing, 3))
