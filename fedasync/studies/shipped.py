"""Files that are called by their names: the working directory's own before those that came with the package."""

from __future__ import annotations

from pathlib import Path

import fedasync
from fedasync.studies.errors import StudyError, did_you_mean

ROOMS = {"sims": ("a study", "sim"), "experiments": ("an experiment", "run"), "sims/plans": ("a plan", "plan")}
"""Folder → what its files are, and the command that they are for."""


def files(room: str) -> dict[str, Path]:
    """The TOML files of a folder such as ``sims`` or ``sims/plans``, by name."""
    package = Path(fedasync.__file__).parent
    found: dict[str, Path] = {}
    for folder in (Path(room), package.parent / room, package / f"shipped_{room}"):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def find(name: str, room: str, what: str) -> Path:
    """A file by its path, or ``what`` it is by its name in ``room``. Raises StudyError."""
    path = Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1:
        return path
    known = files(room)
    if name not in known:
        elsewhere = [told for other, told in ROOMS.items() if other != room and name in files(other)]
        hint = "".join(f"; it is {kind}, which is for `fedasync {command} {name}`" for kind, command in elsewhere)
        raise StudyError(f"no {what} is called {name!r}{hint or did_you_mean(name, known)}")
    return known[name]
