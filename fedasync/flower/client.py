"""What a client does with a message: read it, work, reply. One function a kind of message, and no state."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from importlib import metadata

from flwr.app import ConfigRecord, Context, Message

from fedasync.aggregation.model import Contribution
from fedasync.flower.messages import error_record, hello_record, read_task, reply_record
from fedasync.workloads.protocol import Workload

PARTITION = "partition-id"
"""Key of a SuperNode's configuration: which client it is."""
NOBODY = -1
"""Stands for a client that does not know its number."""


def handle_train(
    message: Message,
    context: Context,
    workload: Workload,
    *,
    client: int,
    least_work_s: float = 0.0,
    most_steps: int | None = None,
    started_s: float | None = None,
) -> Message:
    """Train the task of ``message`` as ``client``, and reply with what it brings, or with what was raised.

    The reply comes ``least_work_s`` after ``started_s`` or later; a task of q steps out of ``most_steps`` takes that
    share of it. ``started_s`` is of ``time.monotonic()`` (None: now). Measured are ``train_s``, of training alone, and
    ``wall_s``, from ``started_s`` to the reply.
    """
    began_s = time.monotonic() if started_s is None else started_s

    def work() -> Message:
        task, lease_id, version = read_task(message.content)
        if task.client != client:
            raise ValueError(
                f"this node is client {client} and was sent a task of client {task.client}: no two nodes may have the"
                f" same {PARTITION}, and none may change it during a run"
            )
        before_s = time.monotonic()
        contribution = workload.train(task)
        train_s = time.monotonic() - before_s
        if not isinstance(contribution, Contribution):
            raise TypeError(f"train returned {type(contribution).__name__}; a Contribution would do")
        share = task.steps / most_steps if task.steps is not None and most_steps else 1.0
        _wait(began_s + least_work_s * share, client)
        measured = {"train_s": train_s, "wall_s": time.monotonic() - began_s}
        return Message(reply_record(contribution, lease_id, client, version, measured), reply_to=message)

    return answered(message, context, work)


def handle_hello(message: Message, context: Context, workload: Workload, *, client: int) -> Message:
    """Say which client this node is, how many samples it has and what software runs here, or what was raised."""

    def work() -> Message:
        samples = int(workload.client_samples()[client])
        return Message(hello_record(client, samples, _software(), platform.node()), reply_to=message)

    return answered(message, context, work)


def answered(message: Message, context: Context, work: Callable[[], Message]) -> Message:
    """The reply that ``work`` makes, or one that says what it raised: Flower's own error has neither file nor line."""
    try:
        return work()
    except (Exception, SystemExit) as error:  # it goes to the server, which says it
        logging.getLogger(__name__).exception("the client raised; the server is told")
        return Message(error_record(_asked(message, context), error), reply_to=message)


def client_number(context: Context, clients: int | None = None) -> int:
    """Which client this node is, from its node configuration; ``clients`` is how many there are.

    Raises ValueError for one that does not say, or says what cannot be.
    """
    found = context.node_config.get(PARTITION)
    known = "an integer ≥ 0" if clients is None else f"an integer from 0 to {clients - 1}"
    remedy = f'{known} would do (flower-supernode --node-config "{PARTITION}=0")'
    if found is None:
        raise ValueError(f"node configuration: {PARTITION} is missing; {remedy}")
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise ValueError(f"node configuration: {PARTITION}: got {found!r}; {remedy}")
    if clients is not None and found >= clients:
        raise ValueError(f"node configuration: {PARTITION}: got {found}, the workload has {clients} clients; {remedy}")
    return found


def _asked(message: Message, context: Context) -> int:
    """The client that a message is for, else the node's number."""
    task = message.content.get("task")
    client = task.get("client") if isinstance(task, ConfigRecord) else None
    try:
        return client if isinstance(client, int) else client_number(context)
    except ValueError:
        return NOBODY


def _wait(until_s: float, client: int) -> None:
    rest_s = until_s - time.monotonic()
    if rest_s > 0:
        # A warning, since nobody configures logging in a process of Flower's.
        logging.getLogger(__name__).warning("client %d waits %.1f s more, as work_s_by_client says", client, rest_s)
        time.sleep(rest_s)


def _software() -> str:
    """The libraries that a result depends on, looked up without importing them."""
    known = []
    for name in ("fedasync", "torch", "flwr"):
        try:
            known.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            known.append(f"{name} of no known version")
    return ", ".join([f"Python {platform.python_version()}", *known])
