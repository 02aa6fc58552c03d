"""The whole state of a run on the disk, so that it goes on from there: ``save`` and ``load``.

    checkpoint/state.json            coordinator, server, how many log rows they cover
    checkpoint/arrays.safetensors    the server's tensors

A new one is written beside the old one, which stays until the new one is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedasync.aggregation.server import Server
from fedasync.core import Coordinator, Strategy
from fedasync.federated.journal import sync_folder
from fedasync.runs.run import write

CHECKPOINT, PARTIAL, PREVIOUS = "checkpoint", ".checkpoint.partial", ".checkpoint.previous"
STATE, ARRAYS = "state.json", "arrays.safetensors"
FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which and why, on one line."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's state.

    ``rows`` and ``rings`` are how many of the journal's it covers. ``note`` says
    why this is not the newest checkpoint, where it is not.
    """

    coordinator: Coordinator
    server: Server
    rows: int
    rings: int
    note: str | None = None


def save(
    folder: Path | str,
    coordinator: Coordinator,
    server: Server,
    *,
    rows: int | None = None,
    rings: int = 0,
) -> None:
    """Write a checkpoint, between any two calls of coordinator and server, in place of the former one.

    ``rows`` are the log's by now, all of them on the disk (None: as many as the
    coordinator's log has), ``rings`` the journal's. Raises OSError where there is no room, StateError for an update's
    state that cannot be kept; the former checkpoint stays then.
    """
    from safetensors.torch import save as packed

    folder = Path(folder)
    partial, previous, here = (folder / name for name in (PARTIAL, PREVIOUS, CHECKPOINT))
    of_server, tensors = server.snapshot()
    content = packed(tensors)
    state = {
        "format": FORMAT,
        "rows": len(coordinator.log) if rows is None else rows,
        "rings": rings,
        "coordinator": coordinator.snapshot(),
        "server": of_server,
        "arrays_sha256": hashlib.sha256(content).hexdigest(),
    }
    text = json.dumps({"sha256": _checksum(state), "state": state}, ensure_ascii=False, allow_nan=False)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        write(partial / ARRAYS, content)
        write(partial / STATE, text.encode())
        sync_folder(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if here.exists():
        if previous.exists():
            shutil.rmtree(previous)
        here.rename(previous)
    partial.rename(here)
    sync_folder(folder)
    if previous.exists():
        shutil.rmtree(previous)


def load(
    folder: Path | str,
    strategy: Strategy,
    *,
    profile: Sequence[float] | None = None,
    rows: int | None = None,
) -> Loaded | None:
    """The newest checkpoint that can be used, or None where there is none at all.

    ``rows`` are the journal's on the disk: a checkpoint that covers more does not belong to it. Raises CheckpointError
    for a checkpoint that is torn, or of another strategy or format, where no former one can be used instead.
    """
    folder = Path(folder)
    found = [folder / name for name in (CHECKPOINT, PREVIOUS) if (folder / name).exists()]
    problems: list[str] = []
    for path in found:
        try:
            return _load(path, strategy, profile, rows, "; ".join(problems) or None)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("; ".join(problems))
    return None


def _load(
    path: Path, strategy: Strategy, profile: Sequence[float] | None, rows: int | None, note: str | None
) -> Loaded:
    from safetensors import SafetensorError
    from safetensors.torch import load as unpacked

    try:
        told, content = json.loads((path / STATE).read_bytes()), (path / ARRAYS).read_bytes()
    except ValueError as error:
        raise CheckpointError(f"{path}: torn: {STATE} is not readable ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: torn: {Path(error.filename or STATE).name}: {error.strerror}") from None
    state = told.get("state") if isinstance(told, dict) else None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        got = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(f"{path}: no checkpoint of this version of fedasync: format {got!r}; {FORMAT} would do")
    if told.get("sha256") != _checksum(state):
        raise CheckpointError(f"{path}: torn: {STATE} is not what was written")
    if hashlib.sha256(content).hexdigest() != state["arrays_sha256"]:
        raise CheckpointError(f"{path}: torn: {ARRAYS} is not what was written")
    if rows is not None and state["rows"] > rows:
        raise CheckpointError(f"{path}: it covers {state['rows']} rows of a log, and the log here has {rows}")
    try:
        coordinator = Coordinator.restore(strategy, state["coordinator"], profile=profile)
        server = Server.restore(strategy.update, state["server"], unpacked(content))
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: it does not fit: {' '.join(str(error).split())}") from None
    return Loaded(coordinator, server, state["rows"], state["rings"], note)


def _checksum(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, allow_nan=False).encode()).hexdigest()
