"""Which node is which client, who is connected, who is left alone for a while.

A client is known by its number (its partition), a node by the ID that the SuperLink gives it: a node that comes back
under a new ID and says the same number is the same client.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from fedasync.flower.messages import Hello
from fedasync.flower.settings import DeploymentSettings


class Roster:
    """The clients of a deployment. Called as a ``Presence``, it says whether a client may be given work now.

    A client has joined once a node said that it is this client, and is connected while that node is. ``samples`` holds
    what the workload says that each client has.
    """

    def __init__(self, samples: Collection[int], settings: DeploymentSettings) -> None:
        self._samples = list(samples)
        self._settings = settings
        self._node_of: dict[int, int] = {}
        self._connected: set[int] = set()
        self._greeted: set[int] = set()
        self._failures: dict[int, int] = {}
        self._until_s: dict[int, float] = {}
        self._asked_in_vain: dict[int, int] = {}
        self._ask_at_s: dict[int, float] = {}

    @property
    def clients(self) -> int:
        return len(self._samples)

    @property
    def joined(self) -> list[int]:
        """The clients whose nodes are connected."""
        return sorted(client for client, node in self._node_of.items() if node in self._connected)

    def node_of(self, client: int) -> int:
        """The node of a client that has joined."""
        return self._node_of[client]

    def connected(self, nodes: Collection[int], now: float) -> list[int]:
        """These nodes are connected, and no others; those among them that are to be asked now who they are."""
        self._connected = set(nodes)
        self._greeted &= self._connected  # one that left and comes back is asked again
        new = sorted(node for node in self._connected - self._greeted if self._ask_at_s.get(node, -inf) <= now)
        self._greeted.update(new)
        return new

    def ask_again(self, node: int, now: float) -> None:
        """The node did not say who it is: it is asked once more, later with each time in a row."""
        self._greeted.discard(node)
        times = self._asked_in_vain[node] = self._asked_in_vain.get(node, 0) + 1
        self._ask_at_s[node] = now + self._settings.back_off(times)

    def welcome(self, node: int, hello: Hello) -> str | None:
        """A node says who it is; why it may not take part, or None. Whoever was this client before is no more."""
        if not 0 <= hello.client < self.clients:
            return (
                f"node {node} says that it is client {hello.client}; the workload has clients 0 to {self.clients - 1}"
            )
        known = self._samples[hello.client]
        if hello.samples != known:
            return (
                f"node {node}, client {hello.client}, has {hello.samples} training samples, and the server's workload "
                f"gives it {known}: node and server do not have the same data"
            )
        self._node_of = {client: other for client, other in self._node_of.items() if other != node}
        self._node_of[hello.client] = node
        self._asked_in_vain.pop(node, None)
        return None

    def most_samples(self, client: int) -> int:
        """The weight that a client may claim."""
        most = self._settings.most_samples
        return self._samples[client] if most is None else min(most, self._samples[client])

    def succeeded(self, client: int) -> None:
        self._failures.pop(client, None)
        self._until_s.pop(client, None)

    def failed(self, client: int, now: float) -> float:
        """A client's task failed; how long (s) it is left alone: longer with each failure in a row."""
        failures = self._failures[client] = self._failures.get(client, 0) + 1
        pause_s = self._settings.back_off(failures)
        self._until_s[client] = now + pause_s
        return pause_s

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        until_s = self._until_s.get(client, -inf)
        if until_s > now:
            return False, until_s
        if self._node_of.get(client) in self._connected:
            return True, inf
        return False, now + self._settings.poll_s

    def explain(self, now: float) -> str:
        """Who takes part, in one line."""
        joined = self.joined
        away = [client for client in range(self.clients) if client not in set(joined)]
        paused = [f"{client} for {until - now:.0f} s" for client, until in sorted(self._until_s.items()) if until > now]
        parts = [f"{len(joined)} of {self.clients} clients are connected"]
        if away:
            parts.append(f"not: {_some(list(map(str, away)))}")
        if paused:
            parts.append(f"left alone after failures: client {_some(paused)}")
        return "; ".join(parts)


def _some(words: list[str]) -> str:
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
