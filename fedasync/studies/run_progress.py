"""How far a deployment's run has come, read from its folder while it is written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedasync.core.log import COMMITTED, CONSUMED
from fedasync.federated.recorded import Recorded
from fedasync.flower.keeper import FAILURES, PROGRESS

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 20.0
"""How often a line is printed where there is no terminal to draw on."""


@dataclass
class RunProgress:
    """What a run's folder tells: contributions applied, versions, and the last evaluation.

    ``look`` reads what was added since the last look.
    """

    folder: Path
    rows: int = 0
    applied: int = 0
    version: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """What clients raised, a line each."""

    def look(self) -> None:
        """Read on. A folder that is not there yet tells nothing."""
        for row in Recorded(self.folder).rows(self.rows):
            self.rows += 1
            self.applied += row[1] == CONSUMED
            self.version += row[1] == COMMITTED
        self.metrics = _metrics(self.folder / PROGRESS) or self.metrics
        path = self.folder / FAILURES
        if path.is_file():
            self.failures = path.read_text("utf-8").splitlines()

    def __str__(self) -> str:
        if not self.rows:
            return "waiting for clients"
        said = [f"version {self.version}", f"{self.applied} contributions applied"]
        return ", ".join([*said, *(f"{name} {value:.4g}" for name, value in self.metrics.items())])


def _metrics(path: Path) -> dict[str, float]:
    """The last evaluation; empty before the first."""
    try:
        time_s, _, names, values = json.loads(path.read_bytes())["evaluations"]["columns"]
    except FileNotFoundError:
        return {}
    return {name: value for at_s, name, value in zip(time_s, names, values, strict=True) if at_s == time_s[-1]}


class Progress(Protocol):
    """What ``shown`` shows, as text."""

    failures: list[str]

    def look(self) -> None:
        """Find out how far the run has come."""
        ...


@contextmanager
def shown(what: str, progress: Progress, console: Console) -> Iterator[None]:
    """While the block runs: a line that is kept up to date on a terminal, else a line now and then."""
    began_s = time.monotonic()
    told: list[str] = []

    def look() -> None:
        progress.look()
        for failure in progress.failures[len(told) :]:
            console.print(f"{what}: {failure}", markup=False, highlight=False, soft_wrap=True)
        told[:] = progress.failures

    def line() -> Text:
        passed = timedelta(seconds=int(time.monotonic() - began_s))
        return Text(f"{what}  {passed}  {progress}", no_wrap=True, overflow="ellipsis")

    if not console.is_terminal:

        def say() -> None:
            look()
            console.print(line(), soft_wrap=True)

        with _regularly(say, SAY_EVERY_S):
            yield
        return
    with Live(line(), console=console, transient=True, auto_refresh=False) as live:

        def draw() -> None:
            look()
            live.update(line(), refresh=True)

        with _regularly(draw, LOOK_EVERY_S):
            yield


@contextmanager
def _regularly(act: Callable[[], object], every_s: float) -> Iterator[None]:
    """Do something every so often, in a thread of its own, until the block ends."""
    over = threading.Event()
    problems: list[BaseException] = []

    def go() -> None:
        while not over.wait(every_s):
            try:
                act()
            except Exception as error:  # noqa: BLE001  handed to the block's owner; the run itself goes on
                problems.append(error)
                return

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if problems:
        raise problems[0]
