"""The reward service: grades answers as they end, so many at once, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fedasync.simulation.cluster.cluster import Reward
from fedasync.simulation.laws import Constant
from fedasync.streams import Stream


class RewardService:
    """``graded`` is called with the answer's number when its reward is there."""

    def __init__(
        self,
        reward: Reward,
        seed: int,
        now: Callable[[], float],
        later: Callable[[float, Callable[[], None]], None],
        graded: Callable[[int], None],
    ) -> None:
        self.is_instant = reward.latency_s == Constant(0.0) and reward.workers is None
        self._law = reward.latency_s
        self._free = reward.workers
        self._stream = Stream(seed, "reward latency")
        self._now, self._later, self._graded = now, later, graded
        self._queue: deque[int] = deque()
        self._stuck_until_s = 0.0
        self._busy = 0

    def grade(self, answer: int) -> None:
        """An answer has come in."""
        self._queue.append(answer)
        self._go_on()

    def stick(self, until_s: float) -> None:
        """The service does nothing before then: neither what it has begun nor what comes in."""
        self.is_instant = False
        self._stuck_until_s = max(self._stuck_until_s, until_s)
        self._later(self._stuck_until_s - self._now(), self._go_on)

    def explain(self) -> str | None:
        """What waits for a reward, in words."""
        waiting = self._busy + len(self._queue)
        return f"{waiting} answers wait for their reward" if waiting else None

    def _go_on(self) -> None:
        while self._queue and (self._free is None or self._free > 0) and self._now() >= self._stuck_until_s:
            answer = self._queue.popleft()
            seconds = self._law.quantile(self._stream.uniform(answer))
            self._busy += 1
            if self._free is not None:
                self._free -= 1
            self._later(seconds, lambda answer=answer: self._end(answer))  # type: ignore[misc]

    def _end(self, answer: int) -> None:
        wait_s = self._stuck_until_s - self._now()
        if wait_s > 0:
            self._later(wait_s, lambda: self._end(answer))
            return
        self._busy -= 1
        if self._free is not None:
            self._free += 1
        self._graded(answer)
        self._go_on()
