"""An experiment file with [processes]: a study whose rollout workers and trainer are processes of this machine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedasync.studies.errors import StudyError
from fedasync.studies.experiment_file import Prediction, read_plan
from fedasync.studies.study import (
    CONFIGURATION,
    LEARNT,
    Study,
    apply_changes,
    check_axes,
    read,
    read_axis,
)

OWN = (*LEARNT, "prompts", "processes", "engine", "run", "strategy")
"""Tables that configure a run; axes and ``--set`` may change them."""
TABLES = ("study", *OWN, "targets", "axis", "prediction", "report")
NOT_HERE = (
    *(table for table in CONFIGURATION if table not in OWN),
    *("federation", "deployment", "calibrate", "published"),
)
NEEDED = ("processes", "task", "policy", "sampling", "optimiser", "prompts", "run")
SIMULATED = ("closed_forms",)
"""Figures that need the law of every duration, which only a population has."""


@dataclass(frozen=True)
class TrainerExperiment:
    """An experiment file, read. The base of its ``study`` has [processes] and no world."""

    study: Study
    prediction: Prediction | None


def is_trainer(path: Path) -> bool:
    """Whether an experiment's file is one of rollout workers and a trainer. Raises StudyError."""
    return "processes" in read(path, (*TABLES, *NOT_HERE))


def load(path: Path, changes: Sequence[str] = (), seeds: int | None = None) -> TrainerExperiment:
    """Read an experiment file. ``changes`` are ``dotted.key=value`` with a TOML value; ``seeds``: as many.

    Raises StudyError: file, key, what it got, what would be accepted.
    """
    content = read(path, (*TABLES, *NOT_HERE))
    _demand_tables(content, path)
    base = {table: copy.deepcopy(content[table]) for table in OWN if table in content}
    axes = tuple(read_axis(i, table, f"{path}: axis") for i, table in enumerate(content.get("axis", []), 1))
    axes = apply_changes(base, axes, changes, OWN)
    check_axes(axes, f"{path}: axis", OWN)
    return TrainerExperiment(*read_plan(content, base, axes, path, seeds, SIMULATED))


def _demand_tables(content: dict[str, Any], path: Path) -> None:
    """What a real run needs, and no table of another kind of run beside it."""
    if strange := [table for table in NOT_HERE if table in content]:
        written = f"[[{strange[0]}]]" if strange[0] in ("calibrate", "published") else f"[{strange[0]}]"
        raise StudyError(
            f"{path}: {written} beside [processes]: workers and trainer of such an experiment are processes of this "
            "machine; the file without either would do"
        )
    for table in NEEDED:
        if table not in content:
            raise StudyError(f"{path}: the table [{table}] is missing")
