"""Processes of this machine: started in sessions of their own, waited for, ended with all that they began."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil  # type: ignore[import-untyped]

LAST_LINES = 8
"""Lines of a log that an error quotes."""
KILLED_WITHIN_S = 10.0

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FederationError(RuntimeError):
    """A process, or a command that was given to Flower, did not do what it should; the message is one line."""

    status = 1


class Service:
    """A process that runs until it is ended; what it writes is appended to its log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.command, self.log = name, tuple(command), log
        self.ended_by_us = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                self.command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.process = psutil.Process(self._popen.pid)
        """Remembers when it began, so a later process with the same number is not taken for it."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """None while it runs, else its exit status, or minus the signal that ended it."""
        return self._popen.poll()

    def output(self) -> str:
        """What it has written so far, without colours."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return _COLOUR.sub("", log.read().decode(errors="replace"))

    def last_lines(self) -> str:
        """The end of its log, on one line."""
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        return f"last lines of {self.log}: {' | '.join(lines[-LAST_LINES:]) or 'none'}"

    def kill(self) -> None:
        """SIGKILL to its process group and those of its children, at once."""
        self.ended_by_us = True
        kill(family([self.process]))
        self._popen.wait()

    def reap(self) -> None:
        """Take note of its end, after ``end`` or ``kill`` of its process."""
        self._popen.wait()


def wait_for(
    what: str, happened: Callable[[], bool], timeout_s: float, watched: Sequence[Service], every_s: float = 0.1
) -> None:
    """Wait until something happened. Raises FederationError after ``timeout_s``, or when a watched process ends."""
    until_s = time.monotonic() + timeout_s
    while not happened():
        _demand_alive(what, watched)
        if time.monotonic() >= until_s:
            seen = "; ".join(service.last_lines() for service in watched)
            raise FederationError(f"waited {timeout_s:g} s for {what}, in vain; {seen}")
        time.sleep(every_s)
    _demand_alive(what, watched)


def _demand_alive(what: str, watched: Sequence[Service]) -> None:
    for service in watched:
        if (status := service.status) is not None:
            raise FederationError(
                f"{service.name} ended with status {status} while waiting for {what}; {service.last_lines()}"
            )


def family(leaders: Iterable[psutil.Process]) -> set[psutil.Process]:
    """The processes that run of these, and all that they began."""
    members = set()
    for leader in leaders:
        with suppress(psutil.NoSuchProcess):
            if is_running(leader):
                members |= {leader, *leader.children(recursive=True)}
    return members


def is_running(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def orphans(parents: Iterable[int], addresses: Iterable[str]) -> set[psutil.Process]:
    """What processes with the numbers ``parents`` began and left behind, at any of these addresses (host:port).

    Flower's SuperExec and apps are told both, and nothing else ties them to a SuperLink or a node that has died.
    """
    pids, at = {str(pid) for pid in parents}, set(addresses)
    found: set[psutil.Process] = set()
    commands = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            commands[process] = process.cmdline()
    while new := {process for process, command in commands.items() if _begun_by(command, pids, at)} - found:
        found |= new
        pids |= {str(process.pid) for process in new}
    return {process for process in found if is_running(process)}


def _begun_by(command: Sequence[str], pids: set[str], addresses: set[str]) -> bool:
    pairs = list(pairwise(command))
    return any(flag == "--parent-pid" and value in pids for flag, value in pairs) and any(
        flag == "--runtime-api-address" and value in addresses for flag, value in pairs
    )


def end(leaders: Iterable[psutil.Process], grace_s: float, children_grace_s: float | None = None) -> None:
    """SIGTERM to ``leaders``; SIGKILL to what is left of them and of all that they began after ``grace_s``.

    With ``children_grace_s`` what they began has only so long once they are gone. An interrupt while waiting cuts the
    grace short. Raises FederationError for what outlives SIGKILL.
    """
    leaders = list(leaders)
    members = family(leaders)
    try:
        for leader in leaders:
            with suppress(psutil.NoSuchProcess):
                leader.terminate()
        until_s = time.monotonic() + grace_s
        while (left := family(members)) and time.monotonic() < until_s:
            members |= left
            if children_grace_s is not None and left.isdisjoint(leaders):
                until_s, children_grace_s = min(until_s, time.monotonic() + children_grace_s), None
            time.sleep(0.05)
    finally:
        with uninterrupted():
            kill(members)


def kill(members: Iterable[psutil.Process]) -> None:
    """SIGKILL to the process groups of all these, and of what they began meanwhile. Raises FederationError."""
    until_s = time.monotonic() + KILLED_WITHIN_S
    while left := family(members):
        if time.monotonic() > until_s:
            raise FederationError(f"still there after SIGKILL: {', '.join(str(process.pid) for process in left)}")
        for process in left:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                group = os.getpgid(process.pid)
                if group == os.getpgrp():
                    process.kill()
                else:
                    os.killpg(group, signal.SIGKILL)
        members = left
        time.sleep(0.02)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect only afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0])


@contextmanager
def left_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does, so that ``with`` blocks are left.

    Only where nobody else handles them, and in the main thread.
    """

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
