"""The table of rollouts: from columns and back, in a run's folder, and refused where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedasync.runs.rollouts import TYPES, columns_of, rollouts_frame, schema
from fedasync.runs.run import Run

from .cluster_logs import Cluster


def columns(rows: int = 3) -> dict[str, Any]:
    made = {name: np.arange(rows) for name in TYPES}
    return {**made, "segments": np.ones(rows, int), "turns": np.ones(rows, int), "start_s": np.zeros(rows)}


def test_columns_come_back_as_they_went_and_nan_is_null() -> None:
    made = {**columns(), "end_s": np.array([1.0, np.nan, 2.0])}
    frame = rollouts_frame(made)
    assert frame.schema == schema()
    assert frame["end_s"].to_list() == [1.0, None, 2.0]
    back = columns_of(frame, *TYPES)
    for name, values in made.items():
        np.testing.assert_array_equal(back[name], values)
    lazily = columns_of(frame.lazy(), "end_s", "lease")
    np.testing.assert_array_equal(lazily["end_s"], made["end_s"])


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    short = columns()
    del short["turns"]
    with pytest.raises(ValueError, match=r"^a table of rollouts has no column 'turns'; its columns are lease, prompt"):
        rollouts_frame(short)
    with pytest.raises(ValueError, match=r"^a table of rollouts knows no column 'reward'"):
        rollouts_frame({**columns(), "reward": np.ones(3)})
    with pytest.raises(ValueError, match=r"^a table of rollouts: 'server' has the shape \(2,\); \(3,\) would do$"):
        rollouts_frame({**columns(), "server": np.ones(2)})
    with pytest.raises(ValueError, match=r"^a table of rollouts has no column 'lease'$"):
        columns_of(pl.DataFrame({"answer": [1]}), "lease")
    with pytest.raises(ValueError, match=r"^a table of rollouts: 'lease' is null in some row; only end_s may be$"):
        columns_of(pl.DataFrame({"lease": [1, None]}), "lease")


def test_a_runs_third_table_is_saved_and_loaded(tmp_path: Path) -> None:
    run = Cluster(versions=6).run()
    run.save(tmp_path / "one")
    again = Run.load(tmp_path / "one")
    assert again.rollouts is not None
    assert again.rollouts.equals(run.tables["rollouts"])
    scanned = again.scan_rollouts()
    assert scanned is not None
    assert scanned.select("lease").collect().equals(run.tables["rollouts"].select("lease"))
    again.save(tmp_path / "one")  # over itself
    again.save(tmp_path / "two")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    assert "rollouts.parquet" in files[0]


def test_a_run_without_rollouts_has_none_and_leaves_no_old_ones(tmp_path: Path) -> None:
    run = Cluster(versions=3).run()
    run.save(tmp_path)
    without = Run(run.config, run.summary, {name: run.tables[name] for name in ("events", "metrics")})
    assert without.rollouts is None
    without.save(tmp_path)
    assert not (tmp_path / "rollouts.parquet").exists()
    assert Run.load(tmp_path).rollouts is None
