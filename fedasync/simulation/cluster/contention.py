"""What trainer and servers that share a machine cost each other."""

from __future__ import annotations

from dataclasses import dataclass

from fedasync.core.bounds import check_real


@dataclass(frozen=True)
class Contention:
    """While the trainer trains and a server generates, both take so many times as long: ``trainer`` and ``servers``.

    Two states, and no other (ours): what processes of one machine take from each other, memory bandwidth and clock
    rates, depends on whether both sides are at work, not on how much each has to do. A server generates when a sequence
    runs on it and no weights are being loaded; one is enough for the trainer.
    """

    servers: float = 1.0
    trainer: float = 1.0

    def __post_init__(self) -> None:
        check_real("contention: servers", self.servers, 1)
        check_real("contention: trainer", self.trainer, 1)

    @property
    def is_none(self) -> bool:
        return self.servers == self.trainer == 1.0


class SharedWork:
    """Work of so many seconds that goes on at changing speed: when it will be done, and how much is left.

    ``times``: everything takes so many times as long.
    """

    def __init__(self, seconds: float, now: float, times: float) -> None:
        self._left_s, self._at_s, self.times = seconds, now, times

    @property
    def ends_s(self) -> float:
        """If nothing changes."""
        return self._at_s + self._left_s * self.times

    def change(self, now: float, times: float) -> None:
        """From now on so many times as long."""
        self._left_s = max(0.0, self._left_s - (now - self._at_s) / self.times)
        self._at_s, self.times = now, times
