"""Messages under way between the server and its nodes: what was sent, what is awaited, what came."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from fedasync.core import Lease
from fedasync.flower.failures import one_line
from fedasync.flower.messages import Sent, task_record
from fedasync.workloads.protocol import Task

log = logging.getLogger("fedasync.flower")

TTL_OVER_TIMEOUT = 1.25
UNREADABLE = (ValueError, TypeError, KeyError, DecodeError)
"""What is raised where bytes of a reply are not what they say they are."""
HELLO_TTL_S = 120.0
"""Seconds that a node has to say who it is."""

FAILURES = {
    0: "unknown error",
    1: "client app not loadable",
    2: "client error",
    3: "no reply in time",
    4: "reply lost",
    5: "node unavailable",
    6: "refused by a client mod",
    7: "invalid app bundle",
    8: "client crashed",
}
"""Flower's error codes, in words."""


@dataclass(frozen=True)
class Came:
    """A message that came back: for a task, or (``sent`` is None) from a node that was asked who it is."""

    message: Message
    node_id: int
    sent: Sent | None


@dataclass
class _Outgoing:
    lease: Lease
    most_samples: int
    task: Task


class Mailbox:
    """Tasks leave together, when ``send`` is called: after what they follow from is on the disk."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._out: list[_Outgoing] = []
        self._awaited: dict[str, Sent] = {}
        self._asked: dict[str, int] = {}
        self._of_lease: dict[int, str] = {}

    @property
    def under_way(self) -> list[Sent]:
        """Tasks whose replies may come."""
        return list(self._awaited.values())

    def nodes(self) -> list[int]:
        """The nodes that the SuperLink takes for connected."""
        return sorted(self._grid.get_node_ids())

    def ask(self, nodes: Sequence[int]) -> list[int]:
        """Ask nodes who they are; those whose question the SuperLink would not take."""
        messages = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY, ttl=HELLO_TTL_S) for node in nodes
        ]
        refused = []
        for node, message_id in zip_longest(nodes, self._pushed(messages)):
            if message_id:
                self._asked[message_id] = node
            else:
                refused.append(node)
        return refused

    def put(self, lease: Lease, task: Task, most_samples: int) -> None:
        """Send this task with the next ``send``."""
        self._out.append(_Outgoing(lease, most_samples, task))

    def withdraw(self, lease_id: int) -> bool:
        """Do not send this lease's task; False when it is under way already."""
        left = [each for each in self._out if each.lease.id != lease_id]
        found, self._out = len(left) < len(self._out), left
        return found

    def send(self, now: float, node_of: Callable[[int], int]) -> list[Sent]:
        """Send what was put, to the nodes that the clients are by now; the tasks that the SuperLink would not take.

        A message lives a little longer than its lease, so that a reply that is somewhat late is still counted.
        """
        if not self._out:
            return []
        out, self._out = self._out, []
        messages = [
            Message(
                task_record(each.task, each.lease),
                dst_node_id=node_of(each.lease.worker),
                message_type=MessageType.TRAIN,
                ttl=_ttl_s(each.lease),
                group_id=str(each.lease.base_version),
            )
            for each in out
        ]
        ids = list(self._pushed(messages))
        refused = []
        for place, each in enumerate(out):
            message_id = ids[place] if place < len(ids) else None
            model = each.task.model
            sent = Sent(
                each.lease,
                messages[place].metadata.dst_node_id,
                message_id or "",
                now,
                model.layout,
                model.values.dtype,
                each.most_samples,
                sum(array.nbytes for array in (model.values, model.integers, each.task.control) if array is not None),
            )
            if message_id:
                self._awaited[message_id] = sent
                self._of_lease[each.lease.id] = message_id
            else:
                refused.append(sent)
        return refused

    def _pushed(self, messages: list[Message]) -> Iterable[str | None]:
        return self._grid.push_messages(messages) if messages else []

    def take(self) -> list[Came]:
        """What has come: answers of nodes first, then replies in the order in which their leases were given out.

        Flower reads a reply's records in this process. One that cannot be read is lost, and Flower does not say whose
        it was: its lease ends at its deadline.
        """
        ids = [*self._awaited, *self._asked]
        if not ids:
            return []
        came: list[Came] = []
        try:
            messages = list(self._grid.pull_messages(ids))
        except UNREADABLE as error:
            log.warning("a reply could not be read, and is lost: %s: %s", type(error).__name__, one_line(str(error)))
            return []
        for message in messages:
            of = message.metadata.reply_to_message_id
            if of in self._asked:
                came.append(Came(message, self._asked.pop(of), None))
            elif (sent := self._awaited.pop(of, None)) is not None:
                self._of_lease.pop(sent.lease.id, None)
                came.append(Came(message, sent.node_id, sent))
        return sorted(came, key=lambda each: -1 if each.sent is None else each.sent.lease.id)

    def drop(self, lease_id: int) -> Sent | None:
        """Await this task's reply no longer."""
        message_id = self._of_lease.pop(lease_id, None)
        return None if message_id is None else self._awaited.pop(message_id)


def _ttl_s(lease: Lease) -> float:
    assert lease.deadline_s is not None  # every lease of a deployment has one
    return TTL_OVER_TIMEOUT * (lease.deadline_s - lease.admitted_s)
