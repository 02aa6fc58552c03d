"""What the servers did with their time, up to the last commit, and what trainer and servers did in it."""

from __future__ import annotations

from fedasync.runs.step_times import StepTimes
from fedasync.runs.time_shares import SERVERS, Shares, time_shares
from fedasync.simulation.cluster.rollouts import Rollouts


class TimeUse:
    """Seconds of the servers at two commits, that of the last version of the warm-up and the last of all."""

    def __init__(self, rollouts: Rollouts, times: StepTimes, warm_up_versions: int) -> None:
        self._servers, self._times, self._warm_up = rollouts.servers, times, warm_up_versions
        self._before = self._until = self._spent(0.0)

    def committed(self, version: int, now: float) -> None:
        """A version is there."""
        self._until = self._spent(now)
        if version == self._warm_up:
            self._before = self._until

    def shares(self) -> Shares:
        """Shares of the trainer's time, and of servers × time, as `time_shares` has them."""
        spent = {what: self._until[what] - self._before[what] for what in self._until}
        return time_shares(self._times.table(), spent, len(self._servers), self._warm_up)

    def _spent(self, now: float) -> dict[str, float]:
        parts = zip(*(server.spent_s(now) for server in self._servers), strict=True)
        return dict(zip(SERVERS, map(sum, parts), strict=False))
