"""Signals that end a command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class SignalExit(SystemExit):
    """A signal ends the program, and not what it runs."""


@contextmanager
def left_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does, so that ``with`` blocks are left.

    Only where nobody else handles them. For the main thread, in which SignalExit is raised.
    """

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SignalExit(128 + number)

    before = {
        number: signal.signal(number, leave)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
