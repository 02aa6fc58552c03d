"""Connections that carry messages, of which neither end ever waits for the other.

``multiprocessing.connection`` gives the mutual proof of the key and the waiting for many; nothing is pickled. What goes
over TCP is not encrypted: the key keeps strangers out, not who listens to the traffic, or relays it.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Final, Literal

from fedasync.trainer.addresses import connected, is_local, kept_alive, listening, unlisten
from fedasync.trainer.messages import Message, decoded, encoded_head

HANDSHAKE_S = 10.0
"""A peer that proves the key later is none."""
PROVING = 64
"""How many may be about to prove the key to a listener at the same time; who comes beyond them is hung up on."""
CHUNK_BYTES, CHUNKS = 1 << 20, 32
"""What is read at a time, and how often before others have their turn."""
AGAIN_S = 0.05

LISTENS, CONNECTS = b"listens", b"connects"
"""Each end proves the key of its own role, so that no end's proof is good for another of its kind."""

_LENGTH = struct.Struct("<Q")


class End(Enum):
    """What is received after the last message."""

    EOF = "eof"


EOF: Final = End.EOF

Received = Message | Literal[End.EOF]


class LinkError(RuntimeError):
    """No connection came about; the message is one line."""


class WrongKeyError(LinkError):
    """The two ends have different keys."""


class Link:
    """One connection. ``send`` queues for a thread of its own; ``poll`` receives. Made by ``connect`` and listeners."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket = connection
        self.name = name
        self.local = is_local(connection)
        """The peer is on this machine, so that its monotonic clock is ours."""
        self.ended = False
        """EOF was received."""
        self._got = bytearray()
        self._queue: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._peer_gone = False
        self._sender = threading.Thread(target=self._send_queued, name=f"sender to {name}", daemon=True)
        self._sender.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def queued_bytes(self) -> int:
        """What a slow peer has not taken yet."""
        return self._queued_bytes

    def send(self, message: Message) -> None:
        """Send as soon as the peer takes it. Does nothing once the peer has gone: EOF tells."""
        head = encoded_head(message)
        parts = (_LENGTH.pack(len(head) + len(message.body)) + head, message.body)
        with self._lock:
            self._queued_bytes += sum(map(len, parts))
        self._queue.put(parts)

    def close(self, flush_s: float = 2.0) -> None:
        """Close, once everything is sent, or after ``flush_s``."""
        self._queue.put(None)
        self._sender.join(flush_s)
        with suppress(OSError):  # the peer may have gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._sender.join()
        self._socket.close()

    def received(self) -> list[Received]:
        """The messages that are there in full, and EOF after the last; never waits."""
        if self.ended:
            return []
        for _ in range(CHUNKS):
            try:
                chunk = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.ended = True
                break
            self._got += chunk
        messages: list[Received] = [*self._complete()]
        return [*messages, EOF] if self.ended else messages

    def _complete(self) -> list[Message]:
        found, at = [], 0
        while len(self._got) >= at + _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(self._got, at)[0]
            if len(self._got) < end:
                break
            found.append(decoded(bytes(memoryview(self._got)[at + _LENGTH.size : end])))
            at = end
        del self._got[:at]
        return found

    def _send_queued(self) -> None:
        while (parts := self._queue.get()) is not None:
            if not self._peer_gone:
                try:
                    for part in parts:
                        self._socket.sendall(part)
                except OSError:
                    self._peer_gone = True  # what it sent before may still be read
            with self._lock:
                self._queued_bytes -= sum(map(len, parts))


def poll(links: Collection[Link], timeout_s: float | None) -> list[tuple[Link, Received]]:
    """What these links brought, each one's in order, EOF last and once; [] after ``timeout_s``.

    0: looks only; None: waits for ever. Raises ValueError where nothing could ever come.
    """
    return _poll(links, None, timeout_s)


def _poll(links: Collection[Link], woken: socket.socket | None, timeout_s: float | None) -> list[tuple[Link, Received]]:
    alive = [link for link in links if not link.ended]
    if not alive and woken is None and timeout_s is None:
        raise ValueError("poll without an end, and no link that could bring anything")
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        waited: list[Any] = [*alive, *([woken] if woken else [])]
        ready: list[Any] = wait(waited, None if until_s is None else max(0.0, until_s - time.monotonic()))
        found = [(link, each) for link in alive if link in ready for each in link.received()]
        if found or (woken and woken in ready) or (until_s is not None and time.monotonic() >= until_s):
            return found


class Listener:
    """Where peers connect: at ``unix`` (this machine only), or ``host:port`` (port 0: a free one).

    ``address`` is what peers are told, beside ``authkey``. Peers are let in by a thread; nobody who does not know the
    key is ever seen, and ``turned_away`` is called with the address of who has another (in that thread). Ends with its
    ``with`` block.
    """

    def __init__(
        self,
        address: str = "unix",
        authkey: bytes | None = None,
        turned_away: Callable[[str], object] = lambda peer: None,
    ) -> None:
        self._turned_away = turned_away
        self.authkey = authkey if authkey is not None else secrets.token_bytes(32)
        self._socket, self.address = listening(address)
        self._links: list[Link] = []
        self._new: deque[Link] = deque()
        self._woken, self._wake = socket.socketpair()
        self._closed = False
        self._room = threading.Semaphore(PROVING)
        threading.Thread(target=self._accept, name=f"listener at {self.address}", daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def links(self) -> list[Link]:
        """Those that have not ended."""
        self._take_new()
        return list(self._links)

    def poll(self, timeout_s: float | None) -> list[tuple[Link, Received]]:
        """``poll`` over all links, those of new peers too; after its EOF a link is closed and forgotten."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._take_new()
            found = _poll(self._links, self._woken, None if until_s is None else max(0.0, until_s - time.monotonic()))
            for link in [link for link, received in found if received is EOF]:
                self._links.remove(link)
                link.close(0.0)
            if found or (until_s is not None and time.monotonic() >= until_s):
                return found

    def drop(self, link: Link) -> None:
        """Close a link, of which nothing more is heard; nothing where it has ended."""
        if link in self._links:
            self._links.remove(link)
            link.close(0.0)

    def close(self) -> None:
        """Close all links (see ``Link.close``), and let nobody in any more."""
        if self._closed:
            return
        self._closed = True
        unlisten(self._socket, self.address)
        for link in self.links:
            link.close()
        self._links.clear()
        self._woken.close()
        self._wake.close()

    def _take_new(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096, socket.MSG_DONTWAIT):
                pass
        while self._new:
            self._links.append(self._new.popleft())

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._socket.accept()
            except OSError:  # closed; or who came has gone already, or there are too many files
                time.sleep(AGAIN_S)
                continue
            self._meet(connection, f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else self.address)

    def _meet(self, connection: socket.socket, name: str) -> None:
        """Somebody has connected, and proves the key in a thread of its own."""
        if not self._room.acquire(blocking=False):
            connection.close()
            return
        try:
            kept_alive(connection)
            threading.Thread(target=self._let_in, args=(connection, name), daemon=True).start()
        except (OSError, RuntimeError):  # it has gone already, or no thread can be started
            connection.close()
            self._room.release()

    def _let_in(self, connection: socket.socket, name: str) -> None:
        try:
            _prove(connection, self.authkey, HANDSHAKE_S, LISTENS)
            link = Link(connection, name)
        except RuntimeError as error:  # a LinkError, or no thread can be started
            connection.close()
            if isinstance(error, WrongKeyError):
                self._turned_away(name)
            return
        finally:
            self._room.release()
        self._new.append(link)
        if self._closed:  # perhaps before it could be found among the new ones
            link.close(0.0)
        with suppress(OSError):  # the listener was closed meanwhile
            self._wake.send(b"\0")


