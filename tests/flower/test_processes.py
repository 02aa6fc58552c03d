"""Real processes: they start, work, die one by one, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedasync.flower import command_line
from fedasync.flower.app_folder import write
from fedasync.flower.certificates import Certificates, make
from fedasync.flower.ports import demand_free, free_port
from fedasync.flower.processes import LocalFederation
from fedasync.flower.service import FederationError, Service, family, is_running

APPS = {"PYTHONPATH": str(Path(__file__).parent)}
PATIENCE_S = 300.0
"""For a busy machine; no test waits so long where all is well."""


class App:
    """A folder of the tiny apps, and what their server has written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder.with_suffix(".jsonl")
        config = {"out": str(self.out), "updates": 1, "most_s": PATIENCE_S}
        write(folder, config, server_app="tiny_apps:server", client_app="tiny_apps:client")

    def replies(self) -> list[dict[str, int]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def wait_for(self, federation: LocalFederation, replies: int, partition: int | None = None) -> None:
        """Until so many replies are there, of one partition or of all."""
        until_s = time.monotonic() + PATIENCE_S
        while sum(partition in (None, reply["partition"]) for reply in self.replies()) < replies:
            assert time.monotonic() < until_s, federation.services.said()
            time.sleep(0.1)


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path / "app")


def federation(folder: Path, clients: int, **options: object) -> LocalFederation:
    return LocalFederation(folder, clients, environment=APPS, timeout_s=PATIENCE_S, **options)  # type: ignore[arg-type]


def everything(run: LocalFederation) -> set[psutil.Process]:
    return family(run.services[name].process for name in run.services.names())


def assert_nothing_is_left(run: LocalFederation, processes: set[psutil.Process], sessions: set[int]) -> None:
    """No process of ours, none in a session of ours, no port, no scratch file."""
    assert not any(map(is_running, processes))
    for process in psutil.process_iter():
        try:
            assert not (os.getsid(process.pid) in sessions and is_running(process)), process
        except ProcessLookupError:
            continue
    assert run.port is not None
    demand_free(run.port)
    assert [path.name for path in run.folder.iterdir() if not path.name.startswith("state.db")] == ["logs"]


