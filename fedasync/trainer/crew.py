"""The rollout workers of a run, as the controller sees them: who is there, which answers each has, which weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fedasync.rl.engine import KvCache, Request
from fedasync.trainer.link import Link
from fedasync.trainer.messages import Message, load, stop, submit, withdraw

MOST_FAILED_LOADS = 3
SESSION = 1 << 40
"""Answers of a run that was rolled back keep numbers of their own: what still comes of them is nobody's."""


@dataclass
class Worker:
    """One rollout worker."""

    number: int
    remote: bool = False
    """On another machine: it comes by itself."""
    link: Link | None = None
    ready: bool = False
    answers: set[int] = field(default_factory=set)
    """Sent to it, and not back."""
    version: int = 0
    """Weights that it has loaded."""
    heard_s: float = 0.0
    """When it said something last, by the controller's monotonic clock."""
    offset_s: float = 0.0
    """What its monotonic clock lacks to the controller's."""
    failed_loads: int = 0
    """In a row."""

    def pulse(self, clock_s: float, now_s: float) -> None:
        """Its clock said ``clock_s`` when it sent this: of what was under way the shortest tells the clocks apart."""
        if self.link is not None and not self.link.local:
            self.offset_s = min(self.offset_s, now_s - clock_s)

    def __str__(self) -> str:
        return f"worker {self.number}" + (" (remote)" if self.remote else "")


class Crew:
    """Workers 0 … ``count`` + ``remote`` − 1. An answer goes to the ready worker with the fewest; the first of equals.

    The last ``remote`` of them are on other machines.
    """

    def __init__(self, count: int, kv: KvCache, remote: int = 0) -> None:
        self.workers = [Worker(number, number >= count) for number in range(count + remote)]
        self.session = 0
        self._kv = kv
        self._pending: deque[Request] = deque()
        self._where: dict[int, Worker] = {}
        self._asked_to_load: tuple[int, bool] | None = None

    @property
    def ready(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.ready]

    @property
    def outstanding(self) -> int:
        """Answers that workers have."""
        return len(self._where)

    @property
    def pending(self) -> int:
        """Answers that wait for a worker."""
        return len(self._pending)

    def of(self, link: Link) -> Worker | None:
        return next((worker for worker in self.workers if worker.link is link), None)

    def joined(self, number: int, link: Link, now_s: float, offset_s: float) -> None:
        """A worker has said hello."""
        worker = self.workers[number]
        worker.link, worker.ready, worker.heard_s, worker.offset_s = link, False, now_s, offset_s
        worker.failed_loads = 0

    def begins(self, worker: Worker) -> None:
        """Its engine is there: it gets the present weights, and then answers."""
        worker.ready = True
        if self._asked_to_load is not None and worker.link is not None:
            worker.link.send(load(self._asked_to_load[0], self._kv))

    def lost(self, worker: Worker) -> list[int]:
        """The worker has gone: the answers that it had."""
        gone = sorted(worker.answers)
        for answer in gone:
            self._where.pop(answer, None)
        worker.link, worker.ready, worker.answers = None, False, set()
        return gone

    def ask(self, request: Request) -> None:
        """An answer is to be generated, as soon as ``flush`` is called and somebody is there."""
        self._pending.append(request)

    def flush(self) -> None:
        """Send what is pending."""
        there = self.ready
        if not there or not self._pending:
            return
        batches: dict[int, list[Request]] = {}
        while self._pending:
            request = self._pending.popleft()
            worker = min(there, key=lambda each: (len(each.answers), each.number))
            worker.answers.add(request.answer)
            self._where[request.answer] = worker
            batches.setdefault(worker.number, []).append(
                request._replace(answer=self.session * SESSION + request.answer)
            )
        for number, requests in batches.items():
            self._send(self.workers[number], submit(requests))

    def came_back(self, worker: Worker, wire: int) -> int | None:
        """The number of an answer that has ended; None where nobody waits for it."""
        session, answer = divmod(wire, SESSION)
        if session != self.session or self._where.get(answer) is not worker:
            return None
        del self._where[answer]
        worker.answers.discard(answer)
        return answer

    def withdraw(self, answers: Collection[int]) -> None:
        """Nobody waits for these any more."""
        gone = set(answers)
        if self._pending:
            self._pending = deque(request for request in self._pending if request.answer not in gone)
        by_worker: dict[int, list[int]] = {}
        for answer in gone:
            if (worker := self._where.pop(answer, None)) is not None:
                worker.answers.discard(answer)
                by_worker.setdefault(worker.number, []).append(self.session * SESSION + answer)
        for number, numbers in by_worker.items():
            self._send(self.workers[number], withdraw(numbers))

    def start_over(self) -> None:
        """The run is rolled back: what was asked for is forgotten, and what still comes of it will not be known."""
        self.withdraw([*self._where, *(request.answer for request in self._pending)])
        self.session += 1
        self._asked_to_load = None

    def load(self, version: int, *, drain: bool) -> None:
        """New weights are in the channel."""
        self._asked_to_load = (version, drain)
        self._tell(load(version, self._kv, drain=drain))

    def load_again(self, worker: Worker) -> bool:
        """It could not get the weights, and tries again; False where it did so too often."""
        worker.failed_loads += 1
        if self._asked_to_load is not None and worker.failed_loads <= MOST_FAILED_LOADS:
            self._send(worker, load(self._asked_to_load[0], self._kv))
        return worker.failed_loads <= MOST_FAILED_LOADS

    def stop(self) -> None:
        """Also those that are still making their engines, or have just said that they are ready."""
        for worker in self.workers:
            self._send(worker, stop())

    def _tell(self, message: Message) -> None:
        for worker in self.ready:
            self._send(worker, message)

    @staticmethod
    def _send(worker: Worker, message: Message) -> None:
        if worker.link is not None:
            worker.link.send(message)


def listed(numbers: Iterable[int]) -> str:
    """Numbers for people."""
    shown = sorted(numbers)
    return ", ".join(map(str, shown[:8])) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
