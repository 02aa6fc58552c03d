"""How a published version reaches the rollout servers: all at once, one by one, or each by itself (`publishing_each`).

It interrupts what runs, or comes after it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedasync.core.publication import InFlight
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.publishing_each import Each
from fedasync.simulation.cluster.rollouts import Rollouts
from fedasync.simulation.cluster.server import RolloutServer

if TYPE_CHECKING:
    from fedasync.simulation.cluster.mishaps import Mishaps

Clock = Callable[[], float]
Later = Callable[[float, Callable[[], None]], None]
"""Call something after so many seconds."""


class AllAtOnce:
    """All servers stop, load and go on together; until then nothing is asked for, and the trainer waits.

    ``interrupt`` stops sequences where they are; ``drain`` first lets them end. A server that is down loads when it is
    back.
    """

    holds_up = True
    """Trainer and admission wait for the end of it."""

    def __init__(
        self, cluster: Cluster, rollouts: Rollouts, now: Clock, later: Later, mishaps: Mishaps, done: Callable[[], None]
    ) -> None:
        self._cluster, self._rollouts = cluster, rollouts
        self._now, self._later, self._mishaps, self._done = now, later, mishaps, done
        self.under_way = False
        self.draining = False
        self._version = 0
        self._attempt = 0

    def begin(self, version: int, in_flight: InFlight) -> None:
        """Bring a version to the servers; ``done`` is called at the end."""
        self.under_way, self._version, self._attempt = True, version, 0
        # On a colocated cluster training has stopped what runs: there is nothing left to wait for.
        self._interrupts = in_flight != "continue" or self._cluster.colocated
        self._after(self._mishaps.poll_s(version, 0), self._stop)

    def explain(self) -> str:
        running = self._rollouts.running
        if self.draining:
            return f"weights of version {self._version} wait for {running} running answers to end"
        return f"weights of version {self._version} are on their way to the servers"

    def look(self) -> None:
        """Something has ended: perhaps the last that runs."""
        if self.draining and not self._rollouts.running:
            self.draining = False
            self._transfer()

    def _stop(self) -> None:
        servers = self._rollouts.servers
        if self._interrupts:
            self._rollouts.pause(servers, self._now())
            self._transfer()
            return
        self._rollouts.close(servers)
        self.draining = True
        self.look()

    def _transfer(self) -> None:
        rollouts = self._rollouts
        rollouts.pause(rollouts.servers, self._now())
        fails = self._mishaps.sync_fails(self._version, 0, self._attempt)
        seconds = self._mishaps.sync_s(self._version) if not fails else self._mishaps.failed_sync_s(self._version)
        self._after(seconds, self._failed if fails else self._loaded)

    def _failed(self) -> None:
        self._attempt += 1
        if self._mishaps.tries_again(self._version, self._attempt, self._now()):
            self._later(self._mishaps.retry_s, self._transfer)  # as an event, however soon: there may be thousands
        else:
            self._end(None)  # the servers go on with what they have

    def _loaded(self) -> None:
        self._end(self._version)

    def _end(self, version: int | None) -> None:
        recompute = self._cluster.colocated or (version is not None and self._cluster.weights.kv == "recompute")
        self._rollouts.reopen(self._rollouts.servers, self._now(), version, recompute=recompute)
        self._rollouts.forget(self._version)
        self.under_way = False
        self._done()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        if seconds > 0:
            self._later(seconds, call)
        else:
            call()


class OneByOne:
    """Servers load in turn while the others generate; neither trainer nor admission waits.

    A version that is published meanwhile is what the next server loads.
    """

    holds_up = False

    def __init__(
        self, cluster: Cluster, rollouts: Rollouts, now: Clock, later: Later, mishaps: Mishaps, done: Callable[[], None]
    ) -> None:
        self._cluster, self._rollouts = cluster, rollouts
        self._now, self._later, self._mishaps, self._done = now, later, mishaps, done
        self.under_way = False
        self._version = 0
        self._loading: RolloutServer | None = None
        self._published_s = 0.0
        self._next = 0
        self._left = 0
        self._turn = 0
        """Counts servers that were stepped on from: what was to happen to one that died happens no more."""
        self._attempt = 0
        self._carried = 0
        """What is being loaded: a newer version may be published meanwhile."""

    @property
    def draining(self) -> bool:
        return self._loading is not None and self._loading.closed and not self._loading.paused

    def begin(self, version: int, in_flight: InFlight) -> None:
        self._version, self._interrupts = version, in_flight != "continue"
        self._published_s = self._now()
        self._left = len(self._rollouts.servers) + self.under_way  # one that loads an older version has another turn
        if not self.under_way:
            self.under_way = True
            self._go_on()
        self._done()

    def explain(self) -> str:
        return f"servers load version {self._version} one by one, {self._left} to go"

    def look(self) -> None:
        if self.draining and self._loading is not None and not (self._loading.ends or self._loading.evicted):
            self._transfer()

    def _go_on(self) -> None:
        servers = self._rollouts.servers
        while self._left:
            server = servers[self._next]
            if server.is_up and server.version < self._version:
                self._loading, self._attempt = server, 0
                knows_s = self._published_s + self._mishaps.poll_s(self._version, 1 + server.number)
                self._after(max(0.0, knows_s - self._now()), self._stop)
                return
            self._next = (self._next + 1) % len(servers)
            self._left -= 1
        self.under_way, self._loading = False, None

    def _stop(self) -> None:
        server = self._at_work()
        if server is None:
            return
        if self._interrupts:
            self._transfer()
        else:
            self._rollouts.close([server])
            self.look()

    def _transfer(self) -> None:
        server = self._at_work()
        if server is None:
            return
        self._rollouts.pause([server], self._now())
        self._carried = self._version
        fails = self._mishaps.sync_fails(self._carried, 1 + server.number, self._attempt)
        seconds = self._mishaps.sync_s(self._carried) if not fails else self._mishaps.failed_sync_s(self._carried)
        self._after(seconds, self._failed if fails else self._loaded)

    def _failed(self) -> None:
        self._attempt += 1
        if self._mishaps.tries_again(self._version, self._attempt, self._now()):
            self._after(self._mishaps.retry_s, self._transfer)
        else:
            self._end(None)

    def _loaded(self) -> None:
        self._end(self._carried)

    def _end(self, version: int | None) -> None:
        server = self._at_work()
        if server is None:
            return
        recompute = version is not None and self._cluster.weights.kv == "recompute"
        self._rollouts.reopen([server], self._now(), version, recompute=recompute)
        self._rollouts.forget(self._version)
        self._step_on()

    def _at_work(self) -> RolloutServer | None:
        """The server that loads; None, and on to the next, when it has died meanwhile."""
        if self._loading is not None and self._loading.is_up:
            return self._loading
        self._step_on()
        return None

    def _step_on(self) -> None:
        self._loading = None
        self._turn += 1
        self._next = (self._next + 1) % len(self._rollouts.servers)
        self._left -= 1
        self._go_on()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        turn = self._turn
        self._later(seconds, lambda: call() if turn == self._turn else None)


Publishing = AllAtOnce | OneByOne | Each
PUBLISHING: dict[str, type[Publishing]] = {"all_at_once": AllAtOnce, "one_by_one": OneByOne, "each": Each}
"""By the ``order`` of [cluster.weights]."""
