"""The table of iterations: a row a decoding step of a rollout worker, and how long it took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import polars as pl

ITERATIONS = "iterations.parquet"

TYPES = {
    "server": "Int32",
    "at_s": "Float64",
    "running": "Int32",
    "context_tokens": "Int64",
    "seconds": "Float64",
    "prefill_tokens": "Int64",
    "prefill_s": "Float64",
}
"""Column → polars type, in the order of docs/log.md; none may be null.

``at_s`` is when a step ended, on the run's clock; ``context_tokens`` are those of all ``running`` sequences together at
its beginning; ``seconds`` leaves the prefill out that came right before it (``prefill_tokens``, ``prefill_s``).
"""


def schema() -> pl.Schema:
    """Names and types of the table's columns."""
    import polars as pl

    return pl.Schema({name: getattr(pl, kind)() for name, kind in TYPES.items()})


def iterations_frame(columns: NDArray[Any] | dict[str, ArrayLike]) -> pl.DataFrame:
    """The table of numpy records or columns, in rows as they come. Raises ValueError for a column that is missing."""
    import polars as pl

    there = columns.dtype.names or () if isinstance(columns, np.ndarray) else tuple(columns)
    if missing := [name for name in TYPES if name not in there]:
        raise ValueError(f"a table of iterations has no column {missing[0]!r}; its columns are {', '.join(TYPES)}")
    types = schema()
    return pl.DataFrame([pl.Series(name, np.ascontiguousarray(columns[name])).cast(types[name]) for name in TYPES])


def read(folder: Path) -> pl.DataFrame | None:
    """A run's iterations; None where it has none. Raises ValueError for a file that cannot be read as them."""
    import polars as pl

    file = folder / ITERATIONS
    if not file.is_file():
        return None
    try:
        table = pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    for name, kind in schema().items():
        if name not in table.columns:
            raise ValueError(f"{file}: no column {name!r}; its columns are {', '.join(table.columns)}")
        if table[name].null_count() or not table[name].dtype.is_numeric():
            raise ValueError(f"{file}: column {name!r} does not hold numbers alone")
        table = table.with_columns(pl.col(name).cast(kind))
    return table.select(*TYPES)
