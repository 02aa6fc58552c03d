"""What the trainer and the servers did with their time."""

from __future__ import annotations

from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.rollouts import Rollouts

TRAINER = ("training", "syncing", "switching", "waiting", "down")
SERVERS = ("decoding", "prefilling", "paused", "down", "idle")


class TimeUse:
    """Seconds by what they were spent on, from time 0 or from the last ``start_over`` on."""

    def __init__(self, cluster: Cluster, rollouts: Rollouts) -> None:
        self._servers = rollouts.servers
        self._from_s = 0.0
        self._trainer = dict.fromkeys(TRAINER, 0.0)
        self._before = self._spent(0.0)
        self._end_s = 0.0

    def trainer(self, what: str, from_s: float, to_s: float) -> None:
        """The trainer did this from then to then."""
        self._trainer[what] += max(0.0, to_s - max(from_s, self._from_s))

    def start_over(self, now: float) -> None:
        """What was before counts no more."""
        self._trainer = dict.fromkeys(TRAINER, 0.0)
        for server in self._servers:
            server.advance(now)
        self._before = self._spent(now)
        self._from_s = now

    def until(self, now: float) -> None:
        """The run ends."""
        for server in self._servers:
            server.advance(now)
        self._end_s = now

    def shares(self) -> dict[str, dict[str, float]]:
        """Shares of the trainer's time, and of servers × time."""
        whole_s = self._end_s - self._from_s
        if whole_s <= 0:
            return {"trainer": dict.fromkeys(TRAINER, 0.0), "servers": dict.fromkeys(SERVERS, 0.0)}
        trainer = {what: self._trainer[what] / whole_s for what in TRAINER}
        trainer["waiting"] += max(0.0, 1.0 - sum(trainer.values()))  # since the last step
        area_s = whole_s * len(self._servers)
        spent = self._spent(self._end_s)
        servers = {what: (spent[what] - self._before[what]) / area_s for what in spent}
        servers["idle"] = max(0.0, 1.0 - sum(servers.values()))
        return {"trainer": trainer, "servers": servers}

    def _spent(self, now: float) -> dict[str, float]:
        return {
            "decoding": sum(server.decoding_s for server in self._servers),
            "prefilling": sum(server.prefilled_s(now) for server in self._servers),
            "paused": sum(server.paused_s for server in self._servers),
            "down": sum(server.down_s for server in self._servers),
        }
