"""The server's link, shared by all transfers under way, and the leases that wait for it.

The model is a fluid (ours): the n transfers under way get an n-th of the link's rate each, whatever their clients' own
rates are, and a transfer ends when its bytes are through *and* as much time has passed as its client's own link needs.
What a slow client leaves unused is not given to others. So n equal transfers that begin together take n·bytes/R (or
what the slowest client's own link needs, if that is longer), and one alone takes bytes/min(R, own).

All transfers on a link advance in step. The link therefore keeps one clock of bytes: a transfer ends when the clock has
gone on by its size, the next end is the head of a heap, and whoever joins or leaves moves one event, not n.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Any, Literal, NamedTuple

from fedasync.simulation.ends import Ends
from fedasync.simulation.population import Clients, Fate


class SharedLink:
    """Transfers that share ``rate`` bytes a second equally. Times that are passed must not go back."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.due_s = inf
        """When the next transfer will be through if nobody joins or leaves; infinite when none is under way."""
        self.armed_s = inf
        """When somebody will look."""
        self._clock = 0.0
        self._at_s = 0.0
        self._through: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._through)

    def join(self, transfer: int, size: float, now: float) -> None:
        """A transfer of ``size`` bytes begins."""
        self._advance(now)
        self._through[transfer] = self._clock + size
        heappush(self._heap, (self._clock + size, transfer))
        self._plan()

    def leave(self, transfer: int, now: float) -> float:
        """A transfer stops; the bytes that it has left."""
        self._advance(now)
        left = self._through.pop(transfer) - self._clock
        self._plan()
        return max(0.0, left)

    def pop_due(self, now: float) -> list[int]:
        """The transfers that are through by now, in the order of their ends, then of their numbers."""
        done = []
        while self.due_s <= now:
            self._clock, self._at_s = self._heap[0][0], self.due_s
            while self._heap and self._heap[0][0] <= self._clock:
                through, transfer = heappop(self._heap)
                if self._through.get(transfer) == through:
                    del self._through[transfer]
                    done.append(transfer)
            self._plan()
        return done

    def _advance(self, now: float) -> None:
        if self._through:
            self._clock += (now - self._at_s) * self.rate / len(self._through)
        else:
            self._clock = 0.0  # a small number keeps its digits
            self._heap.clear()
        self._at_s = now

    def _plan(self) -> None:
        heap, through = self._heap, self._through
        while heap and through.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        self.due_s = inf
        if heap:
            self.due_s = max(self._at_s, self._at_s + (heap[0][0] - self._clock) * len(through) / self.rate)


class Moment(NamedTuple):
    """A time at which something happens to a lease that is not its end, or to the links (``lease`` −1)."""

    lease: int
    epoch: int = 0


class _Phase(NamedTuple):
    """A part of a lease: bytes over a link, which take ``own_s`` at least, or a plain delay of ``own_s`` (no link)."""

    link: SharedLink | None
    size: float
    own_s: float


class _Under:
    """A lease on its way through its phases."""

    __slots__ = (
        "client",
        "doing",
        "end_s",
        "epoch",
        "failure",
        "link",
        "on_link",
        "own_s",
        "phases",
        "refused",
        "size",
    )

    def __init__(self, client: int, phases: list[_Phase], failure: str | None) -> None:
        self.client = client
        self.phases = phases
        self.failure = failure
        self.link: SharedLink | None = None
        self.size = self.own_s = self.end_s = 0.0
        self.epoch = 0
        self.doing: Literal["working", "transferring", "away"] = "working"
        self.on_link = self.refused = False


