"""Links: in order, whole, never waited for; nobody without the key; the end is told once."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from fedasync.trainer import link as links
from fedasync.trainer.addresses import connected, free_port, host_and_port, kept_alive, listening
from fedasync.trainer.link import EOF, Link, LinkError, Listener, Received, WrongKeyError, connect, poll
from fedasync.trainer.messages import Message

PATIENCE_S = 60.0
BIG = os.urandom(3 << 20)
"""More than any socket holds."""


@pytest.fixture(params=["unix", "127.0.0.1:0"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    with Listener(request.param) as made:
        yield made


def first(listener: Listener) -> tuple[Link, Received]:
    found = listener.poll(PATIENCE_S)
    assert len(found) == 1
    return found[0]


def pair(listener: Listener) -> tuple[Link, Link]:
    """The listener's end of a new link, and the other."""
    far = connect(listener.address, listener.authkey)
    far.send(Message("hello", {}))
    near, _ = first(listener)
    return near, far


def test_messages_of_any_size_arrive_in_order(listener: Listener) -> None:
    near, far = pair(listener)
    sent = [Message("m", {"n": n}, BIG if n % 3 == 1 else b"x" * n) for n in range(10)]
    for message in sent:
        far.send(message)  # waits for nobody, though nobody reads yet
        near.send(message)
    got: list[Received] = []
    while len(got) < len(sent):
        got += [received for _, received in listener.poll(PATIENCE_S)]
    assert got == sent
    back: list[Received] = []
    while len(back) < len(sent):
        back += [received for _, received in poll([far], PATIENCE_S)]
    assert back == sent
    assert near.local
    assert far.local
    far.close()


def test_nothing_comes_of_waiting_for_a_time(listener: Listener) -> None:
    assert listener.poll(0) == []
    assert listener.poll(0.01) == []
    with pytest.raises(ValueError, match="no link that could bring anything"):
        poll([], None)


def test_what_was_sent_before_the_end_comes_before_it_and_the_end_comes_once(listener: Listener) -> None:
    near, far = pair(listener)
    far.send(Message("last", {}, BIG))
    closing = threading.Thread(target=far.close, args=(PATIENCE_S,))  # waits until it is read
    closing.start()
    got: list[tuple[Link, Received]] = []
    while not got or got[-1][1] is not EOF:
        got += listener.poll(PATIENCE_S)
    assert got == [(near, Message("last", {}, BIG)), (near, EOF)]
    closing.join(PATIENCE_S)
    assert listener.poll(0) == []
    assert listener.links == []
    near.send(Message("too late", {}))  # does nothing


def test_a_closed_listener_ends_its_links() -> None:
    with Listener() as listener:
        near, far = pair(listener)
        near.send(Message("stop", {}))
    got: list[Received] = []
    while EOF not in got:
        got += [received for _, received in poll([far], PATIENCE_S)]
    assert got == [Message("stop", {}), EOF]
    assert poll([far], 0) == []
    with pytest.raises(LinkError, match="nobody listens at"):
        connect(listener.address, listener.authkey, timeout_s=0.1)


def test_whoever_has_another_key_is_refused_and_never_seen(listener: Listener) -> None:
    with pytest.raises(WrongKeyError, match=f"^{re.escape(listener.address)}: the two ends have different keys$"):
        connect(listener.address, b"guessed")
    assert listener.poll(0.05) == []


def test_whoever_has_another_key_is_told_of_and_a_stranger_without_one_is_not() -> None:
    turned_away: list[str] = []
    with Listener("127.0.0.1:0", b"key", turned_away.append) as listener:
        stranger = connected(listener.address, PATIENCE_S)
        stranger.close()
        with pytest.raises(WrongKeyError):
            connect(listener.address, b"guessed")
        pair(listener)[1].close()
        until_s = time.monotonic() + PATIENCE_S
        while not turned_away:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    (peer,) = turned_away
    assert peer.startswith("127.0.0.1:")


def test_of_a_link_that_is_dropped_nothing_is_heard_and_its_peer_hears_the_end(listener: Listener) -> None:
    near, far = pair(listener)
    other, _ = pair(listener)
    far.send(Message("too late", {}))
    listener.drop(near)
    listener.drop(near)  # which changes nothing
    assert listener.poll(0.05) == []
    assert listener.links == [other]
    assert poll([far], PATIENCE_S) == [(far, EOF)]
    far.close()


def test_a_stranger_keeps_nobody_out(listener: Listener) -> None:
    strangers = [connected(listener.address, PATIENCE_S) for _ in range(3)]  # who say nothing
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    near, far = pair(listener)
    assert near is not far
    for stranger in strangers:
        stranger.close()
    far.close()


def test_a_proof_of_one_worker_is_none_for_another() -> None:
    """Who has no key sits at the controller's address, and lets one worker answer what the other asks."""
    errors: list[LinkError] = []

    def call(address: str) -> None:
        try:
            connect(address, b"key").close()
        except LinkError as error:
            errors.append(error)

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        callers = [threading.Thread(target=call, args=(address,), daemon=True) for _ in range(2)]
        for each in callers:
            each.start()
        asking, answering = (Connection(nobody.accept()[0].detach()) for _ in callers)
        asking.send_bytes(b"#CHALLENGE#" + bytes(20))
        asking.recv_bytes(256)
        asking.send_bytes(b"#WELCOME#")
        answering.send_bytes(asking.recv_bytes(256))
        asking.send_bytes(answering.recv_bytes(256))
        assert asking.recv_bytes(256) == b"#FAILURE#"
        asking.close()
        answering.close()
        for each in callers:
            each.join(PATIENCE_S)
    assert len(errors) == 2
    assert sum(isinstance(error, WrongKeyError) for error in errors) == 1


