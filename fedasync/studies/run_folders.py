"""Finished runs, named by their own folders or by the folder of a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedasync.runs.run import Run
from fedasync.studies.errors import StudyError
from fedasync.studies.publish import STUDY, finished_runs, recall


def opened(folders: Sequence[Path]) -> list[Run]:
    """The runs of folders, in order; a study's results stand for all of its finished runs.

    Raises StudyError for a folder that holds neither, for a run without a contribution, and for no folder.
    """
    if not folders:
        raise StudyError("no run is named; a run's folder, or a study's, would do")
    paths = [path for folder in folders for path in _runs_of(folder)]
    return [_opened(path) for path in dict.fromkeys(paths)]


def _runs_of(folder: Path) -> list[Path]:
    if not (folder / STUDY).is_file():
        return [folder]
    found = finished_runs(folder, recall(folder))
    if not found:
        raise StudyError(f"{folder}: none of the study's runs has finished")
    return found


def _opened(path: Path) -> Run:
    try:
        run = Run.load(path)
    except OSError as error:
        raise StudyError(f"{path}: no finished run here: {error.strerror}") from None
    except ValueError as error:
        raise StudyError(str(error)) from None
    for key in ("strategy", "seed", "time_s", "ledger", "versions", "consumed", "staleness"):
        if key not in run.summary:
            raise StudyError(f"{path}: not readable as a run (its summary has no {key!r})")
    if not run.summary["consumed"]:
        raise StudyError(f"{path}: an empty run: no contribution was applied in {run.summary['time_s']:g} s")
    return run


def rollout_runs(runs: Sequence[Run]) -> bool:
    """Whether all runs are on prompts. Raises StudyError where some are and others are of federated clients."""
    of_prompts = [run for run in runs if "rollouts" in run.summary]
    if of_prompts and len(of_prompts) < len(runs):
        other = next(run for run in runs if "rollouts" not in run.summary)
        raise StudyError(
            f"{name_of(of_prompts[0])} is a run on prompts and {name_of(other)} one of federated clients; runs of one "
            "kind would do"
        )
    return bool(of_prompts)


def name_of(run: Run) -> str:
    """What to call a run in a message."""
    return str(run.folder or run.summary["run_id"])


def one_strategy(runs: Sequence[Run]) -> str:
    """The strategy of all runs. Raises StudyError where they differ."""
    first = runs[0]
    for run in runs[1:]:
        if run.summary["strategy"] != first.summary["strategy"]:
            raise StudyError(
                f"{name_of(run)}: strategy {run.summary['strategy']!r}, and {name_of(first)} has "
                f"{first.summary['strategy']!r}; runs of one strategy would do"
            )
    return str(first.summary["strategy"])
