"""A published version reaches each rollout server by itself: none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.core.publication import InFlight
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.rollouts import Rollouts
from fedasync.simulation.cluster.server import RolloutServer

if TYPE_CHECKING:
    from fedasync.simulation.cluster.mishaps import Mishaps


@dataclass(slots=True)
class _Load:
    """What a server is at: it does not know of the version yet, it drains, or it loads ``version``."""

    server: RolloutServer
    version: int | None = None
    """None: it has not begun to load."""
    attempt: int = 0


class Each:
    """Every server stops, loads and goes on by itself; neither trainer nor admission waits, once weights are written.

    Of versions that are published while a server drains, the newest is what it loads; while it loads one, another
    follows.
    """

    holds_up = False

    def __init__(
        self,
        cluster: Cluster,
        rollouts: Rollouts,
        now: Callable[[], float],
        later: Callable[[float, Callable[[], None]], None],
        mishaps: Mishaps,
        done: Callable[[], None],
    ) -> None:
        self._cluster, self._rollouts = cluster, rollouts
        self._now, self._later, self._mishaps, self._done = now, later, mishaps, done
        self._version = 0
        self._interrupts = True
        self._loads: dict[int, _Load] = {}

    @property
    def under_way(self) -> bool:
        return bool(self._loads)

    @property
    def draining(self) -> bool:
        return any(load.server.closed and not load.server.paused for load in self._loads.values())

    def begin(self, version: int, in_flight: InFlight) -> None:
        self._version, self._interrupts = version, in_flight != "continue"
        for server in self._rollouts.servers:
            if server.is_up and server.number not in self._loads:
                self._ask(server)
        self._done()

    def explain(self) -> str:
        return f"servers load version {self._version}, {len(self._loads)} to go"

    def look(self) -> None:
        """Something has ended: perhaps the last that ran on a server."""
        for load in list(self._loads.values()):
            server = load.server
            if server.closed and not server.paused and not (server.ends or server.evicted):
                self._transfer(load)

    def _ask(self, server: RolloutServer) -> None:
        load = self._loads[server.number] = _Load(server)
        self._after(self._mishaps.poll_s(self._version, 1 + server.number), load, self._stop)

    def _stop(self, load: _Load) -> None:
        if self._interrupts:
            self._transfer(load)
        else:
            self._rollouts.close([load.server])
            self.look()

    def _transfer(self, load: _Load) -> None:
        if not load.server.is_up:
            self._forget(load)
            return
        self._rollouts.pause([load.server], self._now())
        load.version = self._version
        fails = self._mishaps.sync_fails(load.version, 1 + load.server.number, load.attempt)
        seconds = self._mishaps.failed_sync_s(load.version) if fails else self._mishaps.sync_s(load.version)
        self._after(seconds, load, self._failed if fails else self._loaded)

    def _failed(self, load: _Load) -> None:
        load.attempt += 1
        assert load.version is not None
        if self._mishaps.tries_again(load.version, load.attempt, self._now()):
            self._after(self._mishaps.retry_s, load, self._transfer)
        else:
            self._end(load, None)

    def _loaded(self, load: _Load) -> None:
        self._end(load, load.version)

    def _end(self, load: _Load, version: int | None) -> None:
        self._forget(load)
        recompute = version is not None and self._cluster.weights.kv == "recompute"
        self._rollouts.reopen([load.server], self._now(), version, recompute=recompute)
        on_their_way = (load.version for load in self._loads.values() if load.version is not None)
        self._rollouts.forget(self._version, *on_their_way)
        if load.version is not None and load.version < self._version:
            self._ask(load.server)

    def _forget(self, load: _Load) -> None:
        del self._loads[load.server.number]

    def _after(self, seconds: float, load: _Load, call: Callable[[_Load], None]) -> None:
        def ring() -> None:
            if self._loads.get(load.server.number) is not load:
                return
            if load.server.is_up:
                call(load)
            else:
                self._forget(load)

        if seconds > 0:
            self._later(seconds, ring)
        else:
            ring()
