"""The processes of one folder, by name: started, written down, ended together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from fedasync.flower.leftovers import PROCESSES, write_down
from fedasync.flower.service import FederationError, Service, end, family, orphans, uninterrupted


class Services:
    """Named processes with logs in ``folder/logs``; ``folder/processes.json`` says which there are."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self._services: dict[str, Service] = {}
        self._pids: set[int] = set()
        self._addresses: set[str] = set()

    def __getitem__(self, name: str) -> Service:
        if name not in self._services:
            raise FederationError(f"{name} was not started; there are: {', '.join(self._services) or 'none'}")
        return self._services[name]

    def __contains__(self, name: object) -> bool:
        return name in self._services

    def names(self, prefix: str = "") -> list[str]:
        """Those that were started, with this prefix."""
        return [name for name in self._services if name.startswith(prefix)]

    def runs(self, name: str) -> bool:
        """Whether it was started and has not ended."""
        return name in self._services and self._services[name].status is None

    def begin(self, name: str, command: Sequence[str], address: str | None = None) -> Service:
        """Start a process, which serves at ``address`` (host:port). Raises FederationError where it runs already."""
        self.demand_ended(name)
        with uninterrupted():
            service = Service(name, command, self.folder / "logs" / f"{name}.log", self.environment)
            self._services[name] = service
            self._pids.add(service.pid)
            self._addresses |= {address} if address else set()
            write_down(self.folder, self._services.values(), self._pids, self._addresses)
        return service

    def demand_ended(self, name: str) -> None:
        """Raise FederationError where it runs."""
        if self.runs(name):
            raise FederationError(f"{name} runs already, as process {self[name].pid}")

    def end(self, names: Iterable[str], grace_s: float, children_grace_s: float | None = None) -> None:
        """End these together, see ``service.end``."""
        ending = [self[name] for name in names if name in self]
        for service in ending:
            service.ended_by_us = True
        end([service.process for service in ending], grace_s, children_grace_s)
        for service in ending:
            service.reap()

    def forget(self, grace_s: float) -> None:
        """After the end of all: end what those left behind that died by themselves, and what was written down."""
        end(orphans(self._pids, self._addresses), grace_s)
        (self.folder / PROCESSES).unlink(missing_ok=True)
        self._services.clear()

    def works_on(self, names: Iterable[str], script: str) -> bool:
        """Whether a process that these began runs ``script``."""
        for process in family(self[name].process for name in names if name in self):
            with suppress(psutil.Error):
                if any(script in part for part in process.cmdline()):
                    return True
        return False

    def deaths(self) -> list[str]:
        """A line for each process that ended and was not told to."""
        return [
            f"{name} ended by itself with status {service.status}; {service.last_lines()}"
            for name, service in self._services.items()
            if service.status is not None and not service.ended_by_us
        ]

    def said(self) -> str:
        """Who died, or what all wrote last, on one line."""
        return "; ".join(self.deaths()) or "; ".join(service.last_lines() for service in self._services.values())
