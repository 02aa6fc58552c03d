"""What a log says: tables and measures of a story known row by row."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from fedasync.core import EventLog
from fedasync.runs.measures import (
    event_table,
    last_and_best,
    last_version_s,
    lease_table,
    staleness,
    targets,
    utilisation,
)

from .logs import END_S, SCHEMA, STORY, log, table


def metrics(*rows: tuple[float, int, str, float]) -> pl.DataFrame:
    return pl.DataFrame(
        rows,
        schema={"time_s": pl.Float64, "version": pl.Int64, "name": pl.String, "value": pl.Float64},
        orient="row",
    )


def test_the_event_table_has_the_columns_of_the_contract_and_null_where_there_is_nothing() -> None:
    events = table()
    assert dict(events.schema) == SCHEMA
    expected = [tuple(None if x == -1 and i not in (0, 5) else x for i, x in enumerate(row)) for row in STORY]
    assert events.rows() == expected


def test_an_empty_log_is_an_empty_table_of_the_same_columns() -> None:
    events = event_table(EventLog())
    assert dict(events.schema) == SCHEMA
    assert len(events) == 0
    assert len(lease_table(events, 0.0)) == 0
    assert staleness(events) == {"mean": None, "p50": None, "p90": None, "max": None, "histogram": {}}
    assert last_version_s(events) is None


def test_a_table_made_on_the_way_does_not_stop_the_log() -> None:
    written = log(STORY[:5])
    early = event_table(written)
    for row in STORY[5:]:
        written.append(row[0], 0, row[2], row[3], row[4], row[5], row[6], row[7])
    assert len(event_table(written)) == len(STORY)
    assert len(early) == 5


def test_the_lease_table_tells_of_each_lease_when_it_worked_and_what_became_of_it() -> None:
    leases = lease_table(table(), END_S)
    assert leases.select("lease", "worker", "base_version", "start_s", "end_s", "outcome").rows() == [
        (0, 5, 0, 0.0, 1.0, "consumed"),
        (1, 6, 0, 0.0, 2.0, "consumed"),
        (2, 5, 1, 1.0, 3.0, "failed"),
        (3, 6, 2, 2.5, 3.5, "rejected"),
        (4, 7, 2, 3.0, 4.5, "buffered"),
        (5, 8, 2, 3.5, 5.0, "cancelled"),
        (6, 5, 2, 4.5, 6.0, "in flight"),
    ]
    assert leases["staleness"].to_list() == [0, 1, 1, 0, 0, 0, None]
    assert leases["reason"].to_list() == [None, None, "crash", "not finite", None, "over-selected", None]


def test_a_contribution_that_grew_too_stale_in_the_buffer_ended_its_work_when_it_arrived() -> None:
    late = [*STORY, (5.5, "rejected", 4, 7, 2, 9, 7, "stale")]
    lease = lease_table(table(late), END_S).row(4, named=True)
    assert (lease["end_s"], lease["outcome"], lease["reason"]) == (4.5, "rejected", "stale")


def test_utilisation_shares_slots_times_time() -> None:
    """Useful: 1 + 2 + 1.5 + 1.5 s; wasted: 2 + 1 + 1.5 s; of 3 slots × 6 s."""
    shares = utilisation(lease_table(table(), END_S), 3, END_S, server_busy_s=1.5)
    assert shares == pytest.approx({"useful": 6 / 18, "wasted": 4.5 / 18, "waiting": 7.5 / 18, "server": 0.25})


def test_a_run_of_no_time_has_no_shares() -> None:
    assert utilisation(lease_table(table(), END_S), 3, 0.0, 0.0) == {
        "useful": 0.0,
        "wasted": 0.0,
        "waiting": 0.0,
        "server": 0.0,
    }


def test_staleness_counts_the_consumed_and_nobody_else() -> None:
    assert staleness(table()) == {"mean": 0.5, "p50": 0, "p90": 1, "max": 1, "histogram": {"0": 1, "1": 1}}


def test_last_version_is_the_time_of_the_last_commit() -> None:
    assert last_version_s(table()) == 2.5


METRICS = metrics(
    (0.0, 0, "accuracy", 0.1),
    (0.0, 0, "loss", 3.0),
    (1.0, 1, "accuracy", 0.6),
    (1.0, 1, "loss", 1.0),
    (2.0, 1, "accuracy", 0.5),
    (3.0, 2, "accuracy", 0.7),
)


@pytest.mark.parametrize(
    ("metric", "value", "reached_s", "updates"),
    [
        ("accuracy", 0.1, 0.0, 0),
        ("accuracy", 0.55, 1.0, 1),
        ("accuracy", 0.6, 1.0, 1),
        ("accuracy", 0.65, 3.0, 2),
        ("accuracy", 0.9, None, None),
        ("f1", 0.1, None, None),
    ],
)
def test_a_target_is_reached_at_the_first_crossing_on_the_grid(
    metric: str, value: float, reached_s: float | None, updates: int | None
) -> None:
    """With the contributions applied by then, the one at that very instant included."""
    assert targets(METRICS, table(), {metric: value}) == [
        {"metric": metric, "value": value, "reached_s": reached_s, "reached_updates": updates}
    ]


def test_last_and_best_are_of_each_metric_by_itself() -> None:
    last, best = last_and_best(METRICS)
    assert last == {"accuracy": 0.7, "loss": 1.0}
    assert best == {"accuracy": 0.7, "loss": 3.0}
    assert last_and_best(metrics()) == ({}, {})


@pytest.mark.parametrize("order", [(0.2, float("nan"), 0.5), (float("nan"), 0.2, 0.5), (0.5, 0.2, float("nan"))])
def test_a_metric_that_was_once_not_a_number_still_has_its_best(order: tuple[float, ...]) -> None:
    _, best = last_and_best(metrics(*((float(t), t, "accuracy", value) for t, value in enumerate(order))))
    assert best["accuracy"] == 0.5


def test_a_long_log_becomes_the_same_table_as_its_rows() -> None:
    """Longer than the chunks in which rows are gathered."""
    rows = [(float(i), "admitted", i, i % 7, i % 5, i % 5, -1, None) for i in range(9001)]
    events = table(rows)
    assert np.array_equal(events["lease"].to_numpy(), np.arange(9001))
    assert events["time_s"].is_sorted()
