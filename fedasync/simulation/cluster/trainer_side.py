"""The trainer of a cluster: it waits, steps, commits, brings weights to the servers, crashes and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log1p, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

from fedasync.core import Coordinator, Published, Step
from fedasync.rl.group_driver import CRASHED
from fedasync.runs.step_times import StepTimes
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.contention import SharedWork
from fedasync.simulation.cluster.publishing import PUBLISHING, Publishing
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.cluster.time_use import TimeUse
from fedasync.simulation.measuring import measuring
from fedasync.streams import Stream

if TYPE_CHECKING:
    from fedasync.simulation.cluster.runtime import ClusterSimulation


class TrainerSide:
    """What the trainer is at, and how long it has been.

    ``times`` holds what each step took, ``use`` tells what trainer and servers did with their time.
    """

    def __init__(self, simulation: ClusterSimulation, cluster: Cluster, settings: ClusterSettings, seed: int) -> None:
        self._simulation, self._cluster, self._settings = simulation, cluster, settings
        self._cost = cluster.trainer_cost
        self._luck = Stream(seed, "step times")
        self._switch_s = cluster.switch_s if cluster.colocated else 0.0
        self._measured = measuring(simulation.coordinator.strategy, settings.divergence, seed)
        self.publishing: Publishing = PUBLISHING[cluster.weights.order](
            cluster, simulation.rollouts, lambda: simulation.now, simulation.later, simulation.mishaps, self._loaded
        )
        self.times = StepTimes()
        self.use = TimeUse(simulation.rollouts, self.times, settings.warm_up_versions)
        self._step: Step | None = None
        """The step that waits for the trainer, or that it makes."""
        self._training = self._crashed = False
        self._syncing = False
        """It waits until servers have the new weights."""
        self._switching = False
        """… or until the GPUs of a colocated cluster generate again."""
        self._stands_still = False
        """The GPUs of a colocated cluster have stopped generating, for a step."""
        self._evaluation_is_due = self._evaluating = False
        self._work: SharedWork | None = None
        """The step that it makes, where servers slow it down."""
        self._turn = 0
        """Counts what was foreseen of that work."""
        self._free_since_s = self._training_since_s = self._sync_began_s = self._down_since_s = 0.0
        self._evaluating_since_s = 0.0

    @property
    def holds_up(self) -> bool:
        """Nothing is asked for: weights are on their way, or nobody is there to ask."""
        return self._syncing or self._crashed

    @property
    def keeps_servers_idle(self) -> bool:
        """The GPUs of a colocated cluster do not generate: they train, or switch back."""
        return self._stands_still

    def explain(self) -> str | None:
        """What it is at, in words; None when it waits for a step."""
        if self._training:
            return "the trainer is in a step"
        if self._crashed:
            return "the trainer is down"
        return f"the trainer waits: {self.publishing.explain()}" if self._syncing else None

    # -- steps -------------------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """A step is ready: it begins at once, or when the trainer is free."""
        self._step = step
        self._begin()

    def _begin(self) -> None:
        simulation, step = self._simulation, self._step
        if self._training or self._evaluating or self.holds_up or simulation.ended:
            return
        if self._evaluation_is_due:
            self._evaluate()
            return
        if step is None:
            return
        latency_s = self._cluster.trainer.latency_s
        begins_s = simulation.now + latency_s
        self._training = True
        tokens, squares, answers = simulation.sizes([arrival.lease.id for arrival in step.entering])
        seconds = self._cost.seconds(tokens, squares, answers)
        if self._cluster.trainer.spread_s:
            seconds = self._drawn(seconds, step.version)
        self.times.begin(step, seconds, tokens)
        self._spent("waiting", self._free_since_s, begins_s)
        self._training_since_s = begins_s
        crashes = simulation.mishaps.crashes
        if latency_s:
            simulation.later(latency_s, lambda: self._train(seconds, crashes))
        else:
            self._train(seconds, crashes)

    def _train(self, seconds: float, crashes: int) -> None:
        """So long the step takes if nobody slows it down."""
        simulation = self._simulation
        if crashes != simulation.mishaps.crashes:
            return
        if self._cluster.colocated:
            self._stands_still = True
            simulation.rollouts.pause(simulation.rollouts.servers, simulation.now)
            seconds += self._switch_s
        if self._cluster.contention.is_none:
            simulation.later(seconds, lambda: self._end(crashes))
            return
        self._slow_servers(self._cluster.contention.servers)
        self._work = SharedWork(seconds, simulation.now, self._slowed)
        self._foresee(crashes)

    def _end(self, crashes: int) -> None:
        """The step is done, unless the trainer has crashed in it."""
        simulation = self._simulation
        if crashes != simulation.mishaps.crashes:
            return
        now, coordinator = simulation.now, simulation.coordinator
        if self._work is not None:
            self._let_servers_go()
            self.times.took(now - self._training_since_s)
        metrics = self._learn()
        self._training, self._step = False, None
        self._spent("switching", now - self._switch_s, now)
        self._free_since_s = now
        measured = self._measure(now)
        published = coordinator.published
        events = simulation.driver.commit(now, measured)
        self.times.committed(coordinator, now, metrics)
        self.use.committed(coordinator.version, now)
        simulation.mishaps.committed()
        if self._cluster.colocated and coordinator.published == published:
            self._syncing = self._switching = True
            simulation.later(self._switch_s, self._generate_again)
        every = self._settings.evaluate_every
        if self._cluster.trainer.evaluate_s and every is not None and coordinator.version % every == 0:
            self._evaluation_is_due = True
        simulation.driver.handle(events, now)
        if self._evaluation_is_due:
            self._begin()

    def _evaluate(self) -> None:
        """Between two steps, once weights are written."""
        simulation = self._simulation
        self._evaluation_is_due, self._evaluating = False, True
        self._spent("waiting", self._free_since_s, simulation.now)
        self._evaluating_since_s = simulation.now
        crashes = simulation.mishaps.crashes
        simulation.later(self._cluster.trainer.evaluate_s, lambda: self._evaluated(crashes))

    def _evaluated(self, crashes: int) -> None:
        if crashes == self._simulation.mishaps.crashes:
            self._evaluating = False
            self._free_since_s = self._simulation.now
            self._spent("evaluating", self._evaluating_since_s, self._free_since_s)
            self._begin()

    def _drawn(self, seconds: float, version: int) -> float:
        """A lognormal time of that mean, the same for a version under every strategy."""
        variance = log1p((self._cluster.trainer.spread_s / seconds) ** 2)
        score = NormalDist().inv_cdf(self._luck.uniform(version))
        return seconds * exp(sqrt(variance) * score - variance / 2)

    def _learn(self) -> dict[str, float]:
        """Train for real on what the step takes, where something is learnt; what that says of itself."""
        learnt, step = self._simulation.learnt, self._step
        if learnt is None or step is None:
            return {}
        metrics = learnt.learning.train(learnt.take(sorted(arrival.lease.id for arrival in step.entering)))
        every = self._settings.evaluate_every
        if every is not None and (step.version + 1) % every == 0:
            metrics |= learnt.learning.evaluate()
        return metrics

    def _measure(self, now: float) -> dict[str, float] | None:
        """What the publication rule asks, of the real policies where there are some."""
        coordinator, learnt = self._simulation.coordinator, self._simulation.learnt
        if learnt is None:
            return None if self._measured is None else self._measured(coordinator, now)
        asks = coordinator.asks
        return learnt.learning.measure(asks, coordinator.published) if asks else None

    # -- contention --------------------------------------------------------------------------------------------

    @property
    def _slowed(self) -> float:
        """How many times as long a step takes as things are."""
        generates = any(server.ends and not server.paused for server in self._simulation.rollouts.servers)
        return self._cluster.contention.trainer if generates else 1.0

    def look(self) -> None:
        """Something has happened: perhaps servers have begun to generate, or ended."""
        if self._work is not None and self._slowed != self._work.times:
            self._work.change(self._simulation.now, self._slowed)
            self._foresee(self._simulation.mishaps.crashes)

    def _foresee(self, crashes: int) -> None:
        if self._work is None:
            return
        self._turn += 1
        turn = self._turn
        left_s = max(0.0, self._work.ends_s - self._simulation.now)
        self._simulation.later(left_s, lambda: self._end(crashes) if turn == self._turn else None)

    def _slow_servers(self, times: float) -> None:
        simulation = self._simulation
        for server in simulation.rollouts.servers:
            simulation.rollouts.set_slowness(server, simulation.now, server.slowness * times)

    def _let_servers_go(self) -> None:
        """The step is over, or given up."""
        self._work = None
        self._turn += 1
        self._slow_servers(1.0 / self._cluster.contention.servers)

    # -- weights -----------------------------------------------------------------------------------------------

    def publish(self, event: Published) -> None:
        """Bring the new weights to the servers."""
        if self._simulation.learnt is not None:
            self._simulation.learnt.learning.publish(event.version)
        self._sync_began_s = self._simulation.now
        if publish_s := self._cluster.weights.publish_s:
            self._syncing = True
            self._simulation.later(publish_s, lambda: self._written(event))
        else:
            self._syncing = self.publishing.holds_up
            self.publishing.begin(event.version, event.in_flight)

    def _written(self, event: Published) -> None:
        """The weights lie where servers find them."""
        self.publishing.begin(event.version, event.in_flight)
        if not self.publishing.holds_up:
            if not self._crashed:
                self._spent("syncing", self._sync_began_s, self._simulation.now)
            self._free()

    def _loaded(self) -> None:
        """The servers have the new weights, or need nothing more of the trainer."""
        if not self.publishing.holds_up:
            return
        simulation = self._simulation
        if not self._crashed:
            self._spent("syncing", self._sync_began_s, simulation.now)
        if self._switch_s:
            simulation.rollouts.pause(simulation.rollouts.servers, simulation.now)
            self._free_since_s = simulation.now
            self._switching = True
            simulation.later(self._switch_s, self._generate_again)
            return
        self._free()

    def _generate_again(self) -> None:
        """The GPUs of a colocated cluster go back to generating under the weights that they have."""
        simulation = self._simulation
        simulation.rollouts.reopen(simulation.rollouts.servers, simulation.now, None, recompute=True)
        self._switching = False
        if not self._crashed:
            self._spent("switching", self._free_since_s, simulation.now)
        self._free()

    def _free(self) -> None:
        self._syncing = self._stands_still = False
        self._free_since_s = self._simulation.now
        self._begin()

    # -- crashes -----------------------------------------------------------------------------------------------

    def crash(self, *, keeps_rollouts: bool) -> None:
        """The trainer dies, and what it knew is what it had written: the state of the coordinator at this moment.

        Weights that are on their way arrive all the same: they were written when their version was made.
        """
        simulation = self._simulation
        self._book()
        if self._work is not None:
            self._let_servers_go()
        self._crashed, self._training, self._evaluating = True, False, False
        self._down_since_s = self._free_since_s = simulation.now
        old = simulation.coordinator
        simulation.driver.coordinator = Coordinator.restore(old.strategy, old.snapshot(), simulation.log)
        self._step = simulation.coordinator.step
        if not keeps_rollouts:
            for lease in simulation.coordinator.leases:
                events = simulation.coordinator.fail(lease.id, CRASHED, simulation.now)
                simulation.driver.handle(events, simulation.now)

    def restart(self, crash: int) -> None:
        """The trainer is back from its so-manieth crash, and makes again the step that it was in."""
        simulation = self._simulation
        if crash != simulation.mishaps.crashes:
            return  # it has crashed anew at this very moment
        self._crashed = False
        self._spent("down", self._down_since_s, simulation.now)
        self._free_since_s = self._sync_began_s = simulation.now
        self._begin()

    def _book(self) -> None:
        """Write down what the trainer is at, up to now, because that ends here."""
        states: Sequence[tuple[bool, str, float]] = (
            (self._crashed, "down", self._down_since_s),
            (self._training, "training", self._training_since_s),
            (self._evaluating, "evaluating", self._evaluating_since_s),
            (self._switching, "switching", self._free_since_s),
            (self._syncing, "syncing", self._sync_began_s),
            (True, "waiting", self._free_since_s),
        )
        what, since_s = next((what, since_s) for holds, what, since_s in states if holds)
        if what == "training":  # in vain: the step is made again, if ever; or it was still to begin
            what = "lost" if since_s <= self._simulation.now else "waiting"
        self._spent(what, since_s, self._simulation.now)

    def _spent(self, what: str, from_s: float, to_s: float) -> None:
        self.times.spent(what, to_s - from_s)
