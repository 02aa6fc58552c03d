"""The table of exchanges: lines that survive a crash, a table in the run's folder, and clear words where it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedasync.runs.exchanges import (
    EXCHANGES,
    LINES,
    TYPES,
    Exchange,
    ExchangeLog,
    exchanges_frame,
    exchanges_of_log,
    read,
    schema,
)
from fedasync.runs.run import Run

ONE = Exchange(0, 3, "17", 0.5, 4096, "delivered", 4.5, 2.0, 2.5, 3.0, 4100)
LOST = Exchange(1, 2, None, 1.0, 4096, "timeout")

seconds = st.none() | st.floats(0, 1e6)
exchanges = st.builds(
    Exchange,
    lease=st.integers(0, 5),
    worker=st.integers(0, 9),
    node=st.none() | st.text(),
    sent_s=st.floats(0, 1e6) | st.integers(0, 9),
    sent_bytes=st.integers(0, 2**40),
    outcome=st.text(min_size=1),
    returned_s=seconds,
    train_s=seconds,
    wall_s=seconds,
    work_s=seconds,
    returned_bytes=st.none() | st.integers(0, 2**40),
)


def written(folder: Path, *rows: Exchange) -> Path:
    folder.mkdir(exist_ok=True)
    with ExchangeLog(folder / LINES) as log:
        for row in rows:
            log.append(row)
    return folder


@given(st.lists(exchanges, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_appended_is_read_and_the_last_line_of_a_lease_counts(tmp_path: Path, rows: list[Exchange]) -> None:
    (tmp_path / LINES).unlink(missing_ok=True)
    table = read(written(tmp_path, *rows))
    assert table.schema == schema()
    last = {row.lease: asdict(row) for row in rows}
    assert table.to_dicts() == [{name: last[lease][name] for name in TYPES} for lease in sorted(last)]


def test_a_line_is_on_its_way_to_the_disk_when_it_was_appended(tmp_path: Path) -> None:
    log = ExchangeLog(tmp_path / LINES)
    log.append(ONE)
    assert read(tmp_path).height == 1
    log.close()


def test_half_a_line_of_a_crash_is_no_row_and_is_cut_off_before_the_next(tmp_path: Path) -> None:
    written(tmp_path, ONE, LOST)
    with (tmp_path / LINES).open("a") as file:
        file.write('{"lease": 2, "wor')
    assert read(tmp_path)["lease"].to_list() == [0, 1]
    written(tmp_path, replace(ONE, lease=2))
    assert read(tmp_path)["lease"].to_list() == [0, 1, 2]


def test_a_clients_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    table = read(written(tmp_path, replace(ONE, train_s=nan, work_s=inf)))
    assert (table["train_s"][0], table["work_s"][0]) == (None, None)


def broken(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / LINES).write_text(text) and None  # type: ignore[func-returns-value]


LINE = json.dumps(asdict(ONE))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, r"no exchanges here \(exchanges.parquet and exchanges.jsonl are missing\)"),
        (broken(f"{LINE}\nnonsense\n"), r"exchanges.jsonl, line 2: no JSON \(Expecting value\)$"),
        (broken("[1]\n"), r"exchanges.jsonl, line 1: got \[1\]; an object of lease, worker, .* would do$"),
        (broken(LINE.replace("node", "nod") + "\n"), r"knows no column 'nod'; its columns are lease, worker"),
        (broken('{"lease": 1}\n'), r"an exchange has no 'worker'; lease, worker, sent_s, .* must stand in every row$"),
        (broken(LINE.replace("4096", '"many"') + "\n"), r"exchanges.jsonl: a table of exchanges: "),
        (lambda folder: (folder / EXCHANGES).write_bytes(b"no"), r"exchanges.parquet cannot be read: "),
        (lambda folder: pl.DataFrame({"lease": [1]}).write_parquet(folder / EXCHANGES), r"has no column 'worker'$"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match=says) as error:
        read(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_runs_table_is_saved_and_loaded_and_leaves_no_old_one(tmp_path: Path) -> None:
    events = pl.DataFrame(schema={"time_s": pl.Float64})
    tables = {"events": events, "metrics": events, "exchanges": exchanges_frame([ONE, LOST])}
    Run({}, {}, tables).save(tmp_path / "one")
    again = Run.load(tmp_path / "one")
    assert again.exchanges is not None
    assert again.exchanges.equals(tables["exchanges"])
    again.save(tmp_path / "one")  # over itself
    assert read(tmp_path / "one").equals(tables["exchanges"])
    Run({}, {}, {"events": events, "metrics": events}).save(tmp_path / "one")
    assert Run.load(tmp_path / "one").exchanges is None


def test_a_run_that_was_not_saved_yet_has_the_lines(tmp_path: Path) -> None:
    found = Run({}, {}, folder=written(tmp_path, ONE)).exchanges
    assert found is not None
    assert found.height == 1


def test_a_log_tells_what_a_simulated_run_would_have_left() -> None:
    kinds = [
        ("admitted", 0, 0.0, None),
        ("admitted", 1, 0.0, None),
        ("admitted", 2, 1.0, None),
        ("admitted", 3, 1.5, None),
        ("delivered", 0, 2.0, None),
        ("consumed", 0, 2.0, None),
        ("failed", 2, 3.0, "dropout"),
        ("failed", 1, 5.0, "timeout"),
    ]
    rows = [(t, kind, lease, lease + 10, 0, 0, 0, why) for kind, lease, t, why in kinds]
    names = ("time_s", "kind", "lease", "worker", "base_version", "version", "staleness", "reason")
    table = exchanges_of_log(pl.DataFrame(rows, schema=list(names), orient="row"), 100)
    assert table.schema == schema()
    assert table.select("lease", "worker", "sent_s", "returned_s", "work_s", "outcome").rows() == [
        (0, 10, 0.0, 2.0, 2.0, "delivered"),
        (1, 11, 0.0, None, None, "timeout"),
        (2, 12, 1.0, 3.0, None, "error"),
    ]