class Transfers:
    """The leases of a run whose transfers share the server's links, from dispatch to end.

    Ends of leases go into ``ends`` when they are known. So do moments, with number −1: at one instant they come before
    all ends, so that leases whose transfers end then stand in the order of dispatch among the others.
    """

    def __init__(self, clients: Clients, ends: Ends[Any], lost: set[int]) -> None:
        population = clients.population
        down, up = population.server_downlink_bytes_per_second, population.server_uplink_bytes_per_second
        self._down = None if down is None else SharedLink(down)
        self._up = None if up is None else SharedLink(up)
        self._links = [link for link in (self._down, self._up) if link is not None]
        self._clients = clients
        self._loses = population.when_offline == "lose"
        self._ends = ends
        self._lost = lost
        self._leases: dict[int, _Under] = {}
        self._moments = 0

    def start(self, lease_id: int, client: int, turn: int, now: float, share: float = 1.0) -> float:
        """Follow a lease; when it would end if nobody shared the links, infinite if it will bring nothing.

        ``share`` is how much of the full local work it computes.
        """
        clients = self._clients
        failure, part = clients.loss(client, turn)
        compute_s, alone_s = clients.lease_s(client, turn, lease_id, share), clients.alone_s(client)
        lease = _Under(client, self._phases(client, compute_s, part), failure)
        self._leases[lease_id] = lease
        self._next_phase(lease_id, lease, now)
        self._arm(now)
        return inf if failure else now + compute_s + alone_s

    def at(self, moment: Moment, now: float) -> None:
        """What was planned for this time happens, after all transfers that are through by now."""
        for link in self._links:
            if link.armed_s <= now:
                link.armed_s = inf
            for lease_id in link.pop_due(now):
                self._is_through(lease_id, now)
        lease = self._leases.get(moment.lease)
        if lease is not None and lease.epoch == moment.epoch:
            if lease.doing == "away":
                self._go_on(moment.lease, lease, now)
            elif lease.doing == "working" and lease.end_s <= now:
                self._next_phase(moment.lease, lease, now)
            else:
                self._goes_offline(moment.lease, lease, now)
        self._arm(now)

    def drop(self, lease_id: int, now: float) -> bool:
        """The lease was cancelled, and its client stops at once: False when it is not under way here any more."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self._leave(lease_id, lease, now)
        self._arm(now)
        return True

    def refuse(self, lease_id: int, now: float) -> bool:
        """The lease timed out, and the server transfers nothing for it any more.

        True when that ends the lease: it was in a transfer. A client that computes goes on, and is refused then.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.refused = True
        return lease.link is not None and self.drop(lease_id, now)

    def _phases(self, client: int, compute_s: float, part: float) -> list[_Phase]:
        """The parts of a lease, the last one first, cut where a lost one is given up.

        What counts as a part of its work is its time with the links to itself.
        """
        clients = self._clients
        size = float(clients.model_bytes or 0)
        down_s, up_s = (0.0, 0.0) if clients.transfers_s is None else (own_s[client] for own_s in clients.transfers_s)
        whole = [_Phase(self._down, size, down_s), _Phase(None, 0.0, compute_s), _Phase(self._up, size, up_s)]
        if part == 1:
            return whole[::-1]
        alone = [max(own_s, 0.0 if link is None else size / link.rate) for link, size, own_s in whole]
        left_s = part * sum(alone)
        found = []
        for (link, size, own_s), alone_s in zip(whole, alone, strict=True):
            if left_s <= 0:
                break
            share = min(1.0, left_s / alone_s) if alone_s else 1.0
            found.append(_Phase(link, size * share, own_s * share))
            left_s -= alone_s
        return found[::-1]

    def _next_phase(self, lease_id: int, lease: _Under, now: float) -> None:
        if not lease.phases or (lease.refused and lease.phases[-1].link is not None):
            failure = lease.failure
            self._end(lease_id, lease, now, None if failure is None else Fate(now, failure, failure == "crash"))
            return
        lease.link, lease.size, lease.own_s = lease.phases.pop()
        self._go_on(lease_id, lease, now)

    def _go_on(self, lease_id: int, lease: _Under, now: float) -> None:
        """Work or transfer from now on, or wait for the client to be back."""
        presence = self._clients.presence
        online, until = (True, inf) if presence is None else presence(lease.client, now)
        lease.epoch += 1
        if not online:
            lease.doing = "away"
            if until < inf:
                self._moment(until, lease_id, lease.epoch)
            else:
                del self._leases[lease_id]
                self._lost.add(lease_id)
            return
        lease.end_s = now + lease.own_s
        if lease.link is None:
            lease.doing = "working"
            self._moment(min(lease.end_s, until), lease_id, lease.epoch)
            return
        lease.doing, lease.on_link = "transferring", True
        lease.link.join(lease_id, lease.size, now)
        if until < inf:
            self._moment(until, lease_id, lease.epoch)

    def _is_through(self, lease_id: int, now: float) -> None:
        """The shared link has moved its bytes; the client's own link may need longer."""
        lease = self._leases[lease_id]
        lease.on_link = False
        lease.link = None
        if lease.end_s <= now:
            self._next_phase(lease_id, lease, now)
        else:
            lease.own_s = lease.end_s - now
            self._go_on(lease_id, lease, now)

    def _goes_offline(self, lease_id: int, lease: _Under, now: float) -> None:
        self._leave(lease_id, lease, now)
        lease.own_s = max(0.0, lease.end_s - now)
        if self._loses:
            self._end(lease_id, lease, now, Fate(now, "offline"))
        else:
            self._go_on(lease_id, lease, now)

    def _leave(self, lease_id: int, lease: _Under, now: float) -> None:
        if lease.on_link and lease.link is not None:
            lease.size = lease.link.leave(lease_id, now)
            lease.on_link = False

    def _end(self, lease_id: int, lease: _Under, now: float, fate: Fate | None) -> None:
        del self._leases[lease_id]
        self._ends.add((now, lease_id, lease.client, fate))

    def _arm(self, now: float) -> None:
        """Have somebody look when the next transfer is through."""
        for link in self._links:
            if link.due_s < link.armed_s:
                link.armed_s = link.due_s
                self._moment(max(now, link.due_s), -1, 0)

    def _moment(self, at_s: float, lease_id: int, epoch: int) -> None:
        self._moments += 1
        self._ends.add((at_s, -1, self._moments, Moment(lease_id, epoch)))
