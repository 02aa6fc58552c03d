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
from collections.abc import Iterator

import pytest

from fedasync.trainer.addresses import connected, free_port, host_and_port
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
