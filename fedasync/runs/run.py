"""A finished run: configuration, event log, metrics and summary, in memory and as a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedasync.runs import exchanges, iterations
from fedasync.runs.exchanges import EXCHANGES
from fedasync.runs.iterations import ITERATIONS
from fedasync.runs.record import Record
from fedasync.runs.rows import CHUNK

if TYPE_CHECKING:
    import polars as pl

    from fedasync.aggregation.model import Model

EVENTS, METRICS, ROLLOUTS, SUMMARY, CONFIG, MODEL = (
    "events.parquet",
    "metrics.parquet",
    "rollouts.parquet",
    "summary.json",
    "config.json",
    "model.safetensors",
)


@dataclass
class Run:
    """One run of one strategy on one world with one seed.

    ``events`` and ``metrics`` are tables of docs/log.md, as are ``rollouts``, which only runs on prompts have,
    ``iterations``, which only real ones of them have, and ``exchanges`` of deployments; ``summary`` holds what is
    derived from them, and ``config`` what was asked for. A log of many million rows does not go into memory as a table:
    ``scan_events`` and ``read_events`` take what is wanted of it. ``last_model`` is the last version as it comes out of
    a run; read ``model``, which also finds it in the folder. ``record`` is the log as a runtime left it.
    """

    config: dict[str, Any]
    summary: dict[str, Any]
    tables: Mapping[str, pl.DataFrame] = field(repr=False, default_factory=dict)
    last_model: Model | None = field(repr=False, default=None)
    folder: Path | None = None
    record: Record | None = field(repr=False, default=None)

    @property
    def labels(self) -> dict[str, str]:
        """Where the run stands in its study: axis name → label of the point."""
        return dict(self.summary["labels"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @cached_property
    def events(self) -> pl.DataFrame:
        """The whole log as a table, some 80 bytes a row."""
        return self.read_events(lambda events: events)

    def scan_events(self) -> pl.LazyFrame:
        """The log as a query that is yet to be made, so that polars reads only what the query needs.

        Raises ValueError when the run has no log.
        """
        import polars as pl

        if "events" in self.tables:
            return self.tables["events"].lazy()
        if self.record is not None:
            return self.record.scan()
        return pl.scan_parquet(self._file("events", EVENTS))

    def read_events(self, query: Callable[[pl.LazyFrame], pl.LazyFrame]) -> pl.DataFrame:
        """What a query finds in the log, which is read piece by piece: ``read_events(lambda events: events.head())``.

        Raises ValueError when the run has no log, or one that cannot be read.
        """
        with _readable(self.folder and self.folder / EVENTS):
            return query(self.scan_events()).collect(engine="streaming")

    @cached_property
    def metrics(self) -> pl.DataFrame:
        if "metrics" in self.tables:
            return self.tables["metrics"]
        import polars as pl

        file = self._file("metrics", METRICS)
        with _readable(file):
            return pl.read_parquet(file)

    @cached_property
    def rollouts(self) -> pl.DataFrame | None:
        """A row an answer that was started; None for a run that generated none."""
        found = self.scan_rollouts()
        if found is None:
            return None
        with _readable(self.folder and self.folder / ROLLOUTS):
            return found.collect()

    def scan_rollouts(self) -> pl.LazyFrame | None:
        """The table of rollouts as a query that is yet to be made; None for a run that generated none."""
        if "rollouts" in self.tables:
            return self.tables["rollouts"].lazy()
        if self.folder is None or not (self.folder / ROLLOUTS).is_file():
            return None
        import polars as pl

        return pl.scan_parquet(self.folder / ROLLOUTS)

    @cached_property
    def exchanges(self) -> pl.DataFrame | None:
        """A row a task that was sent to a client; None for a run that sent none. Raises ValueError when unreadable."""
        if "exchanges" in self.tables:
            return self.tables["exchanges"]
        if self.folder is None or not exchanges.is_there(self.folder):
            return None
        return exchanges.read(self.folder)

    @cached_property
    def iterations(self) -> pl.DataFrame | None:
        """A row a decoding step of a rollout worker; None for a run without. Raises ValueError when unreadable."""
        if "iterations" in self.tables:
            return self.tables["iterations"]
        return None if self.folder is None else iterations.read(self.folder)

    @cached_property
    def model(self) -> Model | None:
        """The last version; None for a timing-only run."""
        if self.last_model is not None or self.folder is None or not (self.folder / MODEL).is_file():
            return self.last_model
        from fedasync.aggregation.model import Model

        return Model.from_bytes((self.folder / MODEL).read_bytes())

    def _file(self, name: str, file: str) -> Path:
        if self.folder is None:
            raise ValueError(f"this run has no table {name!r} and no folder to read it from")
        return self.folder / file

    @classmethod
    def load(cls, folder: Path | str) -> Run:
        """Open a run folder; its tables are read when first asked for.

        Raises ValueError when the folder holds no finished run.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / CONFIG).read_text())
            summary = json.loads((folder / SUMMARY).read_text())
        except FileNotFoundError as error:
            raise ValueError(f"{folder}: no finished run here ({Path(error.filename).name} is missing)") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{folder}: not readable as a run ({error})") from None
        return cls(config, summary, folder=folder)

    def save(self, folder: Path | str) -> None:
        """Write the folder's files; the summary, which marks a run as finished, comes last.

        Raises OSError when there is no room for them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        model, metrics, events = self.model, self.metrics, self.scan_events()  # of what may lie in this very folder
        rollouts, exchanged, decoded = self.rollouts, self.exchanges, self.iterations
        for stale in (SUMMARY, MODEL, ROLLOUTS, EXCHANGES, ITERATIONS):
            (folder / stale).unlink(missing_ok=True)
        write(folder / CONFIG, _json(self.config))
        write_table(folder / EVENTS, events)
        write_table(folder / METRICS, metrics.lazy())
        if rollouts is not None:
            write_table(folder / ROLLOUTS, rollouts.lazy())
        if exchanged is not None:
            write_table(folder / EXCHANGES, exchanged.lazy())
        if decoded is not None:
            write_table(folder / ITERATIONS, decoded.lazy())
        if model is not None:
            write(folder / MODEL, model.to_bytes())
        write(folder / SUMMARY, _json(self.summary))


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a temporary name beside it, then a rename."""
    with _whole(path) as file:
        file.write(content)


def write_table(path: Path, table: pl.LazyFrame) -> None:
    """Write a table of any length as Parquet, whole or not at all, in row groups of `CHUNK` rows.

    Its bytes are a function of its rows, however they come. Raises OSError when there is no room.
    """
    import polars as pl

    with _whole(path) as file:
        try:
            # At level 1 the files are no larger here than at the default 3, and written faster.
            table.sink_parquet(file, compression="zstd", compression_level=1, row_group_size=CHUNK)
        except pl.exceptions.PolarsError as error:
            found = re.search(r"os error (\d+)", str(error))  # what the system said of the file comes as text
            if found is None:
                raise ValueError(f"{path} cannot be written: {' '.join(str(error).split())}") from None
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise


@contextmanager
def _readable(file: Path | None) -> Iterator[None]:
    import polars as pl

    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        if file is None:
            raise
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from None


def _json(value: object) -> bytes:
    return (json.dumps(_finite(value), indent=1, allow_nan=False) + "\n").encode()


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: a metric that diverged stands as null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
