"""The product's own apps on real processes: they train, survive kills, resume, and are replayed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedasync.core.log import DELIVERED
from fedasync.federated.recorded import Recorded
from fedasync.flower.app_folder import write
from fedasync.flower.processes import LocalFederation
from fedasync.flower.server_log import server_log
from fedasync.runs.exchanges import LINES
from fedasync.runs.run import Run

PATIENCE_S = 600.0
"""For a busy machine; no test waits so long where all is well."""
PROGRAM = str(Path(sys.executable).with_name("fedasync"))


def configuration(out: Path, clients: int, *, updates: int, **deployment: Any) -> dict[str, Any]:
    return {
        "strategy": {"name": "fedasync", "concurrency": clients},
        "workload": {"kind": "quadratic", "clients": clients},
        "run": {"updates": updates, "selection": "same_client"},
        "deployment": {"say_every_s": 5.0, "back_off_s": 1.0, **deployment},
        "seed": 0,
        "out": str(out),
        "resume": False,
    }


def delivered(out: Path) -> list[int]:
    """The clients whose contributions were accepted so far."""
    path = out / LINES
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["worker"] for row in rows if row["outcome"] == "delivered"]


def wait_for(out: Path, updates: int, federation: LocalFederation) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while len(delivered(out)) < updates:
        assert time.monotonic() < until_s, "\n".join(path.read_text()[-2000:] for path in federation.logs.values())
        time.sleep(0.2)


def assert_replayed(out: Path) -> None:
    done = subprocess.run([PROGRAM, "replay", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_killed_node_stops_nobody_else_and_nothing_is_left(tmp_path: Path) -> None:
    out, app, before = tmp_path / "run", tmp_path / "app", set(psutil.pids())
    write(app, configuration(out, 2, updates=5))
    with LocalFederation(tmp_path / "federation", 2, timeout_s=PATIENCE_S) as federation:
        federation.start()
        run_id = federation.run(app)
        wait_for(out, 2, federation)
        federation.kill_supernode(1)
        assert federation.wait_for_run(run_id, PATIENCE_S) == "finished:completed"
        port = federation.port
    run = Run.load(out)
    assert run.summary["ended"] == "updates"
    assert run.summary["consumed"] == 5
    assert Counter(delivered(out))[0] >= 3
    assert_replayed(out)
    left = [process for pid in set(psutil.pids()) - before if (process := _flower_process(pid, tmp_path))]
    assert left == []
    listening = [each for each in psutil.net_connections() if each.status == psutil.CONN_LISTEN]
    assert port not in [each.laddr.port for each in listening]


def _flower_process(pid: int, folder: Path) -> list[str] | None:
    """The command of a process of this test's federation that is still at work."""
    try:
        process = psutil.Process(pid)
        ours = str(folder) in process.environ().get("FLWR_HOME", "")
        return process.cmdline() if ours and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["superlink", "server app"])
def test_a_killed_servers_run_is_resumed_by_a_new_one(tmp_path: Path, victim: str) -> None:
    out, app = tmp_path / "run", tmp_path / "app"
    config = configuration(out, 2, updates=8, checkpoint_every_s=5.0)
    write(app, config)
    with LocalFederation(tmp_path / "first", 2, timeout_s=PATIENCE_S) as federation:
        federation.start()
        run_id = federation.run(app)
        wait_for(out, 4, federation)
        if victim == "superlink":
            federation.kill_superlink()
        else:
            _kill(tmp_path / "first", "flwr-serverapp")
            assert federation.wait_for_run(run_id, PATIENCE_S) == "finished:failed"
    accepted = [row[2] for row in Recorded(out).rows() if row[1] == DELIVERED]
    assert len(accepted) >= 4
    with LocalFederation(tmp_path / "second", 2, timeout_s=PATIENCE_S) as federation:
        federation.start()
        run_id = federation.run(app, {"resume": True})
        assert federation.wait_for_run(run_id, PATIENCE_S) == "finished:completed"
    run = Run.load(out)
    leases = run.events.filter(run.events["kind"] == "consumed")["lease"].to_list()
    assert len(leases) == len(set(leases)) == 8
    assert leases[: len(accepted)] == accepted
    assert_replayed(out)


def _kill(folder: Path, command: str) -> list[int]:
    """kill -9 of this federation's processes that run ``command``."""
    killed = []
    for process in psutil.process_iter():
        try:
            ours = str(folder) in process.environ().get("FLWR_HOME", "")
            if ours and any(command in word for word in process.cmdline()):
                process.kill()
                killed.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return killed


