"""The cluster under the virtual clock: prompts go out, answers come back, the trainer steps, servers load.

The same coordinator and driver (`GroupDriver`) as everywhere decide: a lease is a prompt group, its worker the prompt.
What happens on servers lies in their own agenda (`Rollouts`); all else (training, weights, rewards, faults, time-outs)
is an event of SimPy's.
Order at one instant: servers, then tools, then SimPy's events as scheduled, then time-outs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from math import inf

import simpy

from fedasync.core import Coordinator, EventLog, Lease, Published, Step, Strategy
from fedasync.rl.group_driver import TOO_LONG, GroupDriver
from fedasync.rl.prompt_queue import Asked, PromptQueue
from fedasync.simulation.agenda import call_at
from fedasync.simulation.cluster.answers import Answers
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.faults import Faults
from fedasync.simulation.cluster.learning import LearnedAnswers, Learning
from fedasync.simulation.cluster.mishaps import Mishaps
from fedasync.simulation.cluster.prompts import Prompts, PromptStream
from fedasync.simulation.cluster.rewards import RewardService
from fedasync.simulation.cluster.rollouts import Rollouts
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.cluster.trainer_side import TrainerSide
from fedasync.streams import Stream


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
        learning: Learning | None = None,
    ) -> None:
        self.log = EventLog() if log is None else log
        self._stream = PromptStream(prompts, seed)
        queue = PromptQueue(self._stream.order, cluster.most_attempts)
        self.answers = Answers(prompts.answers)
        self.learnt = None if learning is None else LearnedAnswers(learning, self.answers, queue.upcoming)
        """None: timing only."""
        self.rollouts = Rollouts(cluster, self.answers, self.learnt)
        self.incidents: list[Incident] = []
        self.now = 0.0
        self._env = simpy.Environment()
        self._cluster, self._settings = cluster, settings
        self.driver = GroupDriver(
            Coordinator(strategy, self.log),
            queue,
            prompts.answers,
            self,
            partial_groups=cluster.partial_groups,
            dropped=cluster.dropped,
            versions=inf if settings.versions is None else settings.versions,
            updates=inf if settings.updates is None else settings.updates,
        )
        self._size = prompts.answers
        self._too_long = inf if prompts.most_prompt_tokens is None else prompts.most_prompt_tokens
        self._filtered_share = prompts.filtered_share
        self._filter_draws = Stream(seed, "filtered groups")
        self._delivered = array("i")
        """Answers of a delivered group, their tokens, and the sum of the squares of those."""
        self._tokens = array("d")
        self._squares = array("d")
        self.mishaps = Mishaps(self, faults, cluster, seed)
        self.trainer = TrainerSide(self, cluster, settings, seed)
        self.rewards = RewardService(cluster.reward, seed, lambda: self.now, self.later, self._graded)
        self._timed = strategy.lease_timeout_s is not None

    @property
    def coordinator(self) -> Coordinator:
        return self.driver.coordinator

    @property
    def ended(self) -> str:
        """What ended the run; empty while it goes on."""
        return self.driver.ended

    def run(self) -> None:
        """From the first prompt to the end of the run; ``ended`` says what ended it."""
        rollouts, env, publishing = self.rollouts, self._env, self.trainer.publishing
        limit_s = inf if self._settings.time_s is None else self._settings.time_s
        self.mishaps.schedule()
        driver, contends = self.driver, not self._cluster.contention.is_none
        driver.fill(0.0)
        while not driver.ended:
            servers_s, agenda_s = rollouts.next_s, env.peek()
            next_s = servers_s if servers_s < agenda_s else agenda_s
            if self._timed and (timer_s := self.coordinator.next_timer()) is not None:
                next_s = min(next_s, timer_s)
            if next_s == inf:
                driver.ended = self._standstill()
                break
            if next_s > limit_s:
                self.now, driver.ended = limit_s, "time"
                break
            if next_s > self.mishaps.patience_s:
                self.now, driver.ended = self.mishaps.patience_s, f"stalled: {self.explain()}"
                break
            self.now = next_s
            if servers_s == next_s:
                answer = rollouts.step(next_s)
                if answer is not None:
                    self._generated(answer)
            elif agenda_s == next_s:
                env.step()
            else:
                driver.ring(next_s)
                driver.fill(next_s)
            if publishing.draining:  # whatever happened may have ended, or stopped, the last that runs
                publishing.look()
                driver.fill(next_s)
            if contends:
                self.trainer.look()
        rollouts.until(self.now)

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
        if self.driver.queue.exhausted:
            parts.append("the data set is exhausted")
        return "; ".join(parts)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call after so many seconds of virtual time, and see afterwards who may start."""

        def ring(_: simpy.Event) -> None:
            call()
            self.driver.fill(self.now)

        call_at(self._env, self.now + seconds, ring)

    def note(self, what: str) -> None:
        """Something went wrong."""
        self.incidents.append(Incident(self.now, what))

    # -- answers -----------------------------------------------------------------------------------------------

    def _generated(self, answer: int) -> None:
        """An answer has its last token."""
        if self.learnt is not None and (failure := self.learnt.failure(answer)) is not None:
            self.driver.lose(answer, failure.words, self.now, own_fault=failure.own_fault)
            self.driver.fill(self.now)
            return
        if not self.mishaps.harmless and self.mishaps.goes_wrong(answer):
            self.driver.fill(self.now)
            return
        self.answers.end_s[answer] = self.now
        self.driver.generated(answer, self.now)
        if self.rewards.is_instant:
            self._graded(answer)
        else:
            self.rewards.grade(answer)

    def _graded(self, answer: int) -> None:
        self.driver.complete(answer, self.now)

    def lose(self, answer: int, why: str) -> None:
        """An answer will not come."""
        self.driver.lose(answer, why, self.now)

    # -- what the driver wants ---------------------------------------------------------------------------------

    @property
    def holds_up(self) -> bool:
        return self.trainer.holds_up

    def start(self, lease: Lease, asked: Asked, now: float) -> str | None:
        """Send the lease's answers to the servers."""
        if self.learnt is None:
            group = self._stream.group(asked.prompt, asked.epoch, asked.attempt)
        else:
            group = self.learnt.ask(lease.id, asked.prompt, asked.epoch)
        numbers = self.answers.add(asked.prompt, lease.base_version, group)
        self._delivered.append(0)
        self._tokens.append(0.0)
        self._squares.append(0.0)
        if group.prompt_tokens > self._too_long:
            self.dropped(lease.id)
            return TOO_LONG
        if group.turns is None:
            self.rollouts.place_group(numbers, group.prompt_tokens, group.tokens, now)
        else:
            for answer in numbers:
                self.rollouts.place(answer, now)
        return None

    def again(self, answer: int, now: float) -> None:
        self.answers.restart(answer)
        self.rollouts.place(answer, now)

    def stop(self, leases: Sequence[int], left_out: Container[int], now: float) -> None:
        """Answers stop where they are."""
        end_s, unfinished = self.answers.end_s, []
        for lease in leases:
            for answer in range(lease * self._size, (lease + 1) * self._size):
                if end_s[answer] != end_s[answer] and answer not in left_out:
                    unfinished.append(answer)
        self.rollouts.withdraw(unfinished, now)
        for lease in leases:
            self.answers.close(lease)
            self.dropped(lease)

    def dropped(self, lease: int) -> None:
        if self.learnt is not None:
            self.learnt.drop([lease])

    def delivers(self, lease: int, left_out: Collection[int], now: float) -> str | None:
        """Weigh a group; whether it teaches nothing, as a defect."""
        answers, first = self.answers, lease * self._size
        prompt_tokens, goal, observed = answers.prompt_tokens[lease], answers.goal, answers.observed
        tokens = squares = 0
        for answer in range(first, first + self._size):
            if answer not in left_out:
                length = prompt_tokens + goal[answer] + observed[answer]
                tokens += length
                squares += length * length
        if self.learnt is not None:
            self.learnt.complete(lease, left_out)
        answers.close(lease)
        self._delivered[lease] = self._size - len(left_out)
        self._tokens[lease], self._squares[lease] = tokens, squares
        if not self._filtered_share:
            return None
        asked = self.driver.asked[lease]
        drawn = self._filter_draws.uniform(asked.prompt, (asked.epoch << 16) + asked.attempt)
        return "filtered" if drawn < self._filtered_share else None

    def take(self, step: Step, now: float) -> None:
        self.trainer.take(step)

    def publish(self, event: Published, now: float) -> None:
        self.trainer.publish(event)

    # -- for the trainer ---------------------------------------------------------------------------------------

    def sizes(self, leases: Sequence[int]) -> tuple[float, float, int]:
        """Tokens of delivered groups, the sum of the squares of their answers' tokens, and how many answers."""
        return (
            sum(self._tokens[lease] for lease in leases),
            sum(self._squares[lease] for lease in leases),
            sum(self._delivered[lease] for lease in leases),
        )

    def _standstill(self) -> str:
        """Nothing will ever happen any more."""
        if self.driver.queue.exhausted and not self.coordinator.in_flight:
            return f"data exhausted: {self.explain()}"
        return f"stalled: {self.explain()}"
