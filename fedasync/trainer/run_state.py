"""What of a run is on the disk: rows as they come, and after some versions a checkpoint from which it goes on.

    events.rows, answers.rows, iterations.rows     appended; a checkpoint says how many of them it covers
    checkpoints/v12/state.json                     coordinator, driver, steps, counts
    checkpoints/v12/groups.safetensors             groups that were delivered and wait for the trainer
    checkpoints/v12/learner/                       written by the trainer

Only a checkpoint with state.json counts, which comes last. A run that goes on from it has made nothing that came
later: rows are cut, versions are made again, and groups that were in flight are asked again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fedasync.federated.journal import sync_folder
from fedasync.rl.trajectory import Group, packed, unpacked
from fedasync.runs.rows import ROW as EVENT
from fedasync.runs.run import write
from fedasync.trainer.answer_rows import ITERATION
from fedasync.trainer.answer_rows import ROW as ANSWER
from fedasync.trainer.row_file import RowFile

CHECKPOINTS, STATE, GROUPS, LEARNER = "checkpoints", "state.json", "groups.safetensors", "learner"
FORMAT = 1
KEPT = 2
"""Checkpoints that stay: the newest, and the one before."""


class CheckpointError(ValueError):
    """A run cannot go on from what is on the disk; the message says which and why, on one line."""


@dataclass(frozen=True)
class Checkpoint:
    """A moment just after a version was committed and published."""

    folder: Path
    version: int
    state: Mapping[str, Any]
    groups: Mapping[int, Group]

    @property
    def learner(self) -> Path:
        return self.folder / LEARNER


class RunState:
    """The files of a run in progress. Ends with its ``with`` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = RowFile(folder / "events.rows", EVENT)
        self.answers = RowFile(folder / "answers.rows", ANSWER)
        self.iterations = RowFile(folder / "iterations.rows", ITERATION)

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()

    @property
    def _files(self) -> dict[str, RowFile]:
        return {"events": self.events, "answers": self.answers, "iterations": self.iterations}

    def place(self, version: int) -> Path:
        """The folder of a version's checkpoint."""
        return self.folder / CHECKPOINTS / f"v{version}"

    def save(self, version: int, state: Mapping[str, Any], groups: Iterable[Group]) -> dict[str, Any]:
        """What ``complete`` writes once the trainer's part is there: a picture of now, with all rows on the disk."""
        rows = {name: file.sync() for name, file in self._files.items()}
        return {
            "state": {"format": FORMAT, "version": version, "rows": rows, **state},
            "groups": packed(groups),
        }

    def complete(self, version: int, picture: Mapping[str, Any]) -> None:
        """The trainer's part of a checkpoint is on the disk: from now on it counts."""
        folder = self.place(version)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / GROUPS, picture["groups"])
        sync_folder(folder)
        write(folder / STATE, json.dumps(picture["state"]).encode())
        sync_folder(folder)
        sync_folder(folder.parent)
        kept = sorted(self._versions(), reverse=True)
        for old in kept[KEPT:]:
            shutil.rmtree(self.place(old), ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that counts, with all rows cut to it; without one, everything starts anew.

        One that cannot be read is passed over for the one before. Raises CheckpointError where none of them can be,
        or one is of another format.
        """
        versions = sorted(self._versions(), reverse=True)
        problems: list[str] = []
        for version in versions:
            folder = self.place(version)
            try:
                if not (folder / LEARNER).is_dir():
                    raise ValueError("the trainer's part is missing")
                state = json.loads((folder / STATE).read_text())
                groups = unpacked((folder / GROUPS).read_bytes())
                if state["format"] != FORMAT:
                    raise ValueError(f"format {state['format']}, and this fedasync reads {FORMAT}")
                for name, file in self._files.items():
                    file.cut(state["rows"][name])
            except (OSError, ValueError, KeyError) as error:
                problems.append(f"{folder}: {error}")
                continue
            return Checkpoint(folder, version, state, {group.lease: group for group in groups})
        if problems:
            raise CheckpointError(f"no checkpoint to go on from ({'; '.join(problems)}); remove {self.folder}")
        for file in self._files.values():
            file.cut(0)
        return None

    def _versions(self) -> list[int]:
        found = (self.folder / CHECKPOINTS).glob(f"v*/{STATE}")
        return [int(path.parent.name.removeprefix("v")) for path in found]
