"""A finished run: configuration, event log, metrics and summary, in memory and as a folder."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from fedasync.aggregation.model import Model

EVENTS, METRICS, SUMMARY, CONFIG, MODEL = (
    "events.parquet",
    "metrics.parquet",
    "summary.json",
    "config.json",
    "model.safetensors",
)


@dataclass
class Run:
    """One run of one strategy on one world with one seed.

    ``events`` and ``metrics`` are the two tables of docs/log.md; ``summary`` holds what is derived from them, and
    ``config`` what was asked for. ``last_model`` is the last version as it comes out of a run; read ``model``, which
    also finds it in the folder.
    """

    config: dict[str, Any]
    summary: dict[str, Any]
    tables: Mapping[str, pl.DataFrame] = field(repr=False, default_factory=dict)
    last_model: Model | None = field(repr=False, default=None)
    folder: Path | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Where the run stands in its study: axis name → label of the point."""
        return dict(self.summary["labels"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @cached_property
    def events(self) -> pl.DataFrame:
        return self._table("events", EVENTS)

    @cached_property
    def metrics(self) -> pl.DataFrame:
        return self._table("metrics", METRICS)

    @cached_property
    def model(self) -> Model | None:
        """The last version; None for a timing-only run."""
        if self.last_model is not None or self.folder is None or not (self.folder / MODEL).is_file():
            return self.last_model
        from fedasync.aggregation.model import Model

        return Model.from_bytes((self.folder / MODEL).read_bytes())

    def _table(self, name: str, file: str) -> pl.DataFrame:
        if name in self.tables:
            return self.tables[name]
        if self.folder is None:
            raise ValueError(f"this run has no table {name!r} and no folder to read it from")
        import polars as pl

        try:
            return pl.read_parquet(self.folder / file)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise ValueError(f"{self.folder / file} cannot be read: {' '.join(str(error).split())}") from None

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Open a run folder; its tables are read when first asked for.

        Raises ValueError when the folder holds no finished run.
        """
        try:
            config = json.loads((folder / CONFIG).read_text())
            summary = json.loads((folder / SUMMARY).read_text())
        except FileNotFoundError as error:
            raise ValueError(f"{folder}: no finished run here ({Path(error.filename).name} is missing)") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{folder}: not readable as a run ({error})") from None
        return cls(config, summary, folder=folder)

    def save(self, folder: Path) -> None:
        """Write the folder's files; the summary, which marks a run as finished, comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        model, tables = self.model, (self.events, self.metrics)  # read what may lie in this very folder
        for stale in (SUMMARY, MODEL):
            (folder / stale).unlink(missing_ok=True)
        write(folder / CONFIG, _json(self.config))
        for table, file in zip(tables, (EVENTS, METRICS), strict=True):
            buffer = io.BytesIO()
            table.write_parquet(buffer)
            write(folder / file, buffer.getvalue())
        if model is not None:
            write(folder / MODEL, model.to_bytes())
        write(folder / SUMMARY, _json(self.summary))


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a temporary name beside it, then a rename."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


def _json(value: object) -> bytes:
    return (json.dumps(_finite(value), indent=1, allow_nan=False) + "\n").encode()


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: a metric that diverged stands as null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
