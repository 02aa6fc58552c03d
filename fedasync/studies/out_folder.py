"""The folder that a study's results go to, looked at before anything starts."""

from __future__ import annotations

from pathlib import Path

from fedasync.studies.calibration import ROOM
from fedasync.studies.errors import StudyError
from fedasync.studies.publish import STUDY, recall
from fedasync.studies.study import Study

PREDICTED = "predicted.toml"
OURS = (
    *("runs", "world", "progress", "federation", "predicted", ROOM),
    *(PREDICTED, "calibration.json", "answers.parquet", "contention.json", "figures"),
)
"""What lies in a study's folder before anything is published there, and what was fitted there."""
RESULTS = (STUDY, PREDICTED, "summary.json")
"""Files by which a folder is one of results."""


def check_out(folder: Path, study: Study | None = None) -> None:
    """Raise StudyError where a file is in the way, and where something else lies in the folder, also another study's.

    Without a study, any results are.
    """
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            within = "" if path == folder else f", so nothing can be written to {folder}"
            raise StudyError(f"{path} is a file{within}; a folder of results (--out), new or this study's, would do")
    if not folder.exists():
        return
    if (folder / STUDY).is_file():
        name = recall(folder).get("name")
        if study is not None and name != study.name:
            raise StudyError(
                f"{folder} has the results of {name!r}, and these are of {study.name!r}; another one (--out) would do"
            )
        return
    strange = sorted(each.name for each in folder.iterdir() if not _is_ours(each))
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise StudyError(
            f"{folder} has {strange[0]!r}{more} in it, and is no folder of results; a new or empty one (--out) would do"
        )


def _is_ours(path: Path) -> bool:
    """Also the results of another study or prediction, in a folder of its own; hidden files are nobody's."""
    return path.name in OURS or path.name.startswith(".") or any((path / name).is_file() for name in RESULTS)