@pytest.mark.slow  # test_deployment.py kills a node in the default tests
def test_a_federation_goes_on_without_a_killed_node_and_leaves_nothing(tmp_path: Path, app: App) -> None:
    with federation(tmp_path / "federation", 2) as run:
        run.start()
        run_id = run.run(app.folder, {"updates": 6})
        app.wait_for(run, 1)
        run.kill_supernode(1)
        before = sum(reply["partition"] == 0 for reply in app.replies())
        app.wait_for(run, before + 1, partition=0)
        processes = everything(run)
        sessions = {os.getsid(process.pid) for process in processes}
        assert run.wait_for_run(run_id, PATIENCE_S) == "finished:completed"
        assert run.deaths() == []
    assert_nothing_is_left(run, processes, sessions)
    assert {reply["node_id"] for reply in app.replies() if reply["partition"] == 0} == {run.node_ids[0]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clients": 0}, "clients must be an integer ≥ 1"),
        ({"clients": 1, "authenticate": True}, "needs tls with a key for each of the 1 clients, got no certificates"),
        ({"clients": 1, "isolation": "none"}, "isolation: got 'none'"),
        ({"clients": 1, "poll_s": 0}, "poll_s must be from 0.01 to 60"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        federation(tmp_path / "federation", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "federation").exists()


def test_nothing_starts_outside_the_block(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="ready only inside `with`"):
        federation(tmp_path / "federation", 1).start_superlink()


def test_what_starts_wrongly_is_told_with_its_log(tmp_path: Path) -> None:
    with federation(tmp_path / "federation", 1) as run:
        (tmp_path / "federation" / "state.db").mkdir()  # no file can be opened there
        run.database = True
        with pytest.raises(FederationError, match=r"superlink ended with status [^0].*unable to open") as told:
            run.start_superlink()
        assert "\n" not in str(told.value)
        (tmp_path / "federation" / "state.db").rmdir()


OWNER = """
import sys
from pathlib import Path
from fedasync.flower.processes import LocalFederation
with LocalFederation(Path(sys.argv[1]), 1) as run:
    run.start_superlink()
    run.start_supernode(0, wait=False)
    print(run.port, flush=True)
    input()
"""


def owner(folder: Path) -> tuple[subprocess.Popen[str], int, list[psutil.Process]]:
    """A process that holds a federation open: itself, the SuperLink's port, the processes."""
    held = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert held.stdout is not None
    port = int(held.stdout.readline())
    children = psutil.Process(held.pid).children(recursive=True)
    assert children
    return held, port, children


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_owner_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    held, port, children = owner(tmp_path / "federation")
    held.send_signal(number)
    held.communicate(timeout=PATIENCE_S)
    assert held.returncode != 0
    assert not any(map(is_running, children))
    demand_free(port)


@pytest.mark.slow
def test_what_outlives_kill_9_of_the_owner_is_ended_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    held, port, children = owner(folder)
    with pytest.raises(FederationError, match=f"is in use by process {held.pid}"), federation(folder, 1):
        pass
    held.kill()
    held.communicate()
    assert any(map(is_running, children))
    with federation(folder, 1) as run:
        assert {line.split()[0] for line in run.ended_leftovers} >= {"superlink", "supernode-0"}
        assert not any(map(is_running, children))
        demand_free(port)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make(tmp_path / "certificates", clients=2)


def refused_node(run: LocalFederation, tls: Certificates | None, key: Path | None) -> str:
    """What a SuperNode writes that is not let in; it must neither connect nor be listed."""
    own = f"127.0.0.1:{free_port()}"
    command = [*command_line.supernode(run.address, own, "partition-id=0", tls, key), "--max-retries", "2"]
    online = sum(node["status"] == "online" for node in run.link.supernodes())
    node = Service("refused", command, run.folder / "logs" / f"refused-{own[10:]}.log", run.services.environment)
    try:
        until_s = time.monotonic() + PATIENCE_S
        while node.status is None and "retrying" not in node.output():
            assert time.monotonic() < until_s, node.last_lines()
            time.sleep(0.1)
        assert "SuperNode ID:" not in node.output()
        assert node.status != 2, f"a command that is none is no test: {node.last_lines()}"
        assert sum(known["status"] == "online" for known in run.link.supernodes()) == online
        return node.output()
    finally:
        node.kill()


@pytest.mark.slow
def test_with_keys_only_registered_nodes_are_let_in(tmp_path: Path, app: App, certificates: Certificates) -> None:
    with federation(tmp_path / "federation", 2, tls=certificates, authenticate=True) as run:
        run.start_superlink()
        registered = run.register_supernode(0)
        run.start_supernode(0)
        assert run.node_ids[0] == registered

        with pytest.raises(FederationError, match=r"supernode-1 ended with status 1 .*Failed to activate SuperNode"):
            run.start_supernode(1)  # its key was never registered
        other = make(tmp_path / "other", clients=1)
        assert "certificate verify failed" in refused_node(run, other, certificates.key(0)).lower().replace("_", " ")
        refused_node(run, None, None)

        run.kill_supernode(0)
        run.restart_supernode(0)
        assert run.node_ids[0] == registered
        run_id = run.run(app.folder, {"updates": 1})
        assert run.wait_for_run(run_id, PATIENCE_S) == "finished:completed"
        assert app.replies() == [{"node_id": registered, "partition": 0}]


@pytest.mark.slow
def test_a_run_survives_its_superlink(tmp_path: Path, app: App, certificates: Certificates) -> None:
    folder = tmp_path / "federation"
    with federation(folder, 1, tls=certificates, authenticate=True, database=True, isolation="process") as run:
        run.start()
        run_id = run.run(app.folder, {"updates": 4})
        app.wait_for(run, 1)
        run.kill_superlink()
        before = len(app.replies())
        run.restart_superlink()
        app.wait_for(run, before + 1)
        assert run.wait_for_run(run_id, PATIENCE_S) == "finished:completed"
        assert run.deaths() == []
        node_id, processes = run.node_ids[0], everything(run)
        sessions = {os.getsid(process.pid) for process in processes}
    assert_nothing_is_left(run, processes, sessions)

    with federation(folder, 1, tls=certificates, authenticate=True, database=True) as later:
        later.start()
        assert later.node_ids[0] == node_id
        assert later.status(run_id) == "finished:completed"
