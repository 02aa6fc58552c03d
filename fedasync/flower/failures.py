"""What goes wrong between server and client: what a client raised, and what was received and is unfit."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass, replace
from os.path import basename, join
from pathlib import Path
from types import FrameType

from fedasync.aggregation.check import Defect

MOST_TRACEBACK, MOST_MESSAGE, MOST_NAME = 2000, 2000, 200
"""Characters of a failure that travel and are kept."""
MOST_LINE = 400
"""Characters of a text that is put on a line."""

_PACKAGE = join(Path(__file__).parents[1], "")
_TORCH = join(sysconfig.get_path("platlib"), "torch", "")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class UnfitError(ValueError):
    """Something received is not what it should be."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.defect = Defect(reason, detail)


@dataclass(frozen=True)
class ClientFailure:
    """What a client raised: its words, cut to a length and otherwise as they were sent."""

    client: int
    """-1 where it does not know its number."""
    type: str
    message: str
    file: str
    """Where it was raised: empty, and ``line`` 0, where there is no such place."""
    line: int
    traceback: str
    """Its last 2,000 characters."""

    def __str__(self) -> str:
        """One line."""
        who = f"client {self.client}" if self.client >= 0 else "a client without number"
        what = f"{self.type}: {self.message}" if self.message else self.type
        where = f" ({one_line(basename(self.file))}, line {self.line})" if self.file else ""
        return f"{who}: {one_line(what)}{where}"

    @classmethod
    def of(cls, client: int, error: BaseException) -> ClientFailure:
        """Of what was raised; the place is the innermost in the user's own code, if there is one.

        Else it is the innermost outside fedasync and torch, else the innermost of all.
        """
        told = traceback.TracebackException.from_exception(error)
        file, line = _place(error)
        return cls(client, type(error).__name__, str(told), file, line, "".join(told.format())).cut()

    def cut(self) -> ClientFailure:
        """With texts that travel, none longer than is kept."""
        return replace(
            self,
            type=_text(self.type)[:MOST_NAME],
            message=_text(self.message)[:MOST_MESSAGE],
            file=_text(self.file)[-MOST_MESSAGE:],
            traceback=_text(self.traceback)[-MOST_TRACEBACK:],
        )


def one_line(text: str) -> str:
    """The beginning of a text on one line of what can be printed, fit for a log and a terminal."""
    printable = "".join(letter if letter.isprintable() else " " for letter in _text(text[:MOST_MESSAGE]))
    return " ".join(printable.split())[:MOST_LINE]


def _text(text: str) -> str:
    """What UTF-8 can carry: a file's name may hold bytes that are none."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _place(error: BaseException) -> tuple[str, int]:
    """File and line that an error, or what caused it, comes from; the error itself counts first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and all(cause is not each for each in chain):
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    places = [list(map(_where, traceback.walk_tb(each.__traceback__))) for each in chain]
    for each, frames in zip(chain, places, strict=True):
        if isinstance(each, SyntaxError) and each.filename:
            frames.append((each.filename, each.lineno or 0))
    for foreign in ((_PACKAGE, *_LIBRARIES), (_PACKAGE, _TORCH)):
        for frames in places:
            for file, line in reversed(frames):
                if not file.startswith(("<", *foreign)):
                    return file, line
    return places[0][-1] if places[0] else ("", 0)


def _where(walked: tuple[FrameType, int]) -> tuple[str, int]:
    frame, line = walked
    return frame.f_code.co_filename, line or 0
