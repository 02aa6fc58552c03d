"""Faults carried out: what a scenario says goes wrong, when the clock is there."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.faults import Faults, RewardStuck, ServerDown, SlowServer, TrainerCrash
from fedasync.simulation.laws import Law
from fedasync.streams import Stream

if TYPE_CHECKING:
    from fedasync.simulation.cluster.runtime import ClusterSimulation


class Mishaps:
    """The faults of one run. What is drawn is a function of the seed and of who is hit, so scenarios compare."""

    def __init__(self, simulation: ClusterSimulation, faults: Faults, cluster: Cluster, seed: int) -> None:
        self._simulation, self._faults, self._cluster = simulation, faults, cluster
        self._sync_s = cluster.sync_s
        self._fails = Stream(seed, "answer failures")
        self._loses = Stream(seed, "lost replies")
        self._syncs = Stream(seed, "failed syncs")
        self._polls = Stream(seed, "poll delays")
        self.harmless = not (faults.answer_failure_probability or faults.lost_reply_probability)
        self.crashes = 0
        self._outages: dict[int, ServerDown] = {}
        """The last outage of a server: the next one may begin at the moment at which it ends."""
        self.patience_s = inf if faults.stalled_after_s is None else faults.stalled_after_s
        """When the run is given up if no version is made before."""

    # -- by the clock ------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Enter everything that has a time."""
        faults, at = self._faults, self._simulation.later
        for down in faults.servers_down:
            at(down.at_s, partial(self._down, down))
        for slow in faults.slow_servers:
            at(slow.at_s, partial(self._slows, slow))
        for stuck in faults.reward_stuck:
            at(stuck.at_s, partial(self._sticks, stuck))
        for crash in faults.trainer_crashes:
            at(crash.at_s, partial(self._crash, crash))

    def _down(self, down: ServerDown) -> None:
        simulation = self._simulation
        server = simulation.rollouts.servers[down.server]
        self._outages[down.server] = down
        if down.for_s is not None:
            simulation.later(down.for_s, partial(self._up, down))
        if not server.is_up:
            return
        lost = simulation.rollouts.fail(server, simulation.now)
        simulation.note(f"server {down.server} died with {len(lost)} answers")
        for answer in lost:
            simulation.lose(answer, "server down")

    def _up(self, down: ServerDown) -> None:
        simulation = self._simulation
        if self._outages[down.server] is not down:
            return
        server, version = simulation.rollouts.servers[down.server], simulation.coordinator.published
        simulation.rollouts.revive(server, simulation.now, version)
        if simulation.trainer.keeps_servers_idle:
            simulation.rollouts.pause([server], simulation.now)
        simulation.note(f"server {down.server} is back with version {version}")

    def _slows(self, slow: SlowServer) -> None:
        simulation = self._simulation
        server = simulation.rollouts.servers[slow.server]
        simulation.rollouts.set_slowness(server, simulation.now, server.slowness * slow.times)
        simulation.note(f"server {slow.server} is {slow.times:g} times as slow")
        if slow.for_s is not None:
            simulation.later(slow.for_s, partial(self._recovers, slow))

    def _recovers(self, slow: SlowServer) -> None:
        simulation = self._simulation
        server = simulation.rollouts.servers[slow.server]
        simulation.rollouts.set_slowness(server, simulation.now, server.slowness / slow.times)

    def _sticks(self, stuck: RewardStuck) -> None:
        simulation = self._simulation
        until_s = inf if stuck.for_s is None else simulation.now + stuck.for_s
        simulation.note("the reward service is stuck")
        simulation.rewards.stick(until_s)

    def _crash(self, crash: TrainerCrash) -> None:
        simulation = self._simulation
        self.crashes += 1
        simulation.note("the trainer crashed" if crash.keeps_rollouts else "the whole run crashed")
        simulation.trainer.crash(keeps_rollouts=crash.keeps_rollouts)
        simulation.later(crash.restart_s, partial(simulation.trainer.restart, self.crashes))

    # -- answers -----------------------------------------------------------------------------------------------

    def goes_wrong(self, answer: int) -> bool:
        """Whether an answer that was generated does not come back; then its group has been told, or will be."""
        simulation, faults = self._simulation, self._faults
        tries = int(simulation.answers.tries(answer))
        if self._fails.uniform(answer, tries) < faults.answer_failure_probability:
            simulation.lose(answer, "answer failed")
            return True
        if self._loses.uniform(answer, tries) < faults.lost_reply_probability:
            simulation.note(f"the reply of answer {answer} was lost")
            if faults.answer_timeout_s is not None:
                simulation.later(faults.answer_timeout_s, partial(simulation.lose, answer, "reply lost"))
            return True
        return False

    # -- weights -----------------------------------------------------------------------------------------------

    def poll_s(self, version: int, place: int) -> float:
        """Seconds until a server (or all of them) learns of a version."""
        poll: Law | float = self._cluster.weights.poll_s
        if isinstance(poll, int | float):
            return float(poll)
        return poll.quantile(self._polls.uniform(version, place))

    def sync_s(self, version: int) -> float:
        """Seconds that taking the weights of a version takes."""
        times = 1.0
        for slow in self._faults.slow_syncs:
            if slow.from_version <= version <= slow.to_version:
                times *= slow.times
        return self._sync_s * times

    def sync_fails(self, version: int, place: int, attempt: int) -> bool:
        fails = self._faults.sync_fails
        if fails is None:
            return False
        return self._syncs.uniform(version * 100_000 + place, attempt) < fails.probability

    def failed_sync_s(self, version: int) -> float:
        """Seconds until a failed attempt is known to have failed."""
        fails = self._faults.sync_fails
        return self.sync_s(version) if fails is None else fails.timeout_s

    @property
    def retry_s(self) -> float:
        return 0.0 if self._faults.sync_fails is None else self._faults.sync_fails.retry_s

    def tries_again(self, version: int, attempt: int, now: float) -> bool:
        """After so many failed attempts, another one is made."""
        fails = self._faults.sync_fails
        again = fails is not None and attempt <= fails.most_retries
        end = "" if again else ": given up, servers go on with the weights that they have"
        self._simulation.note(f"bringing version {version} to the servers failed, attempt {attempt}{end}")
        return again

    # -- progress ----------------------------------------------------------------------------------------------

    def committed(self) -> None:
        """A version was made."""
        after_s = self._faults.stalled_after_s
        if after_s is not None:
            self.patience_s = self._simulation.now + after_s
