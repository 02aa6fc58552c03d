"""The table of iterations goes through a run's folder and comes back as it was; what is no such table says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedasync.runs import iterations
from fedasync.runs.iterations import ITERATIONS, TYPES, iterations_frame
from fedasync.runs.run import Run
from fedasync.trainer.answer_rows import ITERATION

ROWS = np.array([(0, 0.5, 8, 100, 0.01, 80, 0.02), (1, 0.6, 4, 50, 0.008, 0, 0.0)], ITERATION)


def run(**tables: pl.DataFrame) -> Run:
    events = pl.DataFrame({"time_s": [0.0], "kind": ["published"], "lease": [0]})
    return Run({}, {"seed": 0, "labels": {}}, {"events": events, "metrics": pl.DataFrame({"time_s": [0.0]}), **tables})


def test_columns_are_those_that_a_worker_packs() -> None:
    assert ITERATION.names == tuple(TYPES)
    frame = iterations_frame(ROWS)
    assert frame.schema == iterations.schema()
    assert frame.rows() == [tuple(row) for row in ROWS.tolist()]
    assert iterations_frame({name: ROWS[name] for name in TYPES}).equals(frame)


def test_a_run_keeps_its_iterations(tmp_path: Path) -> None:
    frame = iterations_frame(ROWS)
    run(iterations=frame).save(tmp_path)
    again = Run.load(tmp_path)
    assert again.iterations is not None
    assert again.iterations.equals(frame)
    again.save(tmp_path)  # into the folder that it is read from
    assert pl.read_parquet(tmp_path / ITERATIONS).equals(frame)


def test_a_run_without_iterations_has_none_and_leaves_none_of_others(tmp_path: Path) -> None:
    run(iterations=iterations_frame(ROWS)).save(tmp_path)
    run().save(tmp_path)
    assert not (tmp_path / ITERATIONS).exists()
    assert Run.load(tmp_path).iterations is None


def test_what_is_no_table_of_iterations_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no column 'server'"):
        iterations_frame({"at_s": [1.0]})
    file = tmp_path / ITERATIONS
    frame = iterations_frame(ROWS)
    for content, says in (
        (frame.drop("seconds"), "no column 'seconds'"),
        (frame.with_columns(running=pl.lit("8")), "column 'running' does not hold numbers alone"),
        (frame.with_columns(at_s=pl.lit(None, pl.Float64)), "column 'at_s' does not hold numbers alone"),
    ):
        content.write_parquet(file)
        with pytest.raises(ValueError, match=says) as error:
            iterations.read(tmp_path)
        assert str(file) in str(error.value)
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read") as error:
        iterations.read(tmp_path)
    assert "\n" not in str(error.value)
