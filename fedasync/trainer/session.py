"""A run from a checkpoint, or from its start, until its end or the trainer's death, which begins another session.

No clock, no listener, no processes: the controller says how late it is and what was said, and what follows is sent to
the crew and the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from fedasync.core import Coordinator, EventLog, Lease, Published, Step, Strategy
from fedasync.rl.engine import Finished, Request
from fedasync.rl.group_driver import CRASHED, TOO_LONG, GroupDriver
from fedasync.rl.prompt_order import PromptOrder
from fedasync.rl.prompt_queue import Asked, PromptQueue
from fedasync.trainer.answer_rows import ITERATION
from fedasync.trainer.crew import Crew, Worker
from fedasync.trainer.groups import Groups
from fedasync.trainer.link import Link
from fedasync.trainer.messages import Message, iterations_of
from fedasync.trainer.orders import Orders
from fedasync.trainer.run_state import LEARNER, Checkpoint, RunState
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings
from fedasync.trainer.trainer_time import TrainerTime

Told = Callable[[int, Mapping[str, float]], object]
"""Called with a version and metrics of it as they become known."""


class Owner(Protocol):
    """The controller."""

    def note(self, what: str) -> None:
        """Something went wrong."""
        ...

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        ...

    def picture(self) -> Mapping[str, Any]:
        """What a checkpoint holds of what outlives sessions."""
        ...


class Session:
    """Everything as it was at a ``checkpoint``, or as at the start (None); what was in flight is asked again.

    It is the runtime that its ``driver`` wants. ``now`` is the run's time, which the controller keeps; the clock's is
    ``start_s`` later.
    """

    def __init__(
        self,
        strategy: Strategy,
        prompts: int | None,
        asked: PromptSettings,
        processes: ProcessSettings,
        settings: RunSettings,
        seed: int,
        state: RunState,
        crew: Crew,
        trainer: Callable[[], Link | None],
        owner: Owner,
        told: Told,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._settings, self._state, self._crew, self._owner, self._told = settings, state, crew, owner, told
        self._resumes_from = checkpoint
        self.begun = False
        self.now = self.start_s = 0.0
        self.log = EventLog(state.events.append)
        self.time = TrainerTime()
        self.failures: dict[str, int] = {}
        """Answers that failed, by the reason as the log has it, since the beginning or in the checkpoint's past."""
        groups = () if checkpoint is None else checkpoint.groups.values()
        self.groups = Groups(asked.answers, state.answers.append, groups)
        self.orders = Orders(trainer)
        self._checkpoint_due = False
        """One is to be made at the next version that is published."""
        past = None if checkpoint is None else checkpoint.state
        for reason in () if past is None else past["reasons"]:
            self.log.code(reason)
        coordinator = (
            Coordinator(strategy, self.log)
            if past is None
            else Coordinator.restore(strategy, past["coordinator"], self.log)
        )
        order = PromptOrder(prompts, asked.epochs, shuffle=asked.shuffle, seed=seed)
        self.driver = GroupDriver(
            coordinator,
            PromptQueue(order, processes.most_attempts),
            asked.answers,
            self,
            partial_groups=processes.partial_groups,
            dropped=processes.dropped,
            versions=inf if settings.versions is None else settings.versions,
            updates=inf if settings.updates is None else settings.updates,
        )
        if past is not None:
            self.driver.load(past["driver"])
            self.time.load(past["trainer"])
            self.now = past["time_s"]
            self.failures = dict(past["failures"])

    @property
    def version(self) -> int:
        return self.driver.coordinator.version

    @property
    def stands_still(self) -> bool:
        """Nothing will ever happen any more."""
        nobody = not self.driver.coordinator.in_flight and self.orders.step is None and self.orders.publishing is None
        return self.driver.queue.exhausted and nobody

    def begin(self, clock_s: float) -> None:
        """Everybody is there and has the weights: the clock starts."""
        self.begun = True
        self.start_s = clock_s - self.now
        self.time.begins(self.now)
        coordinator = self.driver.coordinator
        outstanding = coordinator.step
        for lease in coordinator.leases:  # in flight when the run, or its trainer, ended
            self.groups.asked(lease)
            self.driver.handle(coordinator.fail(lease.id, CRASHED, self.now), self.now)
        if outstanding is not None:
            self.take(outstanding, self.now)
        self.driver.fill(self.now)

    def write_unfinished(self) -> None:
        """The run has ended: rows of the answers of what is still in flight."""
        for lease in sorted(self.groups.leases):
            self.groups.ended(lease)

    # -- what comes of answers ---------------------------------------------------------------------------------

    def answered(self, worker: Worker, finished: Finished) -> None:
        """An answer has ended on a worker."""
        answer = self._crew.came_back(worker, finished.answer)
        if answer is None or not self.begun:
            return
        if finished.trajectory is None:
            self._lose(answer, finished.failure or "no answer", own_fault=finished.own_fault)
            return
        lease, index = divmod(answer, self.driver.answers)
        start_s, end_s = (each + worker.offset_s - self.start_s for each in (finished.start_s, finished.end_s))
        start_s = min(max(start_s, self.groups.leases[lease].admitted_s), self.now)
        end_s = min(max(end_s, start_s), self.now)
        self.groups.came(lease, index, (finished, start_s, end_s, worker.number))
        self.driver.generated(answer, self.now)
        self.driver.complete(answer, self.now)

    def lost(self, answers: Sequence[int]) -> list[int]:
        """A worker has gone, and what it had must be generated by another; the prompts of these answers."""
        held = self.groups.leases
        leases = [answer // self.driver.answers for answer in answers]
        prompts = [held[each].worker for each in leases if each in held]
        for answer in answers:
            self._lose(answer, "worker died", own_fault=False)
        return prompts

    def note_iterations(self, worker: Worker, message: Message) -> None:
        """What a worker's decoding steps took."""
        import numpy as np

        if not self.begun:
            return
        rows = [
            (worker.number, each.at_s + worker.offset_s - self.start_s, *each[1:]) for each in iterations_of(message)
        ]
        self._state.iterations.append(np.array(rows, ITERATION).tobytes())

    def _lose(self, answer: int, why: str, *, own_fault: bool) -> None:
        """An answer will not come; the log has the reason up to its first colon, failures and incidents all of it."""
        reason = why.split(":", maxsplit=1)[0]
        own_fault = own_fault or reason == TOO_LONG
        self.failures[reason] = self.failures.get(reason, 0) + 1
        if own_fault:
            prompt = self.groups.leases[answer // self.driver.answers].worker
            self.note(f"an answer to prompt {prompt} failed: {why}")
        self.driver.lose(answer, reason, self.now, own_fault=own_fault)

    # -- what the trainer has done -----------------------------------------------------------------------------

    def trainer_is_ready(self) -> None:
        """It is there, with the weights of the start."""
        if self._resumes_from is not None:
            self.orders.restore(self._resumes_from.learner)
        else:
            self.publish_first()

    def publish_first(self) -> None:
        """The weights with which the run begins, or goes on."""
        version = self.driver.coordinator.published
        self.orders.publish(Published(version, "interrupt"))
        if self._resumes_from is not None and self._resumes_from.state["evaluate"]:
            self.orders.evaluate(version)  # which was on its way, and is no part of what the checkpoint knows

    def published(self, header: Mapping[str, Any]) -> bool:
        """The weights are in the channel: workers are told, before they are asked for anything more.

        False where they are of a session before.
        """
        event = self.orders.publishing
        if event is None or header["version"] != event.version:
            return False
        self.orders.publishing = None
        self._crew.load(event.version, drain=event.in_flight == "continue")
        if self.begun:
            self.time.spent("syncing", header["seconds"], self.now)
        return True

    def trained(self, header: Mapping[str, Any]) -> bool:
        """The step has been made; False where it is of a session before, or the run has ended."""
        step, now = self.orders.step, self.now
        if step is None or header["version"] != step.version + 1:
            return False
        if self.driver.ended:
            self.note(f"the trainer made version {header['version']} after the end, which is only in what it saves")
            return False
        driver, coordinator = self.driver, self.driver.coordinator
        self.orders.step = None
        metrics = header["metrics"]
        self.time.trained(step, header["train_s"], header["measure_s"], metrics.get("tokens", 0.0), now)
        self.groups.trained(step)
        self.orders.hold()
        events = driver.commit(now, header["measured"] or None)
        self.time.steps.committed(coordinator, now, metrics)
        version = coordinator.version
        driver.handle(events, now)
        # The weights first, for which workers wait; then what is to be done with this version; then the next one.
        self.orders.let_go("publish")
        settings = self._settings
        evaluates = settings.evaluate_every is not None and version % settings.evaluate_every == 0
        self._checkpoint_due |= settings.checkpoint_every is not None and version % settings.checkpoint_every == 0
        if self._checkpoint_due and coordinator.published == version and not driver.ended:
            # A picture of this moment, which counts when the trainer's part of it is there.
            picture = {**self._picture(), "evaluate": evaluates}
            rows_too = self._state.save(version, picture, self.groups.waiting.values())
            self.orders.save(version, rows_too, self._state.place(version) / LEARNER)
            self._checkpoint_due = False
        if evaluates:
            self.orders.evaluate(version)
        self.orders.let_go()
        self._told(version, metrics)
        return True

    def evaluated(self, header: Mapping[str, Any]) -> None:
        self.time.spent("evaluating", header["seconds"], self.now)
        version = self.orders.evaluating.popleft()
        self.time.steps.add(version, header["metrics"])
        self._told(version, header["metrics"])

    def saved(self, header: Mapping[str, Any]) -> None:
        """The trainer's part of a checkpoint is there."""
        self.time.spent("saving", header["seconds"], self.now)
        version, picture = self.orders.saving.popleft()
        self._state.complete(version, picture)

    def _picture(self) -> dict[str, Any]:
        """The state that a checkpoint holds, beside rows and groups."""
        self.log.flush()
        return {
            "coordinator": self.driver.coordinator.snapshot(),
            "driver": self.driver.state(),
            "trainer": self.time.state(),
            "reasons": list(self.log.reasons),
            "time_s": self.now,
            "failures": dict(self.failures),
            **self._owner.picture(),
        }

    # -- what the driver wants ---------------------------------------------------------------------------------

    @property
    def holds_up(self) -> bool:
        """New answers are asked for once their weights are where workers find them."""
        return not self.begun or self.orders.publishing is not None

    def start(self, lease: Lease, asked: Asked, now: float) -> str | None:
        self.groups.asked(lease)
        first = lease.id * self.driver.answers
        for index in range(self.driver.answers):
            self._crew.ask(Request(first + index, asked.prompt, asked.epoch, index))
        return None

    def again(self, answer: int, now: float) -> None:
        lease, index = divmod(answer, self.driver.answers)
        asked = self.driver.asked[lease]
        self._crew.ask(Request(answer, asked.prompt, asked.epoch, index))

    def stop(self, leases: Sequence[int], left_out: Container[int], now: float) -> None:
        answers = self.driver.answers
        self._crew.withdraw([lease * answers + index for lease in leases for index in range(answers)])
        for lease in leases:
            self.groups.ended(lease)

    def dropped(self, lease: int) -> None:
        self.groups.dropped(lease)

    def delivers(self, lease: int, left_out: Collection[int], now: float) -> str | None:
        """The group is whole, or as whole as it will be: it waits for the trainer."""
        self.groups.whole(lease)
        return None

    def take(self, step: Step, now: float) -> None:
        if self.driver.ended:
            self.orders.step = step
        else:
            self.orders.train(step, self.groups.of(step), self.driver.coordinator.asks)

    def publish(self, event: Published, now: float) -> None:
        self.orders.publish(event)

    def note(self, what: str) -> None:
        self._owner.note(what)

    def explain(self) -> str:
        return self._owner.explain()
