"""A finished run: configuration, event log, metrics and summary, in memory and as a folder."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
    ``config`` what was asked for. ``model`` is the last version (None for a timing-only run).
    """

    config: dict[str, Any]
    summary: dict[str, Any]
    tables: Mapping[str, pl.DataFrame] = field(repr=False, default_factory=dict)
    model: Model | None = field(repr=False, default=None)
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

    def _table(self, name: str, file: str) -> pl.DataFrame:
        if name in self.tables:
            return self.tables[name]
        if self.folder is None:
            raise ValueError(f"this run has no table {name!r} and no folder to read it from")
        import polars as pl

        return pl.read_parquet(self.folder / file)

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
        except json.JSONDecodeError as error:
            raise ValueError(f"{folder}: not readable as a run ({error})") from None
        return cls(config, summary, folder=folder)

    def save(self, folder: Path) -> None:
        """Write the folder's files; the summary, which marks a run as finished, comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / CONFIG, _json(self.config))
        for table, file in ((self.events, EVENTS), (self.metrics, METRICS)):
            buffer = io.BytesIO()
            table.write_parquet(buffer)
            write(folder / file, buffer.getvalue())
        if self.model is not None:
            from safetensors.torch import save

            write(folder / MODEL, save({k: v.contiguous() for k, v in self.model.tensors().items()}))
        write(folder / SUMMARY, _json(self.summary))


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a temporary name beside it, then a rename."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
