"""What a federation writes down of its processes, so that the next one in its folder can end what was left behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from fedasync.flower.service import FederationError, Service, end, is_running, orphans

PROCESSES = "processes.json"
CLOCK_STEP_S = 10.0
"""A process is known by its number, its command and when it began, as far as the clock was not set meanwhile."""


def write_down(folder: Path, services: Iterable[Service], pids: Iterable[int], addresses: Iterable[str]) -> None:
    """Keep in a federation's folder which processes are its own, and which ``pids`` and addresses it ever had."""
    content = {
        "owner": _description("owner", (me := psutil.Process()), me.cmdline()),
        "pids": sorted(pids),
        "addresses": sorted(addresses),
        "processes": [_description(s.name, s.process, s.command) for s in services if s.status is None],
    }
    beside = folder / f".{PROCESSES}"
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(folder / PROCESSES)


def end_leftovers(folder: Path, grace_s: float) -> list[str]:
    """End what an owner that is no more has left behind here: a line a process.

    Nothing is ended but a process that still has the number, the command and the start that were written down, and
    what it began. Raises FederationError when the owner is alive.
    """
    path = folder / PROCESSES
    if not path.exists():
        return []
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        described, pids, addresses, owner = (content[key] for key in ("processes", "pids", "addresses", "owner"))
    except (ValueError, KeyError, TypeError) as error:
        raise FederationError(
            f"{path} cannot be read: {error!r}; end the processes that it names, and delete it"
        ) from None
    if _found(owner):
        raise FederationError(f"{folder} is in use by process {owner['pid']}; another folder would do")
    left = {process: known["name"] for known in described if (process := _found(known))}
    for process in orphans(pids, addresses):
        left.setdefault(process, "SuperExec or app")
    lines = [
        f"{name} (process {process.pid}) was left behind by process {owner['pid']}" for process, name in left.items()
    ]
    nodes = [process for process, name in left.items() if name.startswith("supernode-")]
    end(nodes, grace_s, 0.5)  # first, so that they can sign off
    end(left, grace_s)
    path.unlink()
    return lines


def _description(name: str, process: psutil.Process, command: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "pid": process.pid, "began_s": process.create_time(), "command": list(command)}


def _found(known: dict[str, Any]) -> psutil.Process | None:
    """The process that was written down, if it still runs."""
    with suppress(psutil.Error):
        process = psutil.Process(known["pid"])
        same = process.cmdline() == known["command"] and abs(process.create_time() - known["began_s"]) < CLOCK_STEP_S
        return process if same and is_running(process) else None
    return None
