"""Time as a deployment knows it: seconds since the run began."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock that can be waited on."""

    def now(self) -> float:
        """Seconds since ``start``, plus what the run had behind it then; before it, seconds of waiting."""
        ...

    def start(self, elapsed_s: float) -> None:
        """The run begins, or goes on with ``elapsed_s`` behind it."""
        ...

    def wait(self, most_s: float, until_s: float) -> None:
        """Let time pass: ``most_s``, or until the clock shows ``until_s``, whichever comes first."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self.start(0.0)

    def now(self) -> float:
        return time.monotonic() - self._zero_s

    def start(self, elapsed_s: float) -> None:
        self._zero_s = time.monotonic() - elapsed_s

    def wait(self, most_s: float, until_s: float) -> None:
        time.sleep(max(0.0, min(most_s, until_s - self.now())))
