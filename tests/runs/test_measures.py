"""What a log says: tables and measures of a story known row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from fedasync.core import EventLog
from fedasync.runs.measures import event_table, last_and_best, lease_table
from fedasync.runs.record import Record
from fedasync.runs.summary import told_by_the_log

from .logs import END_S, LEDGER, SCHEMA, STORY, log, record, table


def metrics(*rows: tuple[float, int, str, float]) -> pl.DataFrame:
    return pl.DataFrame(
        rows,
        schema={"time_s": pl.Float64, "version": pl.Int64, "name": pl.String, "value": pl.Float64},
        orient="row",
    )


def told(rows: list[Any] = STORY, end_s: float = END_S, **about: Any) -> dict[str, Any]:
    return told_by_the_log(record(rows).chunks(), LEDGER, METRICS, end_s=end_s, slots=3, **about)


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
    nothing = told([])
    assert nothing["staleness"] == {"mean": None, "p50": None, "p90": None, "max": None, "histogram": {}}
    assert nothing["last_version_s"] is None


def test_a_table_made_on_the_way_does_not_stop_the_log() -> None:
    written = log(STORY[:5])
    early = event_table(written)
    log(STORY[5:], written)
    assert event_table(written).equals(table())
    assert early.equals(table(STORY[:5]))


def test_a_log_whose_rows_went_to_a_sink_has_no_table_of_its_own() -> None:
    written = log(STORY, EventLog(Record().write))
    with pytest.raises(ValueError, match="20 of the log's 20 rows went to its sink"):
        event_table(written)


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
    assert told(server_busy_s=1.5)["utilisation"] == pytest.approx(
        {"useful": 6 / 18, "wasted": 4.5 / 18, "waiting": 7.5 / 18, "server": 0.25}
    )


def test_a_run_of_no_time_has_no_shares() -> None:
    assert told(end_s=0.0)["utilisation"] == {
        "useful": 0.0,
        "wasted": 0.0,
        "waiting": 0.0,
        "server": 0.0,
    }


def test_staleness_counts_the_consumed_and_nobody_else() -> None:
    assert told()["staleness"] == {"mean": 0.5, "p50": 0, "p90": 1, "max": 1, "histogram": {"0": 1, "1": 1}}


def test_last_version_is_the_time_of_the_last_commit() -> None:
    assert told()["last_version_s"] == 2.5


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
    assert told(target={metric: value})["targets"] == [
        {"metric": metric, "value": value, "reached_s": reached_s, "reached_updates": updates}
    ]


def test_each_of_several_targets_has_its_own_count() -> None:
    wanted = {"f1": 0.1, "accuracy": 0.65, "loss": 3.0}
    found = told(target=wanted)["targets"]
    assert [(t["metric"], t["reached_s"], t["reached_updates"]) for t in found] == [
        ("f1", None, None),
        ("accuracy", 3.0, 2),
        ("loss", 0.0, 0),
    ]


def test_quantiles_are_those_of_the_values_in_order() -> None:
    """Of staleness 0 … 9, each once: the median is the fifth, the ninetieth percentile the ninth."""
    rows = [(0.0, "admitted", i, 0, 0, 0, -1, None) for i in range(10)]
    for tau in range(10):
        rows += [(1.0, kind, tau, 0, 0, tau, tau, None) for kind in ("delivered", "consumed")]
        rows += [(1.0, kind, -1, -1, -1, tau + 1, -1, None) for kind in ("committed",)]
    found = told(rows)["staleness"]
    assert (found["mean"], found["p50"], found["p90"], found["max"]) == (4.5, 4, 8, 9)


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
