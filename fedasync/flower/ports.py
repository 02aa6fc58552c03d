"""Ports of this machine: free ones, and whether a Flower process serves at one."""

from __future__ import annotations

import socket
import ssl
import urllib.request
from pathlib import Path

from fedasync.flower.service import FederationError

HOST = "127.0.0.1"
ANSWER_S = 5.0
"""An answer that takes longer is none."""


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def demand_free(port: int) -> None:
    """Raise FederationError for a port that somebody listens at."""
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Flower does: a closed connection is no owner
        try:
            asked.bind((HOST, port))
        except OSError as error:
            raise FederationError(f"port {port} of {HOST}: {error.strerror}; another, or none, would do") from None


def was_taken(error: FederationError) -> bool:
    """Whether a process ended because somebody else had its port."""
    return "address already in use" in str(error).lower()


def is_healthy(port: int, authority: Path | None = None) -> bool:
    """Whether a Flower process serves at a port of this machine, by TLS where ``authority`` is given."""
    context = ssl.create_default_context(cafile=authority) if authority else None
    # No proxy stands between two processes of one machine.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    try:
        with opener.open(f"{'https' if context else 'http'}://{HOST}:{port}/health", timeout=ANSWER_S) as answer:
            return bool(answer.status == 200)
    except ssl.SSLError as error:
        raise FederationError(f"{HOST}:{port}: {error}") from None
    except OSError as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            raise FederationError(f"{HOST}:{port}: {error}; a certificate for that address would do") from None
        return False  # nobody listens yet