class Failing:
    """A listening socket of which the first that are accepted fail."""

    def __init__(self, address: str) -> None:
        self.socket, self.address = listening(address)
        self.failures = [OSError(24, "Too many open files"), ConnectionAbortedError(103, "aborted")]

    def accept(self) -> Any:
        if self.failures:
            raise self.failures.pop()
        return self.socket.accept()

    def shutdown(self, how: int) -> None:
        self.socket.shutdown(how)

    def close(self) -> None:
        self.socket.close()


def test_a_listener_goes_on_where_nothing_can_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Failing("127.0.0.1:0")
    monkeypatch.setattr(links, "listening", lambda address: (made, made.address))
    with Listener() as listener:
        pair(listener)[1].close()
        assert made.failures == []


@pytest.mark.parametrize("error", [OSError(22, "gone"), RuntimeError("can't start new thread")])
def test_one_that_cannot_be_let_in_is_hung_up_on_and_the_next_one_is_let_in(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [error]

    def failing(connection: socket.socket) -> socket.socket:
        if errors:
            raise errors.pop()
        return kept_alive(connection)

    monkeypatch.setattr(links, "kept_alive", failing)
    monkeypatch.setattr(links, "PROVING", 1)
    with Listener("127.0.0.1:0") as listener:
        with pytest.raises(LinkError, match="did not prove that it knows the key"):
            connect(listener.address, listener.authkey)
        pair(listener)[1].close()


def test_who_says_a_byte_at_a_time_is_cut_off_in_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_S", 0.3)
    slow = connected(listener.address, PATIENCE_S)
    slow.sendall((200).to_bytes(4, "big"))
    cut_off = False
    with slow:
        for _ in range(150):
            time.sleep(0.05)
            try:
                slow.sendall(b"x")
            except OSError:
                cut_off = True
                break
    assert cut_off


def test_a_listener_that_proves_nothing_is_given_up_as_soon_as_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_S", 10 * PATIENCE_S)
    errors: list[LinkError] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def call() -> None:
            try:
                connect(address, b"key", 0.3)
            except LinkError as error:
                errors.append(error)

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        caller.join(PATIENCE_S)
        assert not caller.is_alive()
    assert "did not prove that it knows the key" in str(errors)


def test_strangers_beyond_a_number_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PROVING", 2)
    with Listener("127.0.0.1:0") as listener:
        strangers = [connected(listener.address, PATIENCE_S) for _ in range(3)]
        heard = [stranger.recv(4096) for stranger in strangers]
        assert [bool(each) for each in heard] == [True, True, False]
        for stranger in strangers:
            stranger.close()
        until_s = time.monotonic() + PATIENCE_S
        while True:  # until it is noticed that they have gone
            try:
                far = connect(listener.address, listener.authkey)
                break
            except LinkError:
                assert time.monotonic() < until_s
        far.send(Message("hello", {}))
        assert first(listener)[1] == Message("hello", {})
        far.close()


def test_who_is_let_in_while_the_listener_is_closed_hears_the_end() -> None:
    listener = Listener("127.0.0.1:0", b"key")
    arrived, go = threading.Event(), threading.Event()

    class Waiting(deque[Link]):
        def append(self, link: Link) -> None:
            arrived.set()
            assert go.wait(PATIENCE_S)
            super().append(link)

    listener._new = Waiting()
    far = connect(listener.address, b"key")
    assert arrived.wait(PATIENCE_S)
    listener.close()
    go.set()
    assert poll([far], PATIENCE_S) == [(far, EOF)]
    far.close()


PEER = """
import sys, time
from fedasync.trainer.link import connect
from fedasync.trainer.messages import Message
link = connect(sys.argv[1], bytes.fromhex(sys.argv[2]))
link.send(Message("hello", {}))
link.send(Message("half", {}, bytes(64 << 20)))
time.sleep(600)
"""


def test_a_peer_that_stops_or_dies_in_the_middle_of_a_message_holds_nobody_up(listener: Listener) -> None:
    peer = subprocess.Popen([sys.executable, "-c", PEER, listener.address, listener.authkey.hex()])
    try:
        stopped, message = first(listener)
        assert message == Message("hello", {})
        os.kill(peer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED)
        near, far = pair(listener)
        while far.queued_bytes or near.queued_bytes:
            time.sleep(0.001)
        stopped.send(Message("unread", {}, bytes(64 << 20)))
        far.send(Message("fine", {}))
        assert first(listener) == (near, Message("fine", {}))
        assert stopped.queued_bytes > 0
    finally:
        peer.kill()
        peer.wait()
    assert first(listener) == (stopped, EOF)
    far.close()


def test_a_controller_may_come_later_than_its_workers() -> None:
    address = f"127.0.0.1:{free_port()}"
    code = f"""
import time
from fedasync.trainer.link import Listener
time.sleep(0.3)
with Listener({address!r}, b"key") as listener:
    link, message = listener.poll(60)[0]
    link.send(message)
    listener.poll(60)
"""
    controller = subprocess.Popen([sys.executable, "-c", code])
    link = connect(address, b"key", PATIENCE_S)
    link.send(Message("hello", {"number": 3}))
    assert poll([link], PATIENCE_S) == [(link, Message("hello", {"number": 3}))]
    link.close()
    assert controller.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("address", ["", "here", ":80", "host:", "host:x", "host:70000"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="'unix' or 'host:port' would do"):
        Listener(address)


def test_hosts_of_version_6() -> None:
    assert host_and_port("[::1]:80") == ("::1", 80)
    if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
        with Listener("[::1]:0") as listener:
            pair(listener)[1].close()
