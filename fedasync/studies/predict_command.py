"""``fedasync predict``: how another configuration of a recorded run on prompts would go."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedasync.report.rollout_numbers import UNITS, numbers
from fedasync.report.statistics import pooled_staleness
from fedasync.runs.run import Run
from fedasync.studies import store
from fedasync.studies.calibrate_rollouts import PREDICTED, calibrate_rollouts
from fedasync.studies.command import console_for_tables
from fedasync.studies.compare_rollouts import Side
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import jobs, perform
from fedasync.studies.out_folder import check_out
from fedasync.studies.predicted_changes import check_changes, of_changes
from fedasync.studies.publish import describe, load_runs, remember
from fedasync.studies.run_folders import name_of, one_strategy, opened, rollout_runs
from fedasync.studies.study import load

MOST_STALENESS = 12
"""Values of staleness printed one by one."""


def predict(runs: Sequence[Path], changes: Sequence[str], out: Path | None, *, probe: bool = False) -> int:
    """Fit a cluster to runs that differ in their seeds alone, change it, simulate it, and print what comes of it.

    ``changes`` are ``dotted.key=value`` of the study that is fitted (`calibrate_rollouts`). Everything is kept in
    ``out`` (results/predicted/RUN). Returns the exit status 0. Raises StudyError.
    """
    recorded = opened(runs)
    if not rollout_runs(recorded):
        raise StudyError(
            f"{name_of(recorded[0])}: a run of federated clients; `fedasync calibrate` fits them, and `fedasync sim` "
            "of its predicted.toml (with --set) predicts"
        )
    one_strategy(recorded)
    check_changes(recorded[0].config.get("strategy"), changes)
    folder = out or Path("results") / "predicted" / Path(name_of(recorded[0])).name
    check_out(folder)
    words = [*map(str, runs), *(word for change in changes for word in ("--set", change)), *(["--probe"] * probe)]
    command = shlex.join(["fedasync", "predict", *words])
    calibrate_rollouts(recorded, folder, command, probes=probe)
    try:
        found = simulated(folder / PREDICTED, changes, folder, command)
    except StudyError as error:
        raise of_changes(error, folder / PREDICTED, changes) from None
    console = console_for_tables()
    changed = ", ".join(changes) or "nothing changed"
    table = Table("", "recorded", f"predicted: {changed}", title="means ± standard deviations over runs")
    for name, unit in UNITS.items():
        sides = [Side.of([numbers(run)[name] for run in side]) for side in (recorded, found)]
        table.add_row(f"{name} ({unit})", *map(str, sides))
    console.print(table)
    for what, side in (("recorded", recorded), ("predicted", found)):
        console.print(f"staleness, {what}: {_histogram(side)}", markup=False, highlight=False, soft_wrap=True)
    console.print(str(folder), markup=False, highlight=False, soft_wrap=True)
    return 0


def simulated(study_file: Path, changes: Sequence[str], folder: Path, command: str) -> list[Run]:
    """The runs of a study, made in this process; those that are there are not made again. Raises StudyError."""
    study = load(study_file, changes)
    every = jobs(study, folder)
    store.sweep(folder / "runs")
    description = describe(study, [job.folder for job in every], command)
    remember(folder, description)
    for outcome in perform([job for job in every if not store.is_finished(job.folder)]):
        if outcome.error:
            raise StudyError(f"{folder}: {outcome.error}", 1)
    return load_runs(folder, description)[0]


def _histogram(runs: Sequence[Run]) -> str:
    """Shares of trained groups by staleness."""
    counts = pooled_staleness(run.summary["staleness"]["histogram"] for run in runs)
    total = sum(counts.values())
    if not total:
        return "nothing was trained"
    shown = sorted(counts)[:MOST_STALENESS]
    told = [f"{value}: {counts[value] / total:.1%}" for value in shown]
    rest = sum(counts[value] for value in counts if value not in shown)
    return ", ".join([*told, *([f"more: {rest / total:.1%}"] if rest else [])]) + " of the groups"
