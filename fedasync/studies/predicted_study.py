"""The study file that predicts a recorded run: its own tables, and the population that was fitted to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import tomli_w

from fedasync.runs.run import Run
from fedasync.simulation import Settings
from fedasync.studies.build import build_federated
from fedasync.studies.errors import StudyError
from fedasync.studies.run_folders import name_of


def demand_configuration(runs: Sequence[Run]) -> None:
    """Raise StudyError for a run whose configuration could not be written as a study, and where two differ."""
    for run in runs:
        strategy, workload = run.config.get("strategy"), run.config.get("workload")
        if not isinstance(strategy, Mapping) or "name" not in strategy:
            raise StudyError(
                f"{name_of(run)}: its configuration has no [strategy] with a name (it was not made from a file), so no "
                "study can be written around it; a run of `fedasync sim` or of a deployment would do"
            )
        if workload is not None and not isinstance(workload, Mapping):
            raise StudyError(f"{name_of(run)}: its configuration has no [workload] table, but {workload!r}")
    first = runs[0]
    for run in runs[1:]:
        for table in ("strategy", "workload", "run", "targets"):
            if run.config.get(table) != first.config.get(table):
                raise StudyError(
                    f"{name_of(run)}: its [{table}] is not that of {name_of(first)}; runs that differ in nothing but "
                    "their seed would do"
                )


def study_tables(runs: Sequence[Run], population: Mapping[str, Any], silent_s: float | None) -> dict[str, Any]:
    """The tables of the study; ``silent_s`` is how long the server waited for clients that fell silent.

    Raises StudyError where they make no run.
    """
    config = runs[0].config
    strategy = dict(config["strategy"])
    if "crash_probability" in population and strategy.get("lease_timeout_s") is None:
        strategy["lease_timeout_s"] = (config.get("deployment") or {}).get("task_timeout_s") or silent_s
    known = {field.name for field in fields(Settings)}
    settings = {key: value for key, value in config["run"].items() if key in known and value is not None}
    if runs[0].summary.get("runtime") == "flower":
        settings["cancelled_clients"] = "finish"  # Flower cannot stop a client
    tables = {
        "study": {
            "title": f"Predicted: {runs[0].summary['run_id']}",
            "seeds": sorted({run.seed for run in runs}),
        },
        "strategy": strategy,
        "workload": config.get("workload"),
        "run": settings,
        "targets": config.get("targets") or None,
        "population": dict(population),
    }
    build_federated(
        {name: tables[name] for name in ("strategy", "workload", "run", "population") if tables[name]}
        | {"seed": runs[0].seed},
        f"{name_of(runs[0])}: as a study",
    )
    return tables


def study_text(tables: Mapping[str, Any], comments: Sequence[str]) -> str:
    """The file, with what was fitted above it as comments."""
    head = "".join(f"# {line}\n" for comment in comments for line in comment.splitlines())
    return f"{head}\n{tomli_w.dumps({name: table for name, table in tables.items() if table is not None})}"
