"""Simulated runs in the folders of deployments: with a table of exchanges derived from their events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from fedasync.runs.exchanges import exchanges_of_log
from fedasync.runs.run import Run
from fedasync.simulation.simulate import simulate
from fedasync.studies.build import build_federated

TIERS = [
    {"name": "steady", "count": 3, "duration_s": {"kind": "constant", "value": 4.0}},
    {"name": "mild", "count": 3, "duration_s": {"kind": "lognormal", "mean": 6.0, "sigma": 0.5}},
    {"name": "tailed", "count": 4, "duration_s": {"kind": "shifted_exponential", "shift": 2.0, "scale": 5.0}},
]
CONFIG: dict[str, Any] = {
    "strategy": {"name": "fedbuff", "concurrency": 6, "buffer_size": 3},
    "run": {"updates": 300},
    "population": {"tiers": TIERS},
}

Change = Callable[[pl.DataFrame], pl.DataFrame]


def simulated(config: dict[str, Any], seed: int = 0) -> Run:
    config = {**config, "seed": seed}
    parts = build_federated(config, "test")
    workload = None if parts.workload is None else parts.workload()
    target = config.get("targets")
    return simulate(parts.strategy, parts.population, workload, parts.settings, seed=seed, config=config, target=target)


def recorded(folder: Path, config: dict[str, Any] = CONFIG, seed: int = 0, change: Change = lambda table: table) -> Run:
    """A run in its folder, whose exchanges are those of its log, changed."""
    run = simulated(config, seed)
    run.tables = {**run.tables, "exchanges": change(exchanges_of_log(run.events, 1000))}
    run.save(folder)
    return Run.load(folder)


def with_overhead(seconds: pl.Expr) -> Change:
    """Of the whole time of a lease so much was no work."""
    return lambda table: table.with_columns(work_s=pl.col("returned_s") - pl.col("sent_s") - seconds)
