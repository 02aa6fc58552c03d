"""The choreography of a run on prompts: what goes out, what becomes of answers, losses and steps. No clock.

A runtime says what happened, and when; the driver asks the coordinator and says what to do:

    driver.fill(now)                         # leases for prompts; each comes as runtime.start(…)
    driver.complete(answer, now)             # an answer is there, and graded
    driver.lose(answer, why, now)            # it will never be: what becomes of its group is a policy
    driver.ring(now)                         # the coordinator's time limits
    driver.commit(now, measured)             # the step that runtime.take(…) was given has become a version

A lease is a prompt with its ``answers``, its worker the prompt's number; an answer's number is lease × answers + its
place in the group. Runtimes that generate under a virtual clock and for real have this one driver.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from math import inf
from typing import Any, Literal, Protocol

from fedasync.core import Cancelled, Coordinator, Event, Failed, Lease, Published, Rejected, Step, StepReady
from fedasync.rl.partial_groups import AllowShort, PartialGroups, RequireFull
from fedasync.rl.prompt_queue import Asked, PromptQueue

Dropped = Literal["replace", "requeue"]

HOPELESS = 1000
"""Groups in a row, beyond those in flight, that may end without being accepted before a run is given up; answers in a
row that may be lost likewise."""
TOO_LONG = "prompt too long"
"""Why a group fails whose prompt no model can take: it is not asked again."""
CRASHED = "the run crashed"
"""Why groups fail that were in flight when a run ended: they are asked again, and it is no failure of theirs."""


class Runtime(Protocol):
    """What the driver wants of whoever has the clock, generates and trains."""

    @property
    def holds_up(self) -> bool:
        """Nothing may be given out now, whatever admission says."""
        ...

    def start(self, lease: Lease, asked: Asked, now: float) -> str | None:
        """Generate the lease's answers; in words, why none of them can be, and None where they can."""
        ...

    def again(self, answer: int, now: float) -> None:
        """Generate a lost answer once more, from its prompt."""
        ...

    def stop(self, leases: Sequence[int], left_out: Container[int], now: float) -> None:
        """Nobody waits any more for these leases; answers that are ``left_out`` have stopped before."""
        ...

    def delivers(self, lease: int, left_out: Collection[int], now: float) -> str | None:
        """All answers of a group are there but those ``left_out``; a defect in words rejects it."""
        ...

    def dropped(self, lease: int) -> None:
        """A group that was delivered will not be trained."""
        ...

    def take(self, step: Step, now: float) -> None:
        """Train on these groups, and call ``commit``."""
        ...

    def publish(self, event: Published, now: float) -> None:
        """Bring a version to those who generate."""
        ...

    def note(self, what: str) -> None:
        """Something went wrong."""
        ...

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        ...


