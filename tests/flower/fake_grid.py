"""A grid in this process under a virtual clock: real messages, real clients, durations that the test says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict

from fedasync.flower.client import handle_hello, handle_train
from fedasync.workloads.protocol import Workload

FIRST_NODE = 1000
Ends = Callable[[int, int, int, "int | None"], "float | tuple[float, int]"]
"""(client, its how-many-th task, lease, local steps) → seconds until the reply, or until an error, and its code."""


class VirtualClock:
    """Stands still until it is waited on, then moves to the next thing that happens."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.due: list[float] = []

    def now(self) -> float:
        return self.time_s

    def start(self, elapsed_s: float) -> None:
        self.time_s = elapsed_s

    def wait(self, most_s: float, until_s: float) -> None:
        while self.due and self.due[0] <= self.time_s:
            heappop(self.due)
        next_s = min((time_s for time_s in (until_s, *self.due[:1]) if self.time_s < time_s < inf), default=inf)
        self.time_s = next_s if next_s < inf else self.time_s + most_s


class FakeGrid:
    """Nodes FIRST_NODE + client, each of which answers when ``ends`` says; a node works on one task at a time."""

    def __init__(self, workload: Workload, clock: VirtualClock, ends: Ends) -> None:
        self.workload, self.clock, self.ends = workload, clock, ends
        self.clients = len(workload.client_samples())
        self.online = {FIRST_NODE + client: client for client in range(self.clients)}
        self.tasks = [0] * self.clients
        self.pushed: list[Message] = []
        self.duplicate = False
        """Whether each reply comes twice."""
        self._replies: list[tuple[float, int, Message]] = []
        self._numbers = itertools.count()

    def get_node_ids(self) -> list[int]:
        return list(self.online)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            number = next(self._numbers)
            message.metadata.__dict__["_message_id"] = f"m{number}"
            ids.append(f"m{number}")
            node = message.metadata.dst_node_id
            self.pushed.append(message)
            if node in self.online:
                self._answer(message, number, self.online[node])
        return ids

    def _answer(self, message: Message, number: int, client: int) -> None:
        context = Context(1, message.metadata.dst_node_id, {"partition-id": client}, RecordDict(), {})
        if message.metadata.message_type == MessageType.QUERY:
            self._reply(0.0, number, handle_hello(message, context, self.workload, client=client))
            return
        turn = self.tasks[client]
        self.tasks[client] += 1
        task = message.content["task"]
        found = self.ends(client, turn, task["lease"], task.get("steps"))
        if isinstance(found, tuple):
            self._reply(found[0], number, Message(Error(found[1], "as the test says"), reply_to=message))
        elif found < message.metadata.ttl:
            self._reply(found, number, handle_train(message, context, self.workload, client=client))
        else:  # Flower's own word, when the message has lived its time
            self._reply(message.metadata.ttl, number, Message(Error(3, "too late"), reply_to=message))

    def _reply(self, after_s: float, number: int, message: Message) -> None:
        at_s = self.clock.time_s + after_s
        heappush(self.clock.due, at_s)
        heappush(self._replies, (at_s, number, message))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted, found = set(message_ids), []
        while self._replies and self._replies[0][0] <= self.clock.time_s:
            message = heappop(self._replies)[2]
            if message.metadata.reply_to_message_id in wanted:
                found += [message] * (2 if self.duplicate else 1)
        return found

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the deployment has no use for grid.{name}")
