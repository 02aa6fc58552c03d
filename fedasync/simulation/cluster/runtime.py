"""The cluster under the virtual clock: prompts go out, answers come back, the trainer steps, servers load.

The same coordinator as everywhere decides: a lease is a prompt group, its worker the prompt. What happens on servers
lies in their own agenda (`Rollouts`); all else (training, weights, rewards, faults, time-outs) is an event of SimPy's.
Order at one instant: servers, then tools, then SimPy's events as scheduled, then time-outs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import simpy

from fedasync.core import (
    Cancelled,
    Coordinator,
    Event,
    EventLog,
    Failed,
    Published,
    Rejected,
    StepReady,
    Strategy,
)
from fedasync.simulation.agenda import call_at
from fedasync.simulation.cluster.answers import Answers
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.faults import Faults
from fedasync.simulation.cluster.groups import AllowShort, RequireFull
from fedasync.simulation.cluster.mishaps import Mishaps
from fedasync.simulation.cluster.prompt_queue import Asked, PromptQueue
from fedasync.simulation.cluster.prompts import Prompts, PromptStream
from fedasync.simulation.cluster.rewards import RewardService
from fedasync.simulation.cluster.rollouts import Rollouts
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.cluster.trainer_side import TrainerSide
from fedasync.streams import Stream

HOPELESS = 1000
"""Groups in a row, beyond those in flight, that may end without being accepted before a run is given up; answers in a
row that may be lost likewise."""


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
        self.answers = Answers(prompts.answers)
        self.rollouts = Rollouts(cluster, self.answers)
        self.incidents: list[Incident] = []
        self.ended = ""
        self.now = 0.0
        self._env = simpy.Environment()
        self._cluster, self._settings = cluster, settings
        self._queue = PromptQueue(PromptStream(prompts, seed), cluster.most_attempts)
        self._size = prompts.answers
        self._too_long = inf if prompts.most_prompt_tokens is None else prompts.most_prompt_tokens
        self._filtered_share = prompts.filtered_share
        self._filter_draws = Stream(seed, "filtered groups")
        self._asked: list[Asked] = []
        """What each lease asks."""
        self._left = array("i")
        """Answers of a lease that are still to come."""
        self._given_up: dict[int, set[int]] = {}
        """Answers that a short group does without."""
        self._delivered = array("i")
        """Answers of a delivered group, their tokens, and the sum of the squares of those."""
        self._tokens = array("d")
        self._squares = array("d")
        self.mishaps = Mishaps(self, faults, cluster, seed)
        self.trainer = TrainerSide(self, cluster, settings, seed)
        self.rewards = RewardService(cluster.reward, seed, lambda: self.now, self.later, self._graded)
        self._timed = strategy.lease_timeout_s is not None
        self._fruitless = self._lost_in_row = 0
        self._counts_samples = getattr(strategy.admission, "limit_samples", None) is not None

    def run(self) -> None:
        """From the first prompt to the end of the run; ``ended`` says what ended it."""
        rollouts, env, publishing = self.rollouts, self._env, self.trainer.publishing
        limit_s = inf if self._settings.time_s is None else self._settings.time_s
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
            if next_s > limit_s:
                self.now, self.ended = limit_s, "time"
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
                self.handle(self.coordinator.on_timer(next_s))
                self._fill()
            if publishing.draining:  # whatever happened may have ended, or stopped, the last that runs
                publishing.look()
                self._fill()
        self.trainer.finish()

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        parts = [self.coordinator.explain(), f"{self.rollouts.running} answers are being generated"]
        down = sum(not server.is_up for server in self.rollouts.servers)
        if down:
            parts.append(f"{down} of {len(self.rollouts.servers)} servers are down")
        if (trainer := self.trainer.explain()) is not None:
            parts.append(trainer)
        if (graded := self.rewards.explain()) is not None:
            parts.append(graded)
        if self._queue.exhausted:
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
        if self.trainer.holds_up or self.ended:
            return
        while (slots := self.coordinator.slots) > 0 and not self.ended:  # a refused prompt leaves its slot to the next
            for _ in range(slots):
                if not self._ask():
                    return

    def _ask(self) -> bool:
        """Send the next prompt to the servers; False when none is there or none may go."""
        asked = self._queue.next(self.coordinator.has_to_wait)
        if asked is None:
            return False
        lease = self.coordinator.request(asked.prompt, self.now, self._size)
        if lease is None:
            self._queue.put_back(asked)
            return False
        group = self._queue.group(asked)
        numbers = self.answers.add(asked.prompt, lease.base_version, group)
        self._asked.append(asked)
        self._left.append(self._size)
        self._delivered.append(0)
        self._tokens.append(0.0)
        self._squares.append(0.0)
        if group.prompt_tokens > self._too_long:
            self.handle(self.coordinator.fail(lease.id, "prompt too long", self.now))
            return True
        if group.turns is None:
            self.rollouts.place_group(numbers, group.prompt_tokens, group.tokens, self.now)
        else:
            for answer in numbers:
                self.rollouts.place(answer, self.now)
        return True

    def _ask_again(self, lease_id: int, *, failed: bool) -> None:
        given_up = self._queue.ask_again(self._asked[lease_id], failed=failed)
        if given_up is not None:
            self.note(given_up)

    # -- answers come back -------------------------------------------------------------------------------------

    def _generated(self, answer: int) -> None:
        """An answer has its last token."""
        if not self.mishaps.harmless and self.mishaps.goes_wrong(answer):
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
        policy = self._cluster.partial_groups
        if isinstance(policy, RequireFull):
            self.handle(self.coordinator.fail(lease, why, self.now))
        elif isinstance(policy, AllowShort):
            given_up = self._given_up.setdefault(lease, set())
            given_up.add(answer)
            self.coordinator.sample_done(lease)
            self._left[lease] -= 1
            if self._size - len(given_up) < policy.least:
                self.handle(self.coordinator.fail(lease, why, self.now))
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
        answers.close(lease)
        self._delivered[lease] = self._size - len(given_up)
        self._tokens[lease], self._squares[lease] = tokens, squares
        self.handle(self.coordinator.deliver(lease, self.now, self._filter(lease)))

    def _filter(self, lease: int) -> str | None:
        """Whether a group teaches nothing: as a defect, in words."""
        if not self._filtered_share:
            return None
        asked = self._asked[lease]
        drawn = self._filter_draws.uniform(asked.prompt, (asked.epoch << 16) + asked.attempt)
        return "filtered" if drawn < self._filtered_share else None

    def _stop(self, leases: Sequence[int]) -> None:
        """Nobody waits for these leases any more: their answers stop where they are."""
        end_s, unfinished = self.answers.end_s, []
        for lease in leases:
            given_up = self._given_up.pop(lease, ()) if self._given_up else ()
            for answer in range(lease * self._size, (lease + 1) * self._size):
                if end_s[answer] != end_s[answer] and answer not in given_up:
                    unfinished.append(answer)
        self.rollouts.withdraw(unfinished, self.now)
        for lease in leases:
            self.answers.close(lease)

    # -- what the coordinator says -----------------------------------------------------------------------------

    def handle(self, events: list[Event]) -> None:
        """Do what the coordinator says."""
        if stopped := [event.lease.id for event in events if isinstance(event, (Cancelled, Failed))]:
            self._stop(stopped)  # all of them, before anybody is let in to their places
        for event in events:
            if isinstance(event, StepReady):
                self.trainer.take(event.step)
            elif isinstance(event, Published):
                self.trainer.publish(event)
            elif isinstance(event, Cancelled):
                if event.reason != "stale" or self._cluster.dropped == "requeue":
                    self._ask_again(event.lease.id, failed=False)
            elif isinstance(event, Failed):
                if event.reason != "prompt too long":
                    self._ask_again(event.lease.id, failed=event.reason != "the run crashed")
                self._count_fruitless(event.reason)
            elif isinstance(event, Rejected):
                if not event.ignored:
                    self._count_fruitless(event.reason)
                    if event.reason == "stale" and self._cluster.dropped == "requeue":
                        self._ask_again(event.lease_id, failed=False)
            else:
                self._fruitless = 0

    def _count_fruitless(self, reason: str) -> None:
        self._fruitless += 1
        if self._fruitless > HOPELESS + self.coordinator.strategy.admission.most_in_flight:
            self.ended = (
                f"nothing accepted: the last {self._fruitless} groups brought nothing (the last one: {reason}); "
                f"{self.explain()}"
            )

    # -- for the trainer ---------------------------------------------------------------------------------------

    def sizes(self, leases: Sequence[int]) -> tuple[float, float, int]:
        """Tokens of delivered groups, the sum of the squares of their answers' tokens, and how many answers."""
        return (
            sum(self._tokens[lease] for lease in leases),
            sum(self._squares[lease] for lease in leases),
            sum(self._delivered[lease] for lease in leases),
        )

    def count_versions(self) -> None:
        """A version was made, perhaps the last."""
        settings, coordinator = self._settings, self.coordinator
        if settings.versions is not None and coordinator.version >= settings.versions:
            self.ended = "versions"
        elif settings.updates is not None and coordinator.ledger.consumed >= settings.updates:
            self.ended = "updates"

    def _standstill(self) -> str:
        """Nothing will ever happen any more."""
        if self._queue.exhausted and not self.coordinator.in_flight:
            return f"data exhausted: {self.explain()}"
        return f"stalled: {self.explain()}"
