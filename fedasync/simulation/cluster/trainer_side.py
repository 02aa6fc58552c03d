"""The trainer of a cluster: it waits, steps, commits, brings weights to the servers, crashes and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedasync.core import Cancelled, Coordinator, Published, Step
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.publishing import AllAtOnce, OneByOne, Publishing
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.cluster.time_use import StepTimes, TimeUse
from fedasync.simulation.measuring import measuring

if TYPE_CHECKING:
    from fedasync.simulation.cluster.runtime import ClusterSimulation


class TrainerSide:
    """What the trainer is at, and how long it has been.

    ``times`` holds what each step took, ``use`` what trainer and servers did with their time.
    """

    def __init__(self, simulation: ClusterSimulation, cluster: Cluster, settings: ClusterSettings, seed: int) -> None:
        self._simulation, self._cluster, self._settings = simulation, cluster, settings
        self._cost = cluster.trainer_cost
        self._switch_s = cluster.switch_s if cluster.colocated else 0.0
        self._measured = measuring(simulation.coordinator.strategy, settings.divergence, seed)
        kind = AllAtOnce if cluster.weights.order == "all_at_once" or cluster.colocated else OneByOne
        self.publishing: Publishing = kind(
            cluster, simulation.rollouts, lambda: simulation.now, simulation.later, simulation.mishaps, self._loaded
        )
        self.times = StepTimes()
        self.use = TimeUse(cluster, simulation.rollouts)
        self._step: Step | None = None
        """The step that waits for the trainer, or that it makes."""
        self._training = self._crashed = False
        self._syncing = False
        """It waits until servers have the new weights."""
        self._switching = False
        """… or until the GPUs of a colocated cluster generate again."""
        self._stands_still = False
        """The GPUs of a colocated cluster have stopped generating, for a step."""
        self._free_since_s = self._training_since_s = self._sync_began_s = self._down_since_s = 0.0

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
        if step is None or self._training or self.holds_up or simulation.ended:
            return
        now = simulation.now
        self._training = True
        tokens, squares, answers = simulation.sizes([arrival.lease.id for arrival in step.entering])
        seconds = self._cost.seconds(tokens, squares, answers)
        self.times.begin(step, seconds, tokens)
        self._spent("waiting", self._free_since_s, now)
        self._training_since_s = now
        if self._cluster.colocated:
            self._stands_still = True
            simulation.rollouts.pause(simulation.rollouts.servers, now)
            seconds += self._switch_s
        crashes = simulation.mishaps.crashes
        simulation.later(seconds, lambda: self._end(crashes))

    def _end(self, crashes: int) -> None:
        """The step is done, unless the trainer has crashed in it."""
        simulation = self._simulation
        if crashes != simulation.mishaps.crashes:
            return
        now, coordinator = simulation.now, simulation.coordinator
        self._training, self._step = False, None
        self.use.trainer("training", self._training_since_s, now - self._switch_s)
        self._spent("switching", now - self._switch_s, now)
        self._free_since_s = now
        measured = None if self._measured is None else self._measured(coordinator, now)
        published = coordinator.published
        events = coordinator.commit(now, measured)
        events.sort(key=lambda event: not isinstance(event, Cancelled))  # they stop before anything is loaded
        self.times.committed(coordinator, now)
        if coordinator.version == self._settings.warm_up_versions:
            self.use.start_over(now)
        simulation.mishaps.committed()
        simulation.count_versions()
        if self._cluster.colocated and coordinator.published == published:
            self._syncing = self._switching = True
            simulation.later(self._switch_s, self._generate_again)
        simulation.handle(events)

    # -- weights -----------------------------------------------------------------------------------------------

    def publish(self, event: Published) -> None:
        """Bring the new weights to the servers."""
        self._syncing = self.publishing.holds_up
        self._sync_began_s = self._simulation.now
        self.publishing.begin(event.version, event.in_flight)

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
        self._crashed, self._training = True, False
        self._down_since_s = self._free_since_s = simulation.now
        old = simulation.coordinator
        simulation.coordinator = Coordinator.restore(old.strategy, old.snapshot(), simulation.log)
        self._step = simulation.coordinator.step
        if not keeps_rollouts:
            for lease in simulation.coordinator.leases:
                simulation.handle(simulation.coordinator.fail(lease.id, "the run crashed", simulation.now))

    def restart(self, crash: int) -> None:
        """The trainer is back from its so-manieth crash, and makes again the step that it was in."""
        simulation = self._simulation
        if crash != simulation.mishaps.crashes:
            return  # it has crashed anew at this very moment
        self._crashed = False
        self._spent("down", self._down_since_s, simulation.now)
        self._free_since_s = self._sync_began_s = simulation.now
        self._begin()

    def finish(self) -> None:
        """The run ends."""
        self._book()
        self.use.until(self._simulation.now)

    def _book(self) -> None:
        """Write down what the trainer is at, up to now, because that ends here."""
        states: Sequence[tuple[bool, str, float]] = (
            (self._crashed, "down", self._down_since_s),
            (self._training, "training", self._training_since_s),
            (self._switching, "switching", self._free_since_s),
            (self._syncing, "syncing", self._sync_began_s),
            (True, "waiting", self._free_since_s),
        )
        what, since_s = next((what, since_s) for holds, what, since_s in states if holds)
        if what == "training":  # in vain: the step is made again, if ever
            self.use.trainer(what, since_s, self._simulation.now)
            self.times.spent("lost", self._simulation.now - since_s)
        else:
            self._spent(what, since_s, self._simulation.now)

    def _spent(self, what: str, from_s: float, to_s: float) -> None:
        self.use.trainer(what, from_s, to_s)
        self.times.spent(what, to_s - from_s)
