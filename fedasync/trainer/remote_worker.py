"""A rollout worker that comes by itself: it serves one run after the other at a controller's address."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from fedasync.trainer.child import serve_with
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.link import EOF, Link, LinkError, WrongKeyError, connect, poll
from fedasync.trainer.messages import failed, hello
from fedasync.trainer.source import fedasync_version

if TYPE_CHECKING:
    from fedasync.rl.engine import Engine

CONNECT_S = 5.0
"""How long one attempt to connect may take."""
AGAIN_S = 0.5
"""Between two attempts."""


class CannotWorkError(RuntimeError):
    """This worker is of no use to the run at that address; the message is one line."""


@dataclass(frozen=True)
class RemoteWorker:
    """A worker for the runs at ``address``, which are found there one after the other.

    ``make`` makes the engine of what a run's controller tells. ``say`` is told who is waited for. Where nobody has
    listened for ``patience_s`` LinkError is raised; a controller that is there is waited for as long as it takes.
    """

    address: str
    authkey: bytes
    make: Callable[[ChildSettings], Engine]
    say: Callable[[str], object]
    patience_s: float = inf

    def serve(self, runs: float = inf) -> None:
        """Serve so many runs that come to their end. Raises LinkError, CannotWorkError, and what an engine raises."""
        served = 0
        while served < runs:
            with self._linked() as link:
                served += self._serve_one(link)
            if served < runs:
                time.sleep(AGAIN_S)

    def _serve_one(self, link: Link) -> bool:
        """Take part in the run; whether it came to its end, and was not left by its controller."""
        link.send(hello(None, "remote", fedasync_version()))
        told = self._welcome(link)
        if told is None:
            return False
        number = told["number"]
        self.say(f"worker {number} of the run at {self.address}")
        try:
            settings = ChildSettings.told(told["settings"])
            engine = self.make(settings)
        except Exception as error:
            link.send(failed(error))
            what = " ".join(str(error).split())
            raise CannotWorkError(f"worker {number} of the run at {self.address} cannot be made: {what}") from error
        self.say(f"worker {number} is ready")
        try:
            ended = serve_with(engine, settings, link)
        except Exception as error:
            link.send(failed(error))
            raise
        self.say(f"the run at {self.address} {'has ended' if ended else 'was left by its controller'}")
        return ended

    def _welcome(self, link: Link) -> dict[str, Any] | None:
        """What the controller says when there is a place; None where it goes before. Raises CannotWorkError."""
        told = None
        while told is None:
            for _, received in poll([link], None):
                if received is EOF:
                    return None
                match received.kind:
                    case "welcome":
                        told = received.header
                    case "wait":
                        self.say(f"{self.address}: {received.header['why']}; waits for a place")
                    case "refused":
                        raise CannotWorkError(f"{self.address} refuses this worker: {received.header['why']}")
                    case kind:
                        raise ValueError(f"a remote worker without a place knows no message {kind!r}")
        return told

    @contextmanager
    def _linked(self) -> Iterator[Link]:
        link = self._found()
        try:
            yield link
        finally:
            link.close()

    def _found(self) -> Link:
        """A link, as soon as somebody listens. Raises LinkError where nobody does in time, WrongKeyError at once."""
        until_s, told = time.monotonic() + self.patience_s, False
        while True:
            try:
                return connect(self.address, self.authkey, CONNECT_S, again_s=CONNECT_S)
            except WrongKeyError:
                raise
            except LinkError as error:
                if time.monotonic() + AGAIN_S > until_s:
                    raise LinkError(f"no run within {self.patience_s:g} s: {error}") from None
            if not told:
                self.say(f"waits for a run at {self.address}")
            told = True
            time.sleep(AGAIN_S)
