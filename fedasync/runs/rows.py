"""Rows of a log between their forms: packed bytes, numpy records, the table of docs/log.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core.log import COLUMNS, KINDS, NONE

if TYPE_CHECKING:
    import polars as pl

ROW = np.dtype([(name, f"<{code}") for name, code in COLUMNS.items()])
"""A packed row of the core's log as a numpy record, without gaps."""

_WIDE = np.dtype([(name, "<f8" if code == "d" else "<i8") for name, code in COLUMNS.items()])
"""A row of a table: its integers may be larger than those that the core writes."""

CHUNK = 2**18
"""Rows that are looked at together, and rows in a row group of events.parquet (some 10 MB as packed bytes)."""

Rows = NDArray[Any]
"""Records with the fields of `COLUMNS`; a missing integer is `NONE`."""

_NULLABLE = ("lease", "worker", "base_version", "staleness")


def schema() -> pl.Schema:
    """Names and types of the table's columns."""
    import polars as pl

    types = {name: pl.Float64() if code == "d" else pl.Int64() for name, code in COLUMNS.items()}
    return pl.Schema({**types, "kind": pl.String(), "reason": pl.String()})


def frame(rows: Rows, reasons: Sequence[str]) -> pl.DataFrame:
    """Rows as a table: the columns of docs/log.md, null where there is nothing to say."""
    import polars as pl

    column = {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}
    kinds = pl.Series(KINDS, dtype=pl.String).gather(pl.Series(column.pop("kind").astype(np.uint32)))
    codes = column.pop("reason")
    if reasons and (codes != NONE).any():
        last = np.where(codes == NONE, len(reasons), codes).astype(np.uint32)
        texts = pl.Series([*reasons, None], dtype=pl.String).gather(pl.Series(last))
    else:
        texts = pl.Series([None], dtype=pl.String).new_from_index(0, len(rows))
    types = schema()
    numbers = [pl.Series(name, values).cast(types[name]) for name, values in column.items()]
    return (
        pl.DataFrame(numbers)
        .with_columns(pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name) for name in _NULLABLE)
        .with_columns(kinds.alias("kind"), texts.alias("reason"))
        .select(types.names())
    )


def chunks_of(table: pl.DataFrame | pl.LazyFrame, size: int = CHUNK) -> Iterator[Rows]:
    """A table of events, or a scan of one, as records, ``size`` rows at a time; their reasons are left out.

    A time that is null comes as NaN. Raises ValueError for a table without the columns of docs/log.md, and for a kind
    that is not one of its kinds.
    """
    import polars as pl

    lazy = table.lazy()
    if missing := [name for name in COLUMNS if name not in lazy.collect_schema().names()]:
        raise ValueError(f"a table of events has no column {missing[0]!r}")
    codes = pl.col("kind").replace_strict(list(KINDS), range(len(KINDS)), default=None, return_dtype=pl.Int64)
    wanted = lazy.select(
        "kind", "time_s", code=codes, **{name: pl.col(name).fill_null(NONE) for name in (*_NULLABLE, "version")}
    )
    at = 0
    while len(part := wanted.slice(at, size).collect()):
        if (unknown := part.filter(pl.col("code").is_null())["kind"]).len():
            raise ValueError(f"a table of events has the kind {unknown[0]!r}; kinds are {', '.join(KINDS)}")
        rows = np.empty(len(part), _WIDE)
        rows["time_s"] = part["time_s"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        rows["kind"] = part["code"].to_numpy()
        rows["reason"] = NONE
        for name in (*_NULLABLE, "version"):
            rows[name] = part[name].to_numpy()
        yield rows
        at += len(part)
