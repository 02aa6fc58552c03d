"""A federation on this machine: a SuperLink and its SuperNodes as real processes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

from fedasync.flower import command_line
from fedasync.flower.certificates import Certificates
from fedasync.flower.connection import Connection
from fedasync.flower.leftovers import end_leftovers
from fedasync.flower.ports import HOST, demand_free, free_port, is_healthy, was_taken
from fedasync.flower.service import FederationError, left_on_signals, wait_for
from fedasync.flower.services import Services

APPS_GRACE_S = 0.5
"""Nobody takes what a client's app still does when its SuperNode has gone."""
SERVERS: list[str] = ["superexec", "superlink"]
SILENT_S, AGAIN_S = 90.0, 5.0
"""A SuperLink lets no second SuperNode use a key while it takes the first for online: for a minute of silence. So a
node that was killed is started again and again."""
PORT_ATTEMPTS = 3
"""A port that was free may be taken before the process that was to have it listens."""

_NODE_ID = re.compile(r"SuperNode ID: (\d+)")


class LocalFederation:
    """A SuperLink and ``clients`` SuperNodes, with partitions 0 … ``clients`` − 1; ends with its ``with`` block.

    ``with`` prepares ``folder``; inside, ``start`` starts everything, ``start_superlink``, ``start_supernode`` a part.
    Logs go to ``folder/logs``. Whatever ends the block, Ctrl-C and SIGTERM included, ends every process: SIGTERM,
    and SIGKILL after ``grace_s``. What outlives its owner (``kill -9``) goes on, is named in
    ``folder/processes.json``, and is ended by the next federation in the same folder (see ``ended_leftovers``).

    ``port`` is the SuperLink's; None: a free one. ``tls`` brings certificates, and with ``authenticate`` the
    SuperNodes' keys: a node keeps its ID when it is restarted. ``database``: the SuperLink keeps its state in
    ``folder/state.db``, also for a later federation there. ``isolation = "process"``: the server's app is started by
    a SuperExec of its own, so that with a database a run survives ``kill_superlink`` and ``restart_superlink``.
    ``poll_s``: how often a SuperExec asks for work. ``timeout_s``: how long any one start is waited for.
    ``environment`` is added to every process's.

    Raises ValueError for what cannot be; its methods raise FederationError for what did not happen, with the end of
    the log that tells why.
    """

    def __init__(
        self,
        folder: Path,
        clients: int,
        *,
        port: int | None = None,
        tls: Certificates | None = None,
        authenticate: bool = False,
        database: bool = False,
        isolation: Literal["subprocess", "process"] = "subprocess",
        environment: Mapping[str, str] | None = None,
        poll_s: float = 0.1,
        timeout_s: float = 120.0,
        grace_s: float = 6.0,
    ) -> None:
        if clients < 1:
            raise ValueError(f"clients must be an integer ≥ 1, got {clients}")
        if authenticate and (tls is None or tls.clients < clients):
            keys = f"{tls.clients} keys" if tls else "no certificates"
            raise ValueError(f"authenticate needs tls with a key for each of the {clients} clients, got {keys}")
        if isolation not in ("subprocess", "process"):
            raise ValueError(f"isolation: got {isolation!r}; 'subprocess' or 'process' would do")
        if not 0.01 <= poll_s <= 60:
            raise ValueError(f"poll_s must be from 0.01 to 60, got {poll_s:g}")
        self.folder, self.clients, self.port = folder.absolute(), clients, port
        self.tls, self.authenticate, self.database, self.isolation = tls, authenticate, database, isolation
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self.node_ids: dict[int, int] = {}
        """Flower's ID of each partition's SuperNode, as it last connected."""
        self._maybe_online: set[int] = set()
        """Partitions whose SuperNodes did not sign off."""
        self.ended_leftovers: list[str] = []
        self._home = self.folder / "flwr-home"
        variables = command_line.environment_of(self._home, poll_s, environment or {})
        self.services = Services(self.folder, variables)
        """Every process that was started, by name: superlink, superexec, supernode-0, …"""
        self.link = Connection(self._home, variables, timeout_s)
        """What ``flwr`` may ask the SuperLink."""
        self._block = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as block:
            block.enter_context(left_on_signals())
            self.folder.mkdir(parents=True, exist_ok=True)
            self.ended_leftovers = end_leftovers(self.folder, self.grace_s)
            shutil.rmtree(self._home, ignore_errors=True)
            self._home.mkdir()
            block.callback(self.stop)
            self._block = block.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._block.close()

    def start(self) -> Self:
        """Start everything, and wait until every SuperNode is connected."""
        self.start_superlink()
        if self.authenticate:
            for partition in range(self.clients):
                self.register_supernode(partition)
        for partition in range(self.clients):
            self.start_supernode(partition, wait=False)
        for partition in range(self.clients):
            try:
                self.wait_for_supernode(partition)
            except FederationError as error:
                if not was_taken(error) and not self._is_thought_online(partition, error):
                    raise
                self.start_supernode(partition)
        return self

    def stop(self) -> None:
        """End every process, nodes first, and remove Flower's scratch folder; logs and database stay."""
        try:
            self.services.end(self.services.names("supernode-"), self.grace_s, APPS_GRACE_S)
        finally:
            try:
                self.services.end(SERVERS, self.grace_s)
            finally:
                shutil.rmtree(self._home, ignore_errors=True)
        self.services.forget(self.grace_s)

    @property
    def logs(self) -> dict[str, Path]:
        """Where each process writes."""
        return {name: self.services[name].log for name in self.services.names()}

    @property
    def address(self) -> str:
        """The SuperLink's, host:port."""
        return f"{HOST}:{self.port}"

    def start_superlink(self) -> None:
        """Start the SuperLink, with ``isolation = "process"`` also its SuperExec, and wait until it serves."""
        self._demand_ready("superlink")
        if self.port is None:
            self._on_a_free_port(self._start_superlink)
        else:
            demand_free(self.port)
            self._start_superlink(self.port)
        if self.isolation == "process" and not self.services.runs("superexec"):
            self.services.begin("superexec", command_line.superexec(self.address, self.tls))

    def _start_superlink(self, port: int) -> None:
        address = f"{HOST}:{port}"
        database = self.folder / "state.db" if self.database else None
        self.link.point(address, self.tls)
        command = command_line.superlink(
            address, self.tls, authenticate=self.authenticate, isolation=self.isolation, database=database
        )
        service = self.services.begin("superlink", command, address)
        wait_for(
            f"the SuperLink to serve at {address}",
            lambda: is_healthy(port, self.tls.authority if self.tls else None),
            self.timeout_s,
            [service],
        )
        self.port = port

    def register_supernode(self, partition: int) -> int | None:
        """Tell the SuperLink a SuperNode's key; its node ID, or None where the database knows the key already."""
        assert self.tls is not None, "only with authenticate"
        try:
            return self.link.register(self.tls.public_key(partition), f"supernode-{partition}")
        except FederationError as error:
            if not self.database or "already in use" not in str(error):
                raise
            self._maybe_online.add(partition)
            return None

    def start_supernode(self, partition: int, *, wait: bool = True) -> None:
        """Start a partition's SuperNode, and wait until it is connected (else see ``wait_for_supernode``).

        With ``authenticate`` that takes a minute after ``kill_supernode``: so long the SuperLink refuses the same key.
        """
        if not 0 <= partition < self.clients:
            raise ValueError(f"partition {partition}: there are 0 … {self.clients - 1}")
        self._demand_ready(f"supernode-{partition}")
        until_s = time.monotonic() + SILENT_S
        while True:
            try:
                return self._on_a_free_port(lambda port: self._start_supernode(partition, port, wait))
            except FederationError as error:
                if not self._is_thought_online(partition, error) or time.monotonic() >= until_s:
                    raise
            time.sleep(AGAIN_S)

    def _start_supernode(self, partition: int, port: int, wait: bool) -> None:
        address = f"{HOST}:{port}"
        node_config = f"partition-id={partition} num-partitions={self.clients}"
        key = self.tls.key(partition) if self.authenticate and self.tls else None
        self.node_ids.pop(partition, None)
        command = command_line.supernode(self.address, address, node_config, self.tls, key)
        self.services.begin(f"supernode-{partition}", command, address)
        if wait:
            self.wait_for_supernode(partition)

    def wait_for_supernode(self, partition: int) -> int:
        """Wait until the SuperNode is connected; its node ID."""
        service = self.services[f"supernode-{partition}"]
        wait_for(
            f"{service.name} to connect to {self.address}",
            lambda: _NODE_ID.search(service.output()) is not None,
            self.timeout_s,
            [service],
        )
        found = _NODE_ID.search(service.output())
        assert found is not None
        self._maybe_online.discard(partition)
        self.node_ids[partition] = int(found[1])
        return self.node_ids[partition]

    def kill_superlink(self) -> None:
        """SIGKILL to the SuperLink; without ``isolation = "process"`` also to the server's app, which is its child."""
        self.services["superlink"].kill()

    def kill_supernode(self, partition: int) -> None:
        """SIGKILL to a SuperNode and to the client's app that works for it."""
        self.services[f"supernode-{partition}"].kill()
        self._maybe_online.add(partition)

    def restart_superlink(self) -> None:
        """Start the SuperLink again at the same address, after ending it where it still runs.

        Without ``database`` it knows no run and no node, and the nodes end by themselves.
        """
        self.services.end(["superlink"], self.grace_s)
        self.start_superlink()

    def restart_supernode(self, partition: int) -> None:
        """Start a SuperNode again, after ending it where it still runs."""
        self.services.end([f"supernode-{partition}"], self.grace_s, APPS_GRACE_S)
        self.start_supernode(partition)

    def deaths(self) -> list[str]:
        """A line for each process that ended and was not told to."""
        return self.services.deaths()

    def run(self, app_folder: Path, run_config: Mapping[str, Any] | None = None) -> int:
        """Hand an app's folder to the SuperLink (``flwr run``), with these values in place of the folder's: its run ID.

        Keys of ``run_config`` are dotted, as ``configuration.flatten`` makes them, and stand in the folder's too.
        """
        return self.link.run(app_folder, run_config or {})

    def status(self, run_id: int) -> str:
        """``pending``, ``starting``, ``running``, ``finished:completed``, ``finished:failed``, ``finished:stopped``."""
        return self.link.status(run_id)

    def wait_for_run(self, run_id: int, timeout_s: float, every_s: float = 1.0) -> str:
        """Wait until a run is finished: its status.

        The SuperLink is asked only while no server's app runs, since each question costs a second of CPU time. Raises
        FederationError after ``timeout_s``, and when a process is gone without which the run cannot go on.
        """
        until_s = time.monotonic() + timeout_s
        while not (status := self._how_it_ended(run_id)):
            gone = [name for name in SERVERS if name in self.services and not self.services.runs(name)]
            if not any(map(self.services.runs, self.services.names("supernode-"))):
                gone.append("every SuperNode")
            if gone or time.monotonic() >= until_s:
                why = f"{', '.join(gone)} gone" if gone else f"not over after {timeout_s:g} s"
                raise FederationError(f"run {run_id}: {why}; {self.services.said()}")
            time.sleep(every_s)
        return status

    def _how_it_ended(self, run_id: int) -> str | None:
        if self.services.works_on(SERVERS, "flwr-serverapp"):
            return None
        status = self.status(run_id)
        return status if status.startswith("finished") else None

    def _demand_ready(self, name: str) -> None:
        if not self._home.is_dir():
            raise FederationError(f"{name} cannot be started: {self.folder} is ready only inside `with`")
        self.services.demand_ended(name)

    def _is_thought_online(self, partition: int, error: FederationError) -> bool:
        return self.authenticate and partition in self._maybe_online and "Failed to activate" in str(error)

    def _on_a_free_port(self, start: Callable[[int], None]) -> None:
        """Another port where the chosen one is taken before the process listens."""
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            try:
                return start(free_port())
            except FederationError as error:
                if not attempts_left or not was_taken(error):
                    raise
        return None
