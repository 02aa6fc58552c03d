"""What the controller, its rollout workers and the trainer say to each other: a kind, a JSON header, and bytes.

Nothing is pickled. Answers and groups travel as ``fedasync.rl.trajectory`` packs them. Times are readings of the
sender's ``time.monotonic``; its ``hello`` and every ``pulse`` carry one, so that another machine's can be told apart.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedasync.rl.engine import Finished, Iteration, KvCache, Request
from fedasync.rl.trajectory import Group, packed, packed_trajectories, unpacked, unpacked_trajectories

ChildKind = Literal["worker", "trainer", "remote"]

_LENGTH_BYTES = 4


class Message(NamedTuple):
    """One message; ``header`` holds what JSON keeps (NaN and infinities included)."""

    kind: str
    header: dict[str, Any]
    body: bytes = b""


def encoded_head(message: Message) -> bytes:
    """What goes before the body: the header's length in 4 bytes, little-endian, and the header."""
    head = json.dumps([message.kind, message.header]).encode()
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head


def encoded(message: Message) -> bytes:
    """A message as bytes."""
    return encoded_head(message) + message.body


def decoded(content: bytes) -> Message:
    """The message that ``encoded`` wrote. Raises ValueError for other bytes."""
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        if len(content) < end:
            raise ValueError(f"a header of {end} bytes in {len(content)}")
        kind, header = json.loads(content[_LENGTH_BYTES:end])
    except (ValueError, TypeError) as error:
        raise ValueError(f"these bytes hold no message: {error}") from None
    if not isinstance(kind, str) or not isinstance(header, dict):
        raise ValueError(f"these bytes hold no message: {kind!r}, {header!r}")
    return Message(kind, header, content[end:])


def hello(number: int | None, kind: ChildKind, version: str = "") -> Message:
    """The first message of a link: which child this is, and its clock.

    A ``remote`` worker has no number yet, and tells its fedasync's ``version``.
    """
    told = {"number": number, "kind": kind, "pid": os.getpid(), "clock_s": time.monotonic()}
    return Message("hello", {**told, "version": version} if version else told)


def welcome(number: int, settings: Mapping[str, Any]) -> Message:
    """To a remote worker: its number, and what it is to do (``ChildSettings.for_others``)."""
    return Message("welcome", {"number": number, "settings": settings})


def wait(why: str) -> Message:
    """To a remote worker: there is no place for it now; a ``welcome`` comes when there is one."""
    return Message("wait", {"why": why})


def refused(why: str) -> Message:
    """To a remote worker: it cannot be one."""
    return Message("refused", {"why": why})


def stop() -> Message:
    return Message("stop", {})


def failed(error: BaseException, *, fatal: bool = True, **more: object) -> Message:
    """What went wrong, in one line and in full; ``fatal``: the sender ends, with a status other than 0."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    told = "".join(traceback.format_exception(error))
    return Message("failed", {"what": line, "traceback": told, "fatal": fatal, **more})


def submit(requests: Iterable[Request]) -> Message:
    """Answers that a worker is to generate."""
    return Message("submit", {"requests": [list(request) for request in requests]})


def requests_of(message: Message) -> list[Request]:
    return [Request(*each) for each in message.header["requests"]]


def withdraw(answers: Collection[int]) -> Message:
    """Answers that nobody wants any more."""
    return Message("withdraw", {"answers": sorted(answers)})


def load(version: int, kv: KvCache = "recompute", *, drain: bool = False) -> Message:
    """New weights are in the channel. ``drain``: what runs ends first, and what waits begins after."""
    return Message("load", {"version": version, "kv": kv, "drain": drain})


def finished(answers: Sequence[Finished]) -> Message:
    """Answers that have ended, those with a trajectory and those without."""
    told = [[each.trajectory is not None, *each[:1], *each[2:]] for each in answers]
    kept = [each.trajectory for each in answers if each.trajectory is not None]
    return Message("finished", {"answers": told}, packed_trajectories(kept))


def finished_of(message: Message) -> list[Finished]:
    trajectories = iter(unpacked_trajectories(message.body)[0])
    return [
        Finished(answer, next(trajectories) if has else None, *more) for has, answer, *more in message.header["answers"]
    ]


def iterations(rows: Iterable[Iteration]) -> Message:
    """What decoding steps took."""
    return Message("iterations", {"rows": [list(row) for row in rows]})


def iterations_of(message: Message) -> list[Iteration]:
    return [Iteration(*row) for row in message.header["rows"]]


def train(version: int, groups: Iterable[Group], asks: Iterable[str] = ()) -> Message:
    """Make this version from these groups, and measure ``asks`` of it."""
    return Message("train", {"version": version, "asks": list(asks)}, packed(groups))


def groups_of(message: Message) -> list[Group]:
    return unpacked(message.body)


def publish(version: int) -> Message:
    """Put the weights, which are those of this version, into the channel."""
    return Message("publish", {"version": version})


def evaluate() -> Message:
    return Message("evaluate", {})


def save(folder: str) -> Message:
    return Message("save", {"folder": folder})


def restore(folder: str) -> Message:
    return Message("restore", {"folder": folder})
