"""What a journal's folder holds, to be read: rows, reasons, rings, versions, contributions.

events.bin                       packed rows of the core's log, 41 bytes each
reasons.json                     the texts that the rows' reasons index
rings.bin                        calls of on_timer: rows that stood before it (int64), time (float64)
versions.jsonl                   {"version", "sha256"} a line; of several lines of a version the last counts
contributions/<lease>.safetensors   as the client sent it: values, integers; the rest in its metadata
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedasync.aggregation.model import Contribution, Form
from fedasync.core.log import KINDS, NONE, Row
from fedasync.runs.rows import ROW

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.aggregation.model import Model

EVENTS, REASONS, RINGS, VERSIONS, CONTRIBUTIONS = (
    "events.bin",
    "reasons.json",
    "rings.bin",
    "versions.jsonl",
    "contributions",
)
RING = Struct("<qd")
CHUNK = 1 << 16
"""Rows that are read at a time."""


class JournalError(ValueError):
    """A file of a journal is damaged; the message names it, on one line."""


@dataclass(frozen=True)
class Recorded:
    """A journal's folder, which is only read. Half a row at the end of a file is no row."""

    folder: Path

    @property
    def size(self) -> int:
        """Whole rows on the disk."""
        return _whole(self.folder / EVENTS, ROW.itemsize)

    @property
    def reasons(self) -> list[str]:
        """The texts of the rows' reasons. Raises JournalError."""
        path = self.folder / REASONS
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise JournalError(f"{path}: not readable as a list of reasons ({error})") from None
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise JournalError(f"{path}: got no list of texts")
        return found

    def packed(self, first: int = 0) -> Iterator[bytes]:
        """The rows from the ``first`` on, packed, some at a time."""
        left = self.size - first
        if left <= 0:
            return
        with (self.folder / EVENTS).open("rb") as file:
            file.seek(first * ROW.itemsize)
            while left > 0:
                yield file.read(min(left, CHUNK) * ROW.itemsize)
                left -= CHUNK

    def rows(self, first: int = 0) -> Iterator[Row]:
        """The rows from the ``first`` on."""
        for packed in self.packed(first):
            yield from unpacked(packed)

    def rings(self, first: int = 0) -> list[tuple[int, float]] | None:
        """Calls of on_timer from the ``first`` on, each with the rows before it; None where nobody noted any.

        Those that were called after the last row on the disk, and after more, are lost as the rows before them are.
        """
        path = self.folder / RINGS
        if not path.exists():
            return None
        content, size = path.read_bytes(), self.size
        whole = content[: len(content) // RING.size * RING.size]
        return [ring for ring in RING.iter_unpack(whole) if ring[0] <= size][first:]

    def versions(self) -> dict[int, str]:
        """Version → digest of its model, as noted when it was made. Raises JournalError."""
        path = self.folder / VERSIONS
        content = path.read_bytes() if path.exists() else b""
        found = {}
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                told = json.loads(line)
                found[int(told["version"])] = str(told["sha256"])
            except (ValueError, KeyError, TypeError):
                raise JournalError(
                    f"{path}, line {number}: got {line[:80]!r}; a version and its sha256 would do"
                ) from None
        return found

    def path_of(self, lease_id: int) -> Path:
        return self.folder / CONTRIBUTIONS / f"{lease_id}.safetensors"

    def contribution(self, lease_id: int) -> Contribution | None:
        """What a lease brought, in memory of its own; None where nothing was kept. Raises JournalError."""
        path = self.path_of(lease_id)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            found, checksum = _read(content)
        except Exception as error:  # noqa: BLE001  whatever the format's reader makes of damaged bytes
            raise JournalError(f"{path}: not readable as a contribution ({' '.join(str(error).split())})") from None
        if checksum != checksum_of(found):
            raise JournalError(f"{path}: damaged: its checksum is not that of what it holds")
        return found


def unpacked(packed: bytes) -> list[Row]:
    """Packed rows as tuples."""
    return cast(list[Row], np.frombuffer(packed, ROW).tolist())


def reason_of(row: Row, reasons: Sequence[str]) -> str | None:
    """The text of a row's reason; None where it has none."""
    if row[7] == NONE:
        return None
    return reasons[row[7]] if 0 <= row[7] < len(reasons) else f"reason {row[7]}, which has no text"


def told(row: Row, reasons: Sequence[str]) -> str:
    """A row in words."""
    time_s, kind, *numbers, _ = row
    names = ("lease", "worker", "base version", "version", "staleness")
    parts = [f"{name} {number}" for name, number in zip(names, numbers, strict=True) if number != NONE]
    words = KINDS[kind] if 0 <= kind < len(KINDS) else f"kind {kind} (there are 0 to {len(KINDS) - 1})"
    reason = reason_of(row, reasons)
    return f"{words} ({', '.join(parts)}) at {time_s!r} s" + ("" if reason is None else f", {reason!r}")


def packed_contribution(contribution: Contribution) -> bytes:
    """A contribution as a safetensors file, its checksum included."""
    from safetensors.torch import save

    tensors = {"values": contribution.values.detach().contiguous()}
    if contribution.integers is not None:
        tensors["integers"] = contribution.integers.contiguous()
    metadata = {name: json.dumps(value) for name, value in _numbers(contribution).items()}
    return save(tensors, {**metadata, "sha256": checksum_of(contribution)})


def _read(content: bytes) -> tuple[Contribution, str]:
    from safetensors.torch import load

    tensors = load(content)
    told = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    form, samples, size = (json.loads(told[name]) for name in ("form", "samples", "step_size_sum"))
    values, integers = tensors["values"].clone(), tensors.get("integers")
    return Contribution(values, cast(Form, form), samples, integers, size), told["sha256"]


def _numbers(contribution: Contribution) -> dict[str, Any]:
    size = contribution.step_size_sum
    return {
        "form": contribution.form,
        "samples": int(contribution.samples),
        "step_size_sum": None if size is None else float(size),
    }


def checksum_of(contribution: Contribution) -> str:
    """SHA-256 of all that a contribution says."""
    return _sha256(_numbers(contribution), {"values": contribution.values, "integers": contribution.integers})


def digest(model: Model) -> str:
    """SHA-256 of a version's values and integers, their dtypes and lengths."""
    return _sha256({}, {"values": model.values, "integers": model.integers})


def _sha256(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> str:
    import torch

    found = hashlib.sha256(json.dumps(numbers).encode())
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _whole(path: Path, record: int) -> int:
    return path.stat().st_size // record if path.exists() else 0
