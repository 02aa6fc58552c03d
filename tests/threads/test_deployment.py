"""Threads about real deployments. What is slow starts real processes (`make test-flower` has more of them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedasync.federated.limits import Limits
from fedasync.flower.app_folder import write
from fedasync.flower.processes import LocalFederation
from fedasync.flower.serving import Deployment, serve
from fedasync.flower.settings import DeploymentSettings
from fedasync.runs.run import Run
from fedasync.strategies import fedbuff
from fedasync.workloads import Quadratic

from ..flower.conftest import task_identity  # noqa: F401
from ..flower.fake_grid import FIRST_NODE, FakeGrid, VirtualClock


@pytest.mark.parametrize("node", [FIRST_NODE, 77])
def test_flower_4844_a_client_that_left_joins_again_and_is_used(node: int) -> None:
    """Under its former ID (it has a key), or under another."""

    class Leaves(FakeGrid):
        def get_node_ids(self) -> list[int]:
            there = {node: 0} if self.clock.time_s >= 20.0 else {}
            if self.clock.time_s >= 5.0:
                self.online = {other: client for other, client in self.online.items() if client} | there
            return super().get_node_ids()

    workload, clock = Quadratic(clients=3), VirtualClock()
    grid = Leaves(workload, clock, lambda client, turn, lease, steps: (6.0, 5) if (client, turn) == (0, 2) else 2.0)
    strategy = fedbuff(concurrency=3, buffer_size=2)
    run = serve(grid, Deployment(strategy, workload, Limits(time_s=60.0), DeploymentSettings(back_off_s=1.0)), clock)
    events: Any = run.events
    mine = events.filter((events["worker"] == 0) & (events["kind"] == "delivered"))["time_s"].to_list()
    assert mine[0] < 5.0
    assert not [time_s for time_s in mine if 8.0 < time_s < 20.0]
    assert len([time_s for time_s in mine if time_s > 20.0]) > 10


@pytest.mark.slow
def test_flower_2515_work_that_lasts_longer_than_the_keep_alive_is_no_failure(tmp_path: Path) -> None:
    """Nodes are heard of every 30 s; a task of 80 s comes back all the same."""
    config = {
        "strategy": {"name": "fedasync", "concurrency": 1},
        "workload": {"kind": "quadratic", "clients": 1},
        "run": {"updates": 1},
        "deployment": {"work_s_by_client": [80.0]},
        "seed": 0,
        "out": str(tmp_path / "run"),
        "resume": False,
    }
    write(tmp_path / "app", config)
    with LocalFederation(tmp_path / "federation", 1, timeout_s=600.0) as federation:
        federation.start()
        assert federation.wait_for_run(federation.run(tmp_path / "app"), 600.0) == "finished:completed"
    run = Run.load(tmp_path / "run")
    assert run.summary["consumed"] == 1
    assert run.summary["time_s"] >= 80.0
    assert run.summary["ledger"]["failed"] == {}
