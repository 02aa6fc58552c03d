"""The table of exchanges: a row a task that a server sent to a client over a wire, and how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import polars as pl

EXCHANGES, LINES = "exchanges.parquet", "exchanges.jsonl"
"""The table of a finished run, and the lines that a deployment appends while it goes on."""

TYPES = {
    "lease": "Int64",
    "worker": "Int64",
    "node": "String",
    "sent_s": "Float64",
    "returned_s": "Float64",
    "train_s": "Float64",
    "wall_s": "Float64",
    "work_s": "Float64",
    "sent_bytes": "Int64",
    "returned_bytes": "Int64",
    "outcome": "String",
}
"""Column → polars type, in the order of docs/log.md."""

REQUIRED = ("lease", "worker", "sent_s", "sent_bytes", "outcome")
"""Columns that are null in no row."""

DELIVERED, REJECTED, ERROR, OFFLINE, TIMEOUT, CANCELLED, RESTARTED = (
    "delivered",
    "rejected",
    "error",
    "offline",
    "timeout",
    "cancelled",
    "server restarted",
)
"""How a task may end. Any other word is a failure that the server heard of."""

COMPLETE = (DELIVERED, REJECTED, TIMEOUT, CANCELLED)
"""Where a reply was read, the whole work was done: too late, for the last two."""


@dataclass(frozen=True)
class Exchange:
    """One task. Times ``_s`` of the server's clock count from the run's beginning; a reply that never came is None.

    ``train_s`` (local training) and ``wall_s`` (the whole handling of the message) are measured by the client on its
    own clock; ``work_s`` is how long its task lasted, what it slept to seem slow included.
    """

    lease: int
    worker: int
    node: str | None
    sent_s: float
    sent_bytes: int
    outcome: str
    returned_s: float | None = None
    train_s: float | None = None
    wall_s: float | None = None
    work_s: float | None = None
    returned_bytes: int | None = None


class ExchangeLog:
    """Appends a line of JSON a task to a file, each on its way to the disk when ``append`` returns::

        with ExchangeLog(folder / LINES) as log:
            log.append(Exchange(lease=0, worker=3, node="17", sent_s=0.4, sent_bytes=4096, outcome="timeout"))

    Goes on in a file that is there; half a line at its end, which a crash left, is cut off. Raises OSError.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        _cut_half_a_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, exchange: Exchange) -> None:
        """Write a task that ended. A client's number that is not finite is written as null."""
        row = {name: _finite(value) for name, value in asdict(exchange).items()}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def schema() -> pl.Schema:
    """Names and types of the table's columns."""
    import polars as pl

    return pl.Schema({name: getattr(pl, kind)() for name, kind in TYPES.items()})


def exchanges_frame(rows: Iterable[Exchange | Mapping[str, Any]]) -> pl.DataFrame:
    """Exchanges as a table, by lease; of several rows of a lease the last counts.

    Raises ValueError for columns that are missing, unknown, or of another type.
    """
    import polars as pl

    known = {field.name for field in fields(Exchange)}
    listed = [asdict(row) if isinstance(row, Exchange) else dict(row) for row in rows]
    for row in listed:
        if unknown := sorted(set(row) - known):
            raise ValueError(f"a table of exchanges knows no column {unknown[0]!r}; its columns are {', '.join(TYPES)}")
        if missing := [name for name in REQUIRED if row.get(name) is None]:
            raise ValueError(f"an exchange has no {missing[0]!r}; {', '.join(REQUIRED)} must stand in every row")
    try:
        table = pl.DataFrame(listed, schema=schema(), strict=True)
    except (pl.exceptions.PolarsError, TypeError) as error:
        raise ValueError(f"a table of exchanges: {' '.join(str(error).split())}") from None
    return table.unique("lease", keep="last", maintain_order=True).sort("lease")


def exchanges_of_log(events: pl.DataFrame, message_bytes: int = 0) -> pl.DataFrame:
    """What a simulated run would have left: a lease's whole time is its work, and messages take none.

    ``message_bytes`` is the size of each message. Leases in flight when the log ends have no row.
    """
    import polars as pl

    from fedasync.runs.measures import lease_table

    outcome, reason = pl.col("outcome"), pl.col("reason")
    replied = outcome.is_in(["consumed", "buffered", "rejected"])
    ended = (
        pl.when(outcome.is_in(["consumed", "buffered"]))
        .then(pl.lit(DELIVERED))
        .when(outcome.is_in([REJECTED, CANCELLED]))
        .then(outcome)
        .when(reason.is_in([TIMEOUT, OFFLINE]))
        .then(reason)
        .otherwise(pl.lit(ERROR))
    )
    end_s = pl.col("end_s")
    leases = lease_table(events, float("nan")).filter(outcome != "in flight")
    table = leases.with_columns(
        node=pl.lit(None, pl.String),
        sent_s="start_s",
        returned_s=pl.when(replied | (ended == ERROR)).then(end_s),
        work_s=pl.when(replied).then(end_s - pl.col("start_s")),
        sent_bytes=pl.lit(message_bytes),
        returned_bytes=pl.when(replied).then(pl.lit(message_bytes)),
        outcome=ended,
    ).with_columns(train_s="work_s", wall_s="work_s")
    return table.select(pl.col(name).cast(kind) for name, kind in schema().items()).sort("lease")


def is_there(folder: Path) -> bool:
    """Whether a run's folder has a table of exchanges."""
    return (folder / EXCHANGES).is_file() or (folder / LINES).is_file()


def read(folder: Path | str) -> pl.DataFrame:
    """The table of a run's folder: exchanges.parquet, or the lines of a run that has not been saved yet.

    Raises ValueError when there is none, or one that cannot be read.
    """
    folder = Path(folder)
    if (folder / EXCHANGES).is_file():
        return _of_parquet(folder / EXCHANGES)
    if (folder / LINES).is_file():
        return _of_lines(folder / LINES)
    raise ValueError(f"{folder}: no exchanges here ({EXCHANGES} and {LINES} are missing): only a deployment has them")


def _of_parquet(path: Path) -> pl.DataFrame:
    import polars as pl

    try:
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if missing := [name for name in TYPES if name not in table.columns]:
        raise ValueError(f"{path}: a table of exchanges has no column {missing[0]!r}")
    try:
        return table.select(pl.col(name).cast(kind) for name, kind in schema().items())
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _of_lines(path: Path) -> pl.DataFrame:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    whole = text[: text.rfind("\n") + 1]  # half a line at the end is of a row that is being written
    rows = []
    for number, line in enumerate(whole.split("\n")[:-1], 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: got {line[:40]}; an object of {', '.join(TYPES)} would do")
        rows.append(row)
    try:
        return exchanges_frame(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _cut_half_a_line(path: Path) -> None:
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not isfinite(value) else value