def connect(address: str, authkey: bytes, timeout_s: float = 30.0, again_s: float = AGAIN_S) -> Link:
    """A link to the listener at ``address``, which may come up only later: tried every ``again_s``.

    Raises LinkError, and as such WrongKeyError.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            connection = connected(address, max(0.1, until_s - time.monotonic()))
        except OSError as error:
            if time.monotonic() + again_s > until_s:
                raise LinkError(f"nobody listens at {address}: {error}") from None
            time.sleep(again_s)
            continue
        try:
            _prove(connection, authkey, min(HANDSHAKE_S, max(0.1, until_s - time.monotonic())), CONNECTS)
        except LinkError as error:
            connection.close()
            raise type(error)(f"{address}: {error}") from None
        return Link(connection, address)


def _prove(connection: socket.socket, authkey: bytes, limit_s: float, role: bytes) -> None:
    """Both ends prove that they know the key, the one that connects first. Raises LinkError; after ``limit_s`` too."""
    mine, its = _of_role(authkey, role), _of_role(authkey, CONNECTS if role == LISTENS else LISTENS)
    try:
        with _ended_after(connection, limit_s), Connection(socket.dup(connection.fileno())) as proving:
            if role == CONNECTS:
                answer_challenge(proving, mine)
                deliver_challenge(proving, its)
            else:
                deliver_challenge(proving, its)
                answer_challenge(proving, mine)
    except AuthenticationError:
        raise WrongKeyError("the two ends have different keys") from None
    except (OSError, EOFError, AssertionError, ValueError) as error:
        raise LinkError(f"the other end did not prove that it knows the key: {error!r}") from None


def _of_role(key: bytes, role: bytes) -> bytes:
    return hmac.digest(key, role, "sha256")


@contextmanager
def _ended_after(connection: socket.socket, limit_s: float) -> Iterator[None]:
    """Nothing can be read or written any more once the block has taken so long, however much came meanwhile."""

    def end() -> None:
        with suppress(OSError):  # the peer may have gone
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
