"""What the server of a run said, as the SuperLink keeps it."""

from __future__ import annotations

import re
import subprocess
from subprocess import CompletedProcess

from fedasync.flower.command_line import command
from fedasync.flower.connection import NAME, Connection
from fedasync.flower.service import LAST_LINES, FederationError

ENDS = "the run ends: "
"""Stands before the reason in the server's own last word."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def server_log(link: Connection, run_id: int) -> str:
    """The log of a run's ServerApp, without colours (``flwr log``). Raises FederationError for no answer."""
    try:
        said: CompletedProcess[str] = subprocess.run(
            command("flwr", "log", str(run_id), NAME, "--show"),
            env=dict(link.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=link.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FederationError(f"flwr log {run_id} gave no answer within {link.timeout_s:g} s") from None
    return _COLOUR.sub("", said.stdout if said.returncode == 0 else f"{said.stdout}\n{said.stderr}")


def last_word(log: str) -> str:
    """Why a run ended, on one line: what its server says of it, else the end of its log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        if ENDS in line:
            return line.partition(ENDS)[2]
    return " | ".join(lines[-LAST_LINES:]) or "its server wrote nothing"
