"""The cluster under the virtual clock: prompts go out, answers come back, the trainer steps, servers load.

The same coordinator as everywhere decides: a lease is a prompt group, its worker the prompt. What happens on servers
lies in their own agenda (`Rollouts`); all else (training, weights, rewards, faults, time-outs) is an event of SimPy's.
Order at one instant: servers, then tools, then SimPy's events as scheduled, then time-outs.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import simpy

from fedasync.core import (
    Cancelled,
    Coordinator,
    Event,
    EventLog,
    Failed,
    Published,
    Rejected,
    Step,
    StepReady,
    Strategy,
)
from fedasync.simulation.agenda import call_at
from fedasync.simulation.cluster.answers import Answers
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.faults import Faults
from fedasync.simulation.cluster.groups import AllowShort, RequireFull
from fedasync.simulation.cluster.mishaps import Mishaps
from fedasync.simulation.cluster.prompts import Prompts, PromptStream
from fedasync.simulation.cluster.publishing import AllAtOnce, OneByOne, Publishing
from fedasync.simulation.cluster.rewards import RewardService
from fedasync.simulation.cluster.rollouts import Rollouts
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.cluster.time_use import StepTimes, TimeUse
from fedasync.simulation.measuring import measuring

HOPELESS = 1000
"""Groups in a row, beyond those in flight, that may end without being accepted before a run is given up; answers in a
row that may be lost likewise."""


class Asked(NamedTuple):
    """What a lease asks: a prompt, in which epoch, for which time."""

    prompt: int
    epoch: int
    attempt: int
    failures: int = 0
    """How many of its attempts before were the prompt's own failures."""


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, and what was done."""

    time_s: float
    what: str


class ClusterSimulation:
    """One run of a strategy on a cluster."""

    def __init__(
        self,
        strategy: Strategy,
        cluster: Cluster,
        prompts: Prompts,
        settings: ClusterSettings,
        faults: Faults,
        seed: int,
        log: EventLog | None = None,
    ) -> None:
        self.log = EventLog() if log is None else log
        self.coordinator = Coordinator(strategy, self.log)
        self.cluster, self.settings = cluster, settings
        self.answers = Answers(prompts.answers)
        self.rollouts = Rollouts(cluster, self.answers)
        self.incidents: list[Incident] = []
        self.ended = ""
        self.now = 0.0
        self.times = StepTimes()
        self._env = simpy.Environment()
        self._stream = PromptStream(prompts, seed)
        self._size = prompts.answers
        self._too_long = inf if prompts.most_prompt_tokens is None else prompts.most_prompt_tokens
        self._position = 0
        self._exhausted = False
        self._again: deque[Asked] = deque()
        """Prompts that go out once more."""
        self._asked: list[Asked] = []
        """What each lease asks."""
        self._left = array("h")
        """Answers of a lease that are still to come."""
        self._given_up: dict[int, set[int]] = {}
        """Answers that a short group does without."""
        self._tokens = array("d")
        """Tokens of a delivered group, and the sum of their squares, by answer."""
        self._squares = array("d")
        self._cost = cluster.trainer_cost
        self._step: Step | None = None
        """The step that waits for the trainer, or that it makes."""
        self._training = False
        self._crashed = False
        self._free_since_s = self._training_since_s = self._sync_began_s = 0.0
        self.use = TimeUse(cluster, self.rollouts)
        self.mishaps = Mishaps(self, faults, cluster, seed)
        kind = AllAtOnce if cluster.weights.order == "all_at_once" or cluster.colocated else OneByOne
        self._publishing: Publishing = kind(
            cluster, self.rollouts, lambda: self.now, self.later, self.mishaps, self._published
        )
        self._syncing = False
        """The trainer waits until servers have the new weights."""
        self._switching = False
        """… or until the GPUs of a colocated cluster generate again."""
        self.rewards = RewardService(cluster.reward, seed, lambda: self.now, self.later, self._graded)
        self._timed = strategy.lease_timeout_s is not None or strategy.max_staleness is not None
        self._limit_s = inf if settings.time_s is None else settings.time_s
        self._most_versions = inf if settings.versions is None else settings.versions
        self._most_updates = inf if settings.updates is None else settings.updates
        self._fruitless = 0
        self._measured = measuring(strategy, settings.divergence, seed)
        self._lost_in_row = 0
        self._down_since_s = 0.0
        self._counts_samples = getattr(strategy.admission, "limit_samples", None) is not None

    def run(self) -> None:
        """From the first prompt to the end of the run; ``ended`` says what ended it."""
        rollouts, env = self.rollouts, self._env
        self.mishaps.schedule()
        self._fill()
        while not self.ended:
            servers_s, agenda_s = rollouts.next_s, env.peek()
            next_s = servers_s if servers_s < agenda_s else agenda_s
            if self._timed and (timer_s := self.coordinator.next_timer()) is not None:
                next_s = min(next_s, timer_s)
            if next_s == inf:
                self.ended = self._standstill()
                break
            if next_s > self._limit_s:
                self.now, self.ended = self._limit_s, "time"
                break
            if next_s > self.mishaps.patience_s:
                self.now, self.ended = self.mishaps.patience_s, f"stalled: {self.explain()}"
                break
            self.now = next_s
            if servers_s == next_s:
                answer = rollouts.step(next_s)
                if answer is not None:
                    self._generated(answer)
            elif agenda_s == next_s:
                env.step()
            else:
                self._handle(self.coordinator.on_timer(next_s))
                self._fill()
            if self._publishing.draining:  # whatever happened may have ended, or stopped, the last that runs
                self._publishing.look()
                self._fill()
        self._trainer_did()
        self.use.until(self.now)

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        parts = [self.coordinator.explain(), f"{self.rollouts.running} answers are being generated"]
        down = sum(not server.is_up for server in self.rollouts.servers)
        if down:
            parts.append(f"{down} of {len(self.rollouts.servers)} servers are down")
        if self._training:
            parts.append("the trainer is in a step")
        elif self._crashed:
            parts.append("the trainer is down")
        elif self._syncing:
            parts.append(f"the trainer waits: {self._publishing.explain()}")
        if (graded := self.rewards.explain()) is not None:
            parts.append(graded)
        if self._exhausted:
            parts.append("the data set is exhausted")
        return "; ".join(parts)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call after so many seconds of virtual time, and see afterwards who may start."""

        def ring(_: simpy.Event) -> None:
            call()
            self._fill()

        call_at(self._env, self.now + seconds, ring)

    def note(self, what: str) -> None:
        """Something went wrong."""
        self.incidents.append(Incident(self.now, what))

    # -- prompts go out ----------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give out what admission allows."""
        if self._syncing or self.ended or self._crashed:
            return
        while (slots := self.coordinator.slots) > 0 and not self.ended:  # a refused prompt leaves its slot to the next
            for _ in range(slots):
                if not self._ask():
                    return

    def _ask(self) -> bool:
        """Send the next prompt to the servers; False when none is there or none may go."""
        asked = self._next_prompt()
        if asked is None:
            return False
        passed_over = []
        while asked is not None and self.coordinator.has_to_wait(asked.prompt):  # it has its turn of this round
            passed_over.append(asked)
            asked = self._next_prompt()
        self._again.extendleft(reversed(passed_over))
        if asked is None:
            return False
        lease = self.coordinator.request(asked.prompt, self.now, self._size)
        if lease is None:
            self._again.appendleft(asked)
            return False
        group = self._stream.group(asked.prompt, asked.epoch, asked.attempt)
        numbers = self.answers.add(asked.prompt, lease.base_version, group)
        self._asked.append(asked)
        self._left.append(self._size)
        self._tokens.append(0.0)
        self._squares.append(0.0)
        if group.prompt_tokens > self._too_long:
            self._handle(self.coordinator.fail(lease.id, "prompt too long", self.now))
            return True
        if group.turns is None:
            self.rollouts.place_group(numbers, group.prompt_tokens, group.tokens, self.now)
        else:
            for answer in numbers:
                self.rollouts.place(answer, self.now)
        return True

    def _next_prompt(self) -> Asked | None:
        if self._again:
            return self._again.popleft()
        found = self._stream.prompt_at(self._position)
        if found is None:
            self._exhausted = True
            return None
        self._position += 1
        return Asked(*found, 0)

    def _ask_again(self, lease_id: int, *, counts: bool) -> None:
        """The prompt goes back to the queue; ``counts``: as a failed attempt, of which there may be so many."""
        asked = self._asked[lease_id]
        failures = asked.failures + counts
        if counts and failures >= self.cluster.most_attempts:
            self.note(f"prompt {asked.prompt} is given up after {failures} attempts")
            return
        self._again.append(asked._replace(attempt=asked.attempt + 1, failures=failures))

    # -- answers come back -------------------------------------------------------------------------------------

    def _generated(self, answer: int) -> None:
        """An answer has its last token."""
        if not self.mishaps.harmless:
            if self.mishaps.goes_wrong(answer):
                self._fill()
                return
            self._lost_in_row = 0
        self.answers.end_s[answer] = self.now
        if self._counts_samples:
            self.coordinator.sample_done(answer // self._size)
            self._fill()
        if self.rewards.is_instant:
            self._graded(answer)
        else:
            self.rewards.grade(answer)

    def _graded(self, answer: int) -> None:
        lease = answer // self._size
        if not self.coordinator.is_in_flight(lease):
            return
        self._left[lease] -= 1
        if not self._left[lease]:
            self._deliver(lease)
            self._fill()

    def lose(self, answer: int, why: str) -> None:
        """An answer will not come: what becomes of its group is a policy."""
        lease = answer // self._size
        if not self.coordinator.is_in_flight(lease):
            return
        self._lost_in_row += 1
        most = self.coordinator.strategy.admission.most_in_flight * self._size
        if self._lost_in_row > HOPELESS + most:
            self.ended = f"nothing accepted: the last {self._lost_in_row} answers were lost ({why}); {self.explain()}"
            return
        policy = self.cluster.partial_groups
        if isinstance(policy, RequireFull):
            self._handle(self.coordinator.fail(lease, why, self.now))
        elif isinstance(policy, AllowShort):
            given_up = self._given_up.setdefault(lease, set())
            given_up.add(answer)
            self.coordinator.sample_done(lease)
            self._left[lease] -= 1
            if self._size - len(given_up) < policy.least:
                self._handle(self.coordinator.fail(lease, why, self.now))
            elif not self._left[lease]:
                self._deliver(lease)
        else:
            self.answers.restart(answer)
            self.rollouts.place(answer, self.now)

    def _deliver(self, lease: int) -> None:
        answers, first = self.answers, lease * self._size
        prompt_tokens, goal, observed = answers.prompt_tokens[lease], answers.goal, answers.observed
        given_up = self._given_up.pop(lease, ()) if self._given_up else ()
        tokens = squares = 0
        for answer in range(first, first + self._size):
            if answer not in given_up:
                length = prompt_tokens + goal[answer] + observed[answer]
                tokens += length
                squares += length * length
        self._tokens[lease], self._squares[lease] = tokens, squares
        self._handle(self.coordinator.deliver(lease, self.now))

    def _stop(self, lease: int) -> None:
        """Nobody waits for a lease any more: its answers stop where they are."""
        first, answers = lease * self._size, self.answers
        given_up = self._given_up.pop(lease, ()) if self._given_up else ()
        for answer in range(first, first + self._size):
            if answers.end_s[answer] != answers.end_s[answer] and answer not in given_up:
                self.rollouts.withdraw(answer, self.now)

    # -- what the coordinator says -----------------------------------------------------------------------------

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepReady):
                self._step = event.step
                self._train()
            elif isinstance(event, Published):
                self._syncing = self._publishing.holds_up
                self._sync_began_s = self.now
                self._publishing.begin(event.version, event.in_flight)
            elif isinstance(event, Cancelled):
                self._stop(event.lease.id)
                if event.reason != "stale" or self.cluster.dropped == "requeue":
                    self._ask_again(event.lease.id, counts=False)
            elif isinstance(event, Failed):
                self._stop(event.lease.id)
                if event.reason != "prompt too long":
                    self._ask_again(event.lease.id, counts=event.reason != "the run crashed")
                self._count_fruitless(event.reason)
            elif isinstance(event, Rejected):
                if not event.ignored:
                    self._count_fruitless(event.reason)
                    if self.cluster.dropped == "requeue":
                        self._ask_again(event.lease_id, counts=False)
            else:
                self._fruitless = 0

    def _count_fruitless(self, reason: str) -> None:
        self._fruitless += 1
        if self._fruitless > HOPELESS + self.coordinator.strategy.admission.most_in_flight:
            self.ended = (
                f"nothing accepted: the last {self._fruitless} groups brought nothing (the last one: {reason}); "
                f"{self.explain()}"
            )

    # -- the trainer -------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Begin the step that waits, if the trainer is free."""
        step = self._step
        if step is None or self._training or self._syncing or self._crashed or self.ended:
            return
        self._training = True
        leases = [arrival.lease.id for arrival in step.entering]
        tokens = sum(self._tokens[lease] for lease in leases)
        squares = sum(self._squares[lease] for lease in leases)
        seconds = self._cost.seconds(tokens, squares, self._size * len(leases))
        self.times.begin(step, self.now, seconds, self.now - self._free_since_s, tokens)
        self.use.trainer("waiting", self._free_since_s, self.now)
        self._training_since_s = self.now
        if self.cluster.colocated:
            self.rollouts.pause(self.rollouts.servers, self.now)
            seconds += self.cluster.switch_s
        number = self.mishaps.crashes
        self.later(seconds, lambda: self._trained(number))

    def _trained(self, number: int) -> None:
        if number != self.mishaps.crashes:
            return  # the trainer crashed in this step
        coordinator = self.coordinator
        self._training = False
        self._step = None
        switch_s = self.cluster.switch_s if self.cluster.colocated else 0.0
        self.use.trainer("training", self._training_since_s, self.now - switch_s)
        self.use.trainer("switching", self.now - switch_s, self.now)
        self._free_since_s = self.now
        measured = None if self._measured is None else self._measured(coordinator, self.now)
        published = coordinator.published
        events = coordinator.commit(self.now, measured)
        events.sort(key=lambda event: not isinstance(event, Cancelled))  # they stop before anything is loaded
        self.times.committed(coordinator, self.now)
        if coordinator.version == self.settings.warm_up_versions:
            self.use.start_over(self.now)
        self.mishaps.committed()
        if coordinator.version >= self._most_versions:
            self.ended = "versions"
        elif coordinator.ledger.consumed >= self._most_updates:
            self.ended = "updates"
        if self.cluster.colocated and coordinator.published == published:
            self._syncing = self._switching = True
            self.later(switch_s, self._generate_again)
        self._handle(events)

    def _generate_again(self) -> None:
        """The GPUs of a colocated cluster go back to generating under the old weights."""
        self.rollouts.reopen(self.rollouts.servers, self.now, None, recompute=True)
        self._switching = False
        if not self._crashed:
            self.use.trainer("switching", self._free_since_s, self.now)
        self._synced()

    def _published(self) -> None:
        """The servers have the new weights, or need nothing more of the trainer."""
        if not self._publishing.holds_up:
            return
        if not self._crashed:
            self.use.trainer("syncing", self._sync_began_s, self.now)
        self.times.synced(self.now - self._sync_began_s)
        switch_s = self.cluster.switch_s
        if self.cluster.colocated and switch_s:
            self.rollouts.pause(self.rollouts.servers, self.now)
            self._free_since_s = self.now
            self._switching = True
            self.later(switch_s, self._generate_again)
            return
        self._synced()

    def _synced(self) -> None:
        self._syncing = False
        self._free_since_s = self.now
        self._train()

    def _trainer_did(self) -> None:
        """Book what the trainer is at, up to now, because that ends here."""
        if self._crashed:
            self.use.trainer("down", self._down_since_s, self.now)
        elif self._training:
            self.use.trainer("training", self._training_since_s, self.now)
        elif self._switching:
            self.use.trainer("switching", self._free_since_s, self.now)
        elif self._syncing:
            self.use.trainer("syncing", self._sync_began_s, self.now)
        else:
            self.use.trainer("waiting", self._free_since_s, self.now)

    # -- faults ------------------------------------------------------------------------------------------------

    @property
    def keeps_servers_idle(self) -> bool:
        """The GPUs of a colocated cluster do not generate: they train, or switch back."""
        return self.cluster.colocated and (self._training or self._syncing)

    def crash(self, *, keeps_rollouts: bool) -> None:
        """The trainer dies, and what it knew is what it had written: the state of the coordinator at this moment.

        Weights that are on their way arrive all the same: they were written when their version was made.
        """
        self._trainer_did()
        self._crashed = True
        self._down_since_s = self.now
        self._training = False
        state = self.coordinator.snapshot()
        self.coordinator = Coordinator.restore(self.coordinator.strategy, state, self.log)
        self._step = self.coordinator.step
        self._free_since_s = self.now
        if not keeps_rollouts:
            for lease in self.coordinator.leases:
                self._handle(self.coordinator.fail(lease.id, "the run crashed", self.now))

    def restart(self, crash: int) -> None:
        """The trainer is back from its so-manieth crash, and makes again the step that it was in."""
        if crash != self.mishaps.crashes:
            return  # it has crashed anew at this very moment
        self._crashed = False
        self.use.trainer("down", self._down_since_s, self.now)
        self._free_since_s = self._sync_began_s = self.now
        self._train()

    def _standstill(self) -> str:
        """Nothing will ever happen any more."""
        if self._exhausted and not self.coordinator.in_flight:
            return f"data exhausted: {self.explain()}"
        return f"stalled: {self.explain()}"
