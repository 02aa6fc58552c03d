"""A small experiment, and its runs, checked."""

from __future__ import annotations

from pathlib import Path

from fedasync.report.spec import Report
from fedasync.runs.exchanges import exchanges_of_log
from fedasync.runs.run import Run
from fedasync.simulation import simulate
from fedasync.studies.build import build_federated
from fedasync.studies.experiment_file import load
from fedasync.studies.measurements import Measurement, measurements

EXPERIMENT = """
[study]
title = "small"
seeds = 2

[federation]
clients = 4

[deployment]
work_s_by_client = [1.0, 1.0, 2.0, 6.0]

[run]
time_s = 200.0
evaluate_every_s = 1.0
stop_at_target = true

[workload]
kind = "quadratic"
clients = 4
centres = [1.0, 1.0, 1.0, 1.0]

[targets]
w = 0.9

[[axis]]
name = "strategy"
points = [
  { label = "FedAvg", strategy = { name = "fedavg", cohort = 4 } },
  { label = "FedBuff", strategy = { name = "fedbuff", concurrency = 4, buffer_size = 2 } },
]

[prediction]
calibrate_on = "FedAvg"

[report]
figures = []
baseline = "FedAvg"
"""
REPORT = Report(figures=(), baseline="FedAvg")


def read(tmp_path: Path, text: str = EXPERIMENT, *options: str) -> list[Measurement]:
    """The runs of an experiment, checked."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "e.toml").write_text(text)
    return measurements(load(tmp_path / "e.toml", options), tmp_path / "out")


def measure(made: Measurement, slow: float = 1.0) -> Run:
    """A run of clients that take 1, 1, 2 and 6 s a task, ``slow`` times as long, as if Flower had made it."""
    config = {name: made.plan.config[name] for name in ("strategy", "workload", "run", "seed")}
    population = {
        "clients": 4,
        "duration_s": {"kind": "constant", "value": slow},
        "slowness": {"kind": "values", "values": [1.0, 1.0, 2.0, 6.0]},
    }
    parts = build_federated({**config, "population": population}, "test")
    assert parts.workload is not None
    run = simulate(
        parts.strategy,
        parts.population,
        parts.workload(),
        parts.settings,
        seed=made.plan.seed,
        target=made.plan.config["targets"],
        name=made.folder.name,
        labels=made.plan.labels,
        config=made.plan.config,
    )
    run.tables = {**run.tables, "exchanges": exchanges_of_log(run.events, 8)}
    run.save(made.folder)
    return Run.load(made.folder)