class GroupDriver:
    """One run's choreography.

    It has ``ended``, and says why, with ``versions`` versions or ``updates`` trained groups.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        queue: PromptQueue,
        answers: int,
        runtime: Runtime,
        *,
        partial_groups: PartialGroups,
        dropped: Dropped = "replace",
        versions: float = inf,
        updates: float = inf,
    ) -> None:
        self.coordinator = coordinator
        self.queue = queue
        self.answers = answers
        self.ended = ""
        self.asked: dict[int, Asked] = {}
        """What each lease asks that is in flight or waits for the trainer."""
        self._runtime = runtime
        self._partial_groups, self._requeues = partial_groups, dropped == "requeue"
        self._most_versions, self._most_updates = versions, updates
        self._left: dict[int, int] = {}
        """Answers of a lease in flight that are still to come."""
        self._given_up: dict[int, set[int]] = {}
        """Answers that a short group does without."""
        self._own_fault: dict[int, bool] = {}
        """Of leases in flight that lost an answer: whether one was lost by a fault of the prompt's own."""
        self._fruitless = self._lost_in_row = 0
        self._counts_samples = getattr(coordinator.strategy.admission, "limit_samples", None) is not None

    # -- prompts go out ----------------------------------------------------------------------------------------

    def fill(self, now: float) -> None:
        """Give out what admission allows."""
        if self._runtime.holds_up:
            return
        while not self.ended and (slots := self.coordinator.slots) > 0:  # a refused prompt leaves its slot to the next
            for _ in range(slots):
                if not self._ask(now):
                    return

    def _ask(self, now: float) -> bool:
        """Send the next prompt; False when none is there or none may go."""
        asked = self.queue.next(self.coordinator.has_to_wait)
        if asked is None:
            return False
        lease = self.coordinator.request(asked.prompt, now, self.answers)
        if lease is None:
            self.queue.put_back(asked)
            return False
        self.asked[lease.id] = asked
        self._left[lease.id] = self.answers
        if (refusal := self._runtime.start(lease, asked, now)) is not None:
            self.handle(self.coordinator.fail(lease.id, refusal, now), now)
        return True

    def _ask_again(self, lease_id: int, *, failed: bool) -> None:
        given_up = self.queue.ask_again(self.asked[lease_id], failed=failed)
        if given_up is not None:
            self._runtime.note(given_up)

    # -- answers come back -------------------------------------------------------------------------------------

    def generated(self, answer: int, now: float) -> None:
        """An answer has its last token, and its slot is free; its grade may be still to come (``complete``)."""
        self._lost_in_row = 0
        if self._counts_samples:
            self.coordinator.sample_done(answer // self.answers)
            self.fill(now)

    def complete(self, answer: int, now: float) -> None:
        """An answer is there, and graded."""
        lease = answer // self.answers
        if not self.coordinator.is_in_flight(lease):
            return
        self._left[lease] -= 1
        if not self._left[lease]:
            self._deliver(lease, now)
            self.fill(now)

    def lose(self, answer: int, why: str, now: float, *, own_fault: bool = False) -> None:
        """An answer will not come: what becomes of its group is a policy.

        ``own_fault``: the prompt or its environment failed, not those who generate, and would again: then the group
        fails where the policy would generate the answer once more. A group that failed by no such fault is asked again
        however often that happens.
        """
        lease = answer // self.answers
        if not self.coordinator.is_in_flight(lease):
            return
        self._lost_in_row += 1
        self._own_fault[lease] = own_fault or self._own_fault.get(lease, False)
        most = self.coordinator.strategy.admission.most_in_flight * self.answers
        if self._lost_in_row > HOPELESS + most:
            self.ended = (
                f"nothing accepted: the last {self._lost_in_row} answers were lost ({why}); {self._runtime.explain()}"
            )
            return
        policy = self._partial_groups
        if isinstance(policy, AllowShort):
            given_up = self._given_up.setdefault(lease, set())
            given_up.add(answer)
            self.coordinator.sample_done(lease)
            self._left[lease] -= 1
            if self.answers - len(given_up) < policy.least:
                self.handle(self.coordinator.fail(lease, why, now), now)
            elif not self._left[lease]:
                self._deliver(lease, now)
        elif isinstance(policy, RequireFull) or own_fault:
            self.handle(self.coordinator.fail(lease, why, now), now)
        else:
            self._runtime.again(answer, now)

    def _deliver(self, lease: int, now: float) -> None:
        left_out = self._given_up.pop(lease, ()) if self._given_up else ()
        del self._left[lease]
        self._own_fault.pop(lease, None)
        self.handle(self.coordinator.deliver(lease, now, self._runtime.delivers(lease, left_out, now)), now)

    # -- what the coordinator says -----------------------------------------------------------------------------

    def ring(self, now: float) -> None:
        """The coordinator wanted to be called at this time."""
        self.handle(self.coordinator.on_timer(now), now)

    def commit(self, now: float, measured: Mapping[str, float] | None = None) -> list[Event]:
        """The step is made: version + 1. What follows is returned, for ``handle``, with those first who must stop."""
        step = self.coordinator.step
        events = self.coordinator.commit(now, measured)
        for arrival in () if step is None else step.entering:
            self.asked.pop(arrival.lease.id)
        events.sort(key=lambda event: not isinstance(event, Cancelled))  # they stop before anything is loaded
        coordinator = self.coordinator
        if coordinator.version >= self._most_versions:
            self.ended = "versions"
        elif coordinator.ledger.consumed >= self._most_updates:
            self.ended = "updates"
        return events

    def handle(self, events: list[Event], now: float) -> None:
        """Do what the coordinator says."""
        if stopped := [event.lease.id for event in events if isinstance(event, (Cancelled, Failed))]:
            self._stop(stopped, now)  # all of them, before anybody is let in to their places
        for event in events:
            if isinstance(event, StepReady):
                self._runtime.take(event.step, now)
            elif isinstance(event, Published):
                self._runtime.publish(event, now)
            elif isinstance(event, Cancelled):
                if event.reason != "stale" or self._requeues:
                    self._ask_again(event.lease.id, failed=False)
                self.asked.pop(event.lease.id)
                self._own_fault.pop(event.lease.id, None)
            elif isinstance(event, Failed):
                own_fault = self._own_fault.pop(event.lease.id, True)  # also of a group that took too long
                if event.reason != TOO_LONG:
                    self._ask_again(event.lease.id, failed=own_fault and event.reason != CRASHED)
                self.asked.pop(event.lease.id)
                self._count_fruitless(event.reason)
            elif isinstance(event, Rejected):
                if not event.ignored:
                    self._runtime.dropped(event.lease_id)
                    self._count_fruitless(event.reason)
                    if event.reason == "stale" and self._requeues:
                        self._ask_again(event.lease_id, failed=False)
                    self.asked.pop(event.lease_id)
            else:
                self._fruitless = 0

    def _stop(self, leases: Sequence[int], now: float) -> None:
        """Nobody waits for these leases any more: their answers stop where they are."""
        left_out: set[int] = set()
        if self._given_up:
            left_out.update(*(self._given_up.pop(lease, ()) for lease in leases))
        for lease in leases:
            self._left.pop(lease, None)
        self._runtime.stop(leases, left_out, now)

    def _count_fruitless(self, reason: str) -> None:
        self._fruitless += 1
        if self._fruitless > HOPELESS + self.coordinator.strategy.admission.most_in_flight:
            self.ended = (
                f"nothing accepted: the last {self._fruitless} groups brought nothing (the last one: {reason}); "
                f"{self._runtime.explain()}"
            )

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data, for a snapshot, beside those of the coordinator and of the groups that wait.

        Answers of groups in flight are not part of it: whoever goes on fails these groups as `CRASHED`.
        """
        asked = [[lease, *asked] for lease, asked in self.asked.items()]
        return {"asked": asked, "queue": self.queue.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there, with the coordinator of the same moment."""
        self.asked = {lease: Asked(*fields) for lease, *fields in state["asked"]}
        self._left = dict.fromkeys(self.asked, self.answers)
        self.queue.load(state["queue"])
