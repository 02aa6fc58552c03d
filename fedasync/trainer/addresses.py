"""Where processes meet: ``unix:@name`` or ``unix:/path`` on one machine, ``host:port`` across machines."""

from __future__ import annotations

import secrets
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

QUIET_S, PROBE_S, PROBES = 20, 5, 3
"""A machine that vanished is found out by TCP after QUIET_S + PROBES × PROBE_S where nothing was on its way to it."""
UNTAKEN_S = 90
"""… and where something was, which also ends the link to one that takes nothing for so long (Linux)."""
MOST_PORT = 65535


def listening(address: str) -> tuple[socket.socket, str]:
    """A socket that listens, and its address in full: ``unix`` gets a name, port 0 a free port. Raises ValueError."""
    if address == "unix":
        name = f"fedasync-{secrets.token_hex(8)}"
        # An abstract name is Linux's alone, and leaves no file behind whoever is killed.
        address = f"unix:@{name}" if sys.platform == "linux" else f"unix:{Path(tempfile.mkdtemp()) / name}"
    if address.startswith("unix:"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_unix_name(address))
        listener.listen(128)
        return listener, address
    host, port = host_and_port(address)
    listener = socket.create_server((host, port), family=_family(host), backlog=128)
    return listener, f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"


def unlisten(listener: socket.socket, address: str) -> None:
    """Close it, also while a thread is in its ``accept``."""
    with suppress(OSError):  # closed already
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    if address.startswith("unix:/"):
        Path(_unix_name(address)).unlink(missing_ok=True)


def connected(address: str, timeout_s: float) -> socket.socket:
    """A socket that is connected to a listener's address. Raises OSError, and ValueError for what is no address."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_unix_name(address))
        except OSError:
            connection.close()
            raise
    else:
        connection = socket.create_connection(host_and_port(address), timeout=timeout_s)
        connection.settimeout(None)
    return kept_alive(connection)


def kept_alive(connection: socket.socket) -> socket.socket:
    """The same socket; over TCP it sends at once, and finds out that the other machine has vanished."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", QUIET_S),
            ("TCP_KEEPINTVL", PROBE_S),
            ("TCP_KEEPCNT", PROBES),
            ("TCP_USER_TIMEOUT", UNTAKEN_S * 1000),
        ):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def is_local(connection: socket.socket) -> bool:
    """Whether the other end is on this machine."""
    if connection.family == socket.AF_UNIX:
        return True
    try:
        return bool(connection.getpeername()[0] == connection.getsockname()[0])
    except OSError:
        return False  # it has gone already


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``host:port``; an IPv6 host stands in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MOST_PORT:
        raise ValueError(f"address: got {address!r}; 'unix' or 'host:port' would do")
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_host(address: str) -> str:
    """This machine's IP address on the way to ``host:port``; nothing is sent. Raises OSError where there is no way."""
    host, port = host_and_port(address)
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        found.connect(place)
        return str(found.getsockname()[0])


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody has now."""
    with socket.socket(_family(host)) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _unix_name(address: str) -> str:
    name = address.removeprefix("unix:")
    return f"\0{name[1:]}" if name.startswith("@") else name