SOAK_S = float(os.environ.get("FEDASYNC_SOAK_S", "600"))
TARGET = 0.85


@pytest.mark.slow
def test_ten_minutes_of_random_kills_lose_nothing(tmp_path: Path) -> None:
    """Nodes and clients are killed at random; the run ends, reaches its target, and ledger and replay agree."""
    out, app, chance = tmp_path / "run", tmp_path / "app", random.Random(0)
    config = configuration(out, 3, updates=1, task_timeout_s=120.0, join_timeout_s=300.0) | {
        "strategy": {"name": "fedbuff", "concurrency": 3, "buffer_size": 2},
        "workload": {"kind": "digits", "clients": 3, "local": {"epochs": 3, "batch_size": 16, "learning_rate": 0.1}},
        "run": {"time_s": SOAK_S, "evaluate_every_s": 10.0},
        "targets": {"accuracy": TARGET},
    }
    write(app, config)
    kills: Counter[str] = Counter()
    with LocalFederation(tmp_path / "federation", 3, timeout_s=PATIENCE_S) as federation:
        federation.start()
        run_id = federation.run(app)
        wait_for(out, 1, federation)
        until_s = time.monotonic() + 0.9 * SOAK_S
        while time.monotonic() < until_s:
            time.sleep(chance.uniform(10.0, 40.0))
            if chance.random() < 0.5:
                partition = chance.randrange(3)
                federation.kill_supernode(partition)
                kills["nodes"] += 1
                time.sleep(chance.uniform(0.0, 5.0))
                federation.restart_supernode(partition)
            else:
                kills["clients"] += len(_kill(tmp_path / "federation", "flwr-clientapp"))
        assert federation.wait_for_run(run_id, SOAK_S + PATIENCE_S) == "finished:completed"
    run = Run.load(out)
    summary = run.summary
    print(f"\nkilled: {dict(kills)}; {summary['ledger']}; accuracy {summary['best']['accuracy']:.3f}")
    consumed = run.events.filter(run.events["kind"] == "consumed")["lease"].to_list()
    assert len(consumed) == len(set(consumed))
    accepted = run.events.filter(run.events["kind"] == "delivered")["lease"].to_list()
    assert accepted[: len(consumed)] == consumed
    assert len(accepted) == len(consumed) + summary["ledger"]["buffered"]
    assert len(delivered(out)) == len(accepted)
    assert kills.total() >= SOAK_S / 60
    assert summary["best"]["accuracy"] >= TARGET
    assert_replayed(out)


@pytest.mark.slow
def test_a_model_of_50_mb_goes_through(tmp_path: Path) -> None:
    out, app = tmp_path / "run", tmp_path / "app"
    config = configuration(out, 1, updates=2)
    config["workload"]["dimensions"] = 50_000_000 // 8
    write(app, config)
    with LocalFederation(tmp_path / "federation", 1, timeout_s=PATIENCE_S) as federation:
        federation.start()
        assert federation.wait_for_run(federation.run(app), PATIENCE_S) == "finished:completed"
    run = Run.load(out)
    assert run.model is not None
    assert run.model.values.nbytes == 50_000_000
    assert run.summary["consumed"] == 2
    assert_replayed(out)


@pytest.mark.slow
def test_an_exception_in_a_users_workload_is_told_with_client_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(
        "from fedasync.workloads import Quadratic\n\n\n"
        "class Broken(Quadratic):\n"
        "    def train(self, task):\n"
        "        if task.client == 1:\n"
        '            raise KeyError("no such patient")\n'
        "        return super().train(task)\n"
    )
    out, app = tmp_path / "run", tmp_path / "app"
    config = configuration(out, 2, updates=4)
    config["workload"]["kind"] = "raises.Broken"
    write(app, config)
    paths = {"PYTHONPATH": str(tmp_path)}
    with LocalFederation(tmp_path / "federation", 2, environment=paths, timeout_s=PATIENCE_S) as federation:
        federation.start()
        run_id = federation.run(app)
        assert federation.wait_for_run(run_id, PATIENCE_S) == "finished:completed"
        said = server_log(federation.link, run_id)
    run = Run.load(out)
    line = "client 1: KeyError: 'no such patient' (raises.py, line 7)"
    assert run.summary["ledger"]["failed"]["client error"] >= 1
    assert line in (out / "failures.log").read_text().splitlines()
    assert line in said
