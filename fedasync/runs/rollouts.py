"""The table of rollouts: a row an answer that was started, between numpy columns and rollouts.parquet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import polars as pl

TYPES = {
    "lease": "Int32",
    "prompt": "Int64",
    "answer": "Int32",
    "prompt_tokens": "Int32",
    "generated_tokens": "Int64",
    "lost_tokens": "Int64",
    "turns": "Int32",
    "start_s": "Float64",
    "end_s": "Float64",
    "server": "Int32",
    "base_version": "Int32",
    "first_version": "Int32",
    "last_version": "Int32",
    "mean_version": "Float64",
    "segments": "Int32",
}
"""Column → polars type, in the order of docs/log.md. Only ``end_s`` may be null: the answer was never finished."""


def schema() -> pl.Schema:
    """Names and types of the table's columns."""
    import polars as pl

    return pl.Schema({name: getattr(pl, kind)() for name, kind in TYPES.items()})


def rollouts_frame(columns: Mapping[str, ArrayLike]) -> pl.DataFrame:
    """The table of numpy columns of one length, in rows as they come; a NaN in ``end_s`` becomes null.

    Raises ValueError for a column that is missing, unknown, or of another length than the first.
    """
    import polars as pl

    arrays = {name: np.asarray(columns[name]) for name in TYPES if name in columns}
    for name in [*(name for name in TYPES if name not in arrays), *(name for name in columns if name not in TYPES)]:
        what = "has no column" if name in TYPES else "knows no column"
        raise ValueError(f"a table of rollouts {what} {name!r}; its columns are {', '.join(TYPES)}")
    rows = len(arrays["lease"])
    for name, array in arrays.items():
        if array.shape != (rows,):
            raise ValueError(f"a table of rollouts: {name!r} has the shape {array.shape}; ({rows},) would do")
    types = schema()
    frame = pl.DataFrame([pl.Series(name, array).cast(types[name]) for name, array in arrays.items()])
    return frame.with_columns(pl.col("end_s").fill_nan(None))


def columns_of(rollouts: pl.DataFrame | pl.LazyFrame, *names: str) -> dict[str, NDArray[Any]]:
    """Some columns as numpy arrays ``[answers]``, in memory of the table where polars allows; null ``end_s`` is NaN.

    Raises ValueError for a column that the table does not have, and for nulls elsewhere.
    """
    import polars as pl

    lazy = rollouts.lazy()
    there = lazy.collect_schema().names()
    if missing := [name for name in names if name not in there]:
        raise ValueError(f"a table of rollouts has no column {missing[0]!r}")
    table = lazy.select(
        pl.col(name).fill_null(float("nan")) if name == "end_s" else pl.col(name) for name in names
    ).collect()
    if holes := [name for name in names if table[name].null_count()]:
        raise ValueError(f"a table of rollouts: {holes[0]!r} is null in some row; only end_s may be")
    return {name: table[name].to_numpy() for name in names}
