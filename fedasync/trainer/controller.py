"""The controller of a real run on prompts: it knows the clock, the workers and the trainer, and asks the driver.

One loop, one thread. What workers and the trainer say comes in through a listener, is told to the driver at one
instant, and what follows is sent. Where the trainer dies, or the whole run, it goes on from the newest checkpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Protocol

from fedasync.core import Coordinator, EventLog, Lease, Published, Step, Strategy
from fedasync.rl.engine import Finished, Request
from fedasync.rl.group_driver import CRASHED, TOO_LONG, GroupDriver
from fedasync.rl.prompt_order import PromptOrder
from fedasync.rl.prompt_queue import Asked, PromptQueue
from fedasync.trainer.answer_rows import ITERATION
from fedasync.trainer.crew import Crew, Worker, listed
from fedasync.trainer.groups import Groups
from fedasync.trainer.link import EOF, Link, Listener
from fedasync.trainer.messages import (
    Message,
    evaluate,
    finished_of,
    iterations_of,
    publish,
    restore,
    save,
    stop,
    train,
)
from fedasync.trainer.run_state import LEARNER, Checkpoint, RunState
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings
from fedasync.trainer.trainer_time import TrainerTime

HOPELESS = ("stalled", "nothing")
"""How ``ended`` begins of runs that somebody keeps waiting."""
PATIENCE_S = 5.0
"""How long a trainer that failed may take to end, so that it is known which of its ranks ended first."""
LOOK_S = 0.25
"""How long the loop waits at most before it looks at the clock and at processes."""


class TrainerFailedError(RuntimeError):
    """The trainer, or a worker, said why it cannot go on; the message is that line."""


class LostProcessError(RuntimeError):
    """Processes died more often than they may."""


class Processes(Protocol):
    """Who starts processes again (`LocalProcesses`)."""

    def restart(self, name: str) -> None: ...

    def kill(self, name: str) -> None: ...

    def runs(self, name: str) -> bool: ...

    def ended(self) -> Sequence[Any]:
        """Those that ended by themselves since this was last asked, with ``name``, ``words`` and ``status``."""
        ...


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, and what was done."""

    time_s: float
    what: str


class Controller:
    """One run. ``run`` returns why it ended; then the fields tell what it made.

    ``prompts`` is the size of the task's data set (None: without end). ``told`` is called with each new version's
    metrics. Raises TrainerFailedError, LostProcessError, CheckpointError.
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
        listener: Listener,
        children: Processes,
        told: Callable[[int, Mapping[str, float]], object] = lambda version, metrics: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.strategy, self._prompts, self._asked, self._seed = strategy, prompts, asked, seed
        self._processes, self._settings = processes, settings
        self._state, self._listener, self._children, self._told = state, listener, children, told
        self._clock = clock
        self.crew = Crew(processes.workers, processes.kv)
        self.incidents: list[Incident] = []
        self.failures: dict[str, int] = {}
        """Answers that failed, by the reason as the log has it, since the beginning or in the checkpoint's past."""
        self.restarts = 0
        self._trainer: Link | None = None
        self._trainer_is_new = False
        self._begun = False
        self._died: tuple[float, float] | None = None
        """The run's time and the clock's when the trainer died, until another is there."""
        self._trainer_failed: tuple[str, float] | None = None
        """What the trainer said when it failed, and when, until it is known whether a rank was killed."""
        self._had: dict[str, list[int]] = {}
        """Prompts of the answers that a worker had when it died last."""
        self._resumes_from: Checkpoint | None = None
        self._waits_since_s = clock()
        self._begin(state.newest())

    # -- state -------------------------------------------------------------------------------------------------

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Everything as it was at a checkpoint, or as at the start; what was in flight is to be asked again."""
        settings, asked = self._settings, self._asked
        self._resumes_from = checkpoint
        self.log = EventLog(self._state.events.append)
        self.time = TrainerTime()
        self.failures = {}
        groups = () if checkpoint is None else checkpoint.groups.values()
        self.groups = Groups(asked.answers, self._state.answers.append, groups)
        self._step: Step | None = None
        self.now = self._start_s = 0.0
        self._outbox: list[Message] = []
        self._checkpoint_due = False
        """One is to be made at the next version that is published."""
        self._holds_back = False
        """What the trainer is told waits in the outbox, until all that follows from a commit is known."""
        self._publishing: Published | None = None
        self._evaluating: deque[int] = deque()
        self._saving: deque[tuple[int, dict[str, Any]]] = deque()
        told = None if checkpoint is None else checkpoint.state
        if told is not None:
            for reason in told["reasons"]:
                self.log.code(reason)
        coordinator = (
            Coordinator(self.strategy, self.log)
            if told is None
            else Coordinator.restore(self.strategy, told["coordinator"], self.log)
        )
        order = PromptOrder(self._prompts, asked.epochs, shuffle=asked.shuffle, seed=self._seed)
        self.driver = GroupDriver(
            coordinator,
            PromptQueue(order, self._processes.most_attempts),
            asked.answers,
            self,
            partial_groups=self._processes.partial_groups,
            dropped=self._processes.dropped,
            versions=inf if settings.versions is None else settings.versions,
            updates=inf if settings.updates is None else settings.updates,
        )
        if told is None or checkpoint is None:
            return
        self.driver.load(told["driver"])
        self.time.load(told["trainer"])
        self.now = told["time_s"]
        self.failures = dict(told["failures"])
        self.restarts = told["restarts"]
        self.incidents = [Incident(*each) for each in told["incidents"]]
        self.note(f"the run goes on from version {checkpoint.version}")

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
            "restarts": self.restarts,
            "incidents": [[each.time_s, each.what] for each in self.incidents],
        }

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> str:
        """From here to the end of the run, which says why it ended."""
        driver, settings = self.driver, self._settings
        while not driver.ended:
            for link, received in self._listener.poll(self._patience_s()):
                self._look_at_the_clock()
                self._ring()  # what came after its time came after its time
                if received is EOF:
                    self._gone(link)
                else:
                    self._receive(link, received)
                driver = self.driver  # a rollback makes another
                if driver.ended:
                    break
            self._look_at_the_clock()
            self._look_at_processes()
            driver = self.driver
            if driver.ended:
                break
            if self._begun:
                self._ring()
                driver.fill(self.now)
                if settings.time_s is not None and self.now >= settings.time_s:
                    driver.ended = "time"
                elif self._stands_still():
                    driver.ended = f"data exhausted: {self.explain()}"
            self.crew.flush()
            self._watch()
        return driver.ended

    def make(self, folder: Path) -> str:
        """``run``, after which the trainer has saved its last version into ``folder``; why the run ended.

        Nobody is asked for anything more where somebody keeps the run waiting (``HOPELESS``).
        """
        while True:
            ended = self.run()
            if ended.startswith(HOPELESS) or self._finish(folder):
                return ended

    def _finish(self, folder: Path, timeout_s: float = 600.0) -> bool:
        """The trainer saves, and everybody is told to stop; False where it died, and the run goes on once more.

        What is on its way, evaluations and checkpoints, is waited for; what is saved is one version ahead where the run
        ended while the trainer made a step. Raises TrainerFailedError where nothing comes.
        """
        if self._trainer is None:
            return True
        self._trainer.send(save(str(folder)))
        until_s = self._clock() + timeout_s
        while True:
            for link, received in self._listener.poll(LOOK_S):
                if link is not self._trainer:
                    continue
                if received is EOF:
                    self._gone(link)
                    return False
                if received.kind == "saved" and received.header["folder"] == str(folder):
                    self._trainer.send(stop())
                    self.crew.stop()
                    return True
                self._receive(link, received)
            if self._clock() > until_s:
                raise TrainerFailedError(f"the trainer has not saved {folder} within {timeout_s:g} s")

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        parts = [self.driver.coordinator.explain()]
        missing = [worker.number for worker in self.crew.workers if not worker.ready]
        if missing:
            parts.append(f"rollout worker{'s' * (len(missing) > 1)} {listed(missing)} not there")
        if self.crew.outstanding or self.crew.pending:
            parts.append(f"{self.crew.outstanding} answers are with workers, {self.crew.pending} wait for one")
        if self._trainer is None:
            parts.append("the trainer is not there")
        elif self._step is not None:
            parts.append(f"the trainer makes version {self._step.version + 1}")
        elif self._publishing is not None:
            parts.append(f"the trainer publishes version {self._publishing.version}")
        if self.driver.queue.exhausted:
            parts.append("the data set is exhausted")
        return "; ".join(parts)

    def note(self, what: str) -> None:
        """Something went wrong."""
        self.incidents.append(Incident(self.now, what))

    def _look_at_the_clock(self) -> None:
        if self._begun:
            self.now = max(self.now, self._clock() - self._start_s)

    def _ring(self) -> None:
        """The coordinator's time limits, if they are over."""
        if self._begun and (timer_s := self.driver.coordinator.next_timer()) is not None and timer_s <= self.now:
            self.driver.ring(self.now)

    def _patience_s(self) -> float:
        """How long nothing needs to happen."""
        timer_s = self.driver.coordinator.next_timer() if self._begun else None
        return LOOK_S if timer_s is None else min(LOOK_S, max(0.0, timer_s - self.now))

    def _stands_still(self) -> bool:
        """Nothing will ever happen any more."""
        coordinator = self.driver.coordinator
        nobody = not coordinator.in_flight and self._step is None and self._publishing is None
        return self.driver.queue.exhausted and nobody

    def _watch(self) -> None:
        """Whoever waits too long says for whom, and the run fails."""
        now_s = self._clock()
        for worker in self.crew.ready:
            if now_s - worker.heard_s > self._processes.silent_s:
                self.note(f"worker {worker.number} has said nothing for {self._processes.silent_s:g} s and is killed")
                worker.heard_s = now_s
                self._children.kill(f"worker-{worker.number}")
        limit_s = self._settings.watchdog_s if self._begun else self._processes.start_timeout_s
        if now_s - self._waits_since_s > limit_s:
            what = "no new version" if self._begun else "the run has not begun"
            self.driver.ended = f"stalled: {what} for {limit_s:g} s: {self.explain()}"

    # -- processes ---------------------------------------------------------------------------------------------

    def _look_at_processes(self) -> None:
        """Those that have ended by themselves are started again, if they may; ranks come back together."""
        ended = list(self._children.ended())
        ranks = [each for each in ended if each.name.startswith("rank")]
        if self._trainer_failed is not None:
            what, since_s = self._trainer_failed
            raised = [each.words for each in ranks if each.status >= 0 and each.name != "rank-0"]
            if ranks and any(each.status < 0 for each in ranks):
                self._trainer_failed = None  # what the others said was of the one that was killed
            elif ranks or self._clock() - since_s > PATIENCE_S:
                raise TrainerFailedError(f"the trainer: {'; '.join(raised) or what}")
        for each in [*ranks[:1], *(each for each in ended if each not in ranks)]:
            words = "; ".join(one.words for one in ranks) if each in ranks else each.words
            self.note(words)
            if self.restarts >= self._processes.restarts:
                raise LostProcessError(
                    f"{words}; processes were started again {self.restarts} times (processes.restarts)"
                    f"{self._suspects(each.name)}; {self.explain()}"
                )
            self.restarts += 1
            self._children.restart(each.name)

    def _suspects(self, name: str) -> str:
        """Prompts that a worker had when it died, in words: one of them may be what kills it."""
        prompts = self._had.get(name, [])
        return f"; it had answers to prompts {listed(set(prompts))}" if prompts else ""

    def _gone(self, link: Link) -> None:
        """A link has ended: who was there has died, or will."""
        if link is self._trainer:
            self._trainer = None
            self._roll_back()
            return
        worker = self.crew.of(link)
        if worker is not None:
            self._lost(worker)

    def _lost(self, worker: Worker) -> None:
        """A worker has gone, and what it had must be generated by another."""
        answers = self.crew.lost(worker)
        leases = [answer // self.driver.answers for answer in answers]
        held = self.groups.leases
        self._had[f"worker-{worker.number}"] = [held[each].worker for each in leases if each in held]
        for answer in answers:
            self._lose(answer, "worker died", own_fault=False)

    def _roll_back(self) -> None:
        """The trainer and what it knew have gone: the run goes on from the newest checkpoint."""
        died_s, version = self.now, self.driver.coordinator.version
        incidents, restarts = self.incidents, self.restarts
        self.crew.start_over()
        self._begin(self._state.newest())
        self.incidents, self.restarts = incidents, restarts
        self._died = self._died or (died_s, self._clock())
        self.now = died_s
        back = self.driver.coordinator.version
        self.note(f"the trainer died at version {version}; the run goes on from version {back}")
        self._begun = False
        self._waits_since_s = self._clock()

    def _receive(self, link: Link, message: Message) -> None:
        """Do what a message says."""
        header = message.header
        if message.kind == "hello":
            self._hello(link, header)
            return
        if message.kind == "failed" and header["fatal"]:
            if link is not self._trainer:
                raise TrainerFailedError(f"a worker: {header['what']}")
            self._trainer_failed = (header["what"], self._clock())  # perhaps of a rank that was killed: who ended tells
            return
        if link is self._trainer:
            self._from_trainer(message)
        elif (worker := self.crew.of(link)) is not None:
            worker.heard_s = self._clock()
            self._from_worker(worker, message)

    def _hello(self, link: Link, header: Mapping[str, Any]) -> None:
        now_s = self._clock()
        if header["kind"] == "trainer":
            self._trainer, self._trainer_is_new = link, True
        else:
            if (former := self.crew.workers[header["number"]]).link is not None:
                self._lost(former)
            self.crew.joined(header["number"], link, now_s, 0.0 if link.local else now_s - header["clock_s"])

    # -- workers -----------------------------------------------------------------------------------------------

    def _from_worker(self, worker: Worker, message: Message) -> None:
        match message.kind:
            case "ready":
                self.crew.begins(worker)
                self._begin_when_all_are_there()
            case "finished":
                for finished in finished_of(message):
                    self._answered(worker, finished)
            case "loaded":
                worker.version, worker.failed_loads = message.header["version"], 0
            case "iterations":
                self._note_iterations(worker, message)
            case "failed":
                self.note(f"worker {worker.number} goes on under its old weights: {message.header['what']}")
                if not self.crew.load_again(worker):
                    self._children.kill(f"worker-{worker.number}")
            case "pulse":
                pass
            case kind:
                raise TrainerFailedError(f"worker {worker.number} said {kind!r}, which no worker says")

    def _answered(self, worker: Worker, finished: Finished) -> None:
        """An answer has ended on a worker."""
        answer = self.crew.came_back(worker, finished.answer)
        if answer is None or not self._begun:
            return
        if finished.trajectory is None:
            self._lose(answer, finished.failure or "no answer", own_fault=finished.own_fault)
            return
        lease, index = divmod(answer, self.driver.answers)
        start_s, end_s = (each + worker.offset_s - self._start_s for each in (finished.start_s, finished.end_s))
        start_s = min(max(start_s, self.groups.leases[lease].admitted_s), self.now)
        end_s = min(max(end_s, start_s), self.now)
        self.groups.came(lease, index, (finished, start_s, end_s, worker.number))
        self.driver.generated(answer, self.now)
        self.driver.complete(answer, self.now)

    def _lose(self, answer: int, why: str, *, own_fault: bool) -> None:
        """An answer will not come; the log has the reason up to its first colon, failures and incidents all of it."""
        reason = why.split(":", maxsplit=1)[0]
        own_fault = own_fault or reason == TOO_LONG
        self.failures[reason] = self.failures.get(reason, 0) + 1
        if own_fault:
            prompt = self.groups.leases[answer // self.driver.answers].worker
            self.note(f"an answer to prompt {prompt} failed: {why}")
        self.driver.lose(answer, reason, self.now, own_fault=own_fault)

    def _note_iterations(self, worker: Worker, message: Message) -> None:
        import numpy as np

        if not self._begun:
            return
        rows = [
            (worker.number, each.at_s + worker.offset_s - self._start_s, *each[1:]) for each in iterations_of(message)
        ]
        self._state.iterations.append(np.array(rows, ITERATION).tobytes())

    # -- trainer -----------------------------------------------------------------------------------------------

    def _from_trainer(self, message: Message) -> None:
        header = message.header
        match message.kind:
            case "ready":
                if self._resumes_from is not None:
                    self._send(restore(str(self._resumes_from.learner)))
                else:
                    self._publish_first()
            case "restored":
                self._publish_first()
            case "published":
                self._published(header)
            case "trained":
                self._trained(header)
            case "evaluated":
                self.time.spent("evaluating", header["seconds"], self.now)
                version = self._evaluating.popleft()
                self.time.steps.add(version, header["metrics"])
                self._told(version, header["metrics"])
            case "saved":
                self.time.spent("saving", header["seconds"], self.now)
                version, picture = self._saving.popleft()
                self._state.complete(version, picture)
            case kind:
                raise TrainerFailedError(f"the trainer said {kind!r}, which no trainer says")

    def _send(self, message: Message) -> None:
        if self._holds_back:
            self._outbox.append(message)
        elif self._trainer is not None:
            self._trainer.send(message)

    def _publish_first(self) -> None:
        """The weights with which the run begins, or goes on."""
        version = self.driver.coordinator.published
        self._publishing = Published(version, "interrupt")
        self._send(publish(version))
        if self._resumes_from is not None and self._resumes_from.state["evaluate"]:
            self._evaluating.append(version)  # which was on its way, and is no part of what the checkpoint knows
            self._send(evaluate())

    def _published(self, header: Mapping[str, Any]) -> None:
        """The weights are in the channel: workers are told, before they are asked for anything more."""
        event = self._publishing
        if event is None or header["version"] != event.version:
            return  # of a run that was rolled back
        self._publishing = None
        self.crew.load(event.version, drain=event.in_flight == "continue")
        if self._begun:
            self.time.spent("syncing", header["seconds"], self.now)
        self._trainer_is_new = False
        self._begin_when_all_are_there()

    def _begin_when_all_are_there(self) -> None:
        """The clock starts when everybody is there and has the weights."""
        if self._begun or self._trainer is None or self._trainer_is_new or self._publishing is not None:
            return
        if len(self.crew.ready) < len(self.crew.workers):
            return
        self._begun = True
        if self._died is not None:
            died_s, since_s = self._died
            self.now, self._died = died_s + self._clock() - since_s, None
            self.time.died(died_s, self.now)
        self._start_s = self._clock() - self.now
        self._waits_since_s = self._clock()
        self.time.begins(self.now)
        coordinator = self.driver.coordinator
        outstanding = coordinator.step
        for lease in coordinator.leases:  # in flight when the run, or its trainer, ended
            self.groups.asked(lease)
            self.driver.handle(coordinator.fail(lease.id, CRASHED, self.now), self.now)
        if outstanding is not None:
            self.take(outstanding, self.now)
        self.driver.fill(self.now)

    def _trained(self, header: Mapping[str, Any]) -> None:
        """The step has been made."""
        step, now = self._step, self.now
        if step is None or header["version"] != step.version + 1:
            return  # of a run that was rolled back
        if self.driver.ended:
            self.note(f"the trainer made version {header['version']} after the end, which is only in what it saves")
            return
        driver, coordinator = self.driver, self.driver.coordinator
        self._step = None
        metrics = header["metrics"]
        self.time.trained(step, header["train_s"], header["measure_s"], metrics.get("tokens", 0.0), now)
        self.groups.trained(step)
        self._holds_back = True
        events = driver.commit(now, header["measured"] or None)
        self.time.steps.committed(coordinator, now, metrics)
        self._waits_since_s = self._clock()
        version = coordinator.version
        driver.handle(events, now)
        outbox, self._outbox, self._holds_back = self._outbox, [], False
        # The weights first, for which workers wait; then what is to be done with this version; then the next one.
        for message in [each for each in outbox if each.kind == "publish"]:
            self._send(message)
        settings = self._settings
        evaluates = settings.evaluate_every is not None and version % settings.evaluate_every == 0
        self._checkpoint_due |= settings.checkpoint_every is not None and version % settings.checkpoint_every == 0
        if self._checkpoint_due and coordinator.published == version and not driver.ended:
            # A picture of this moment, which counts when the trainer's part of it is there.
            picture = {**self._picture(), "evaluate": evaluates}
            self._saving.append((version, self._state.save(version, picture, self.groups.waiting.values())))
            self._send(save(str(self._state.place(version) / LEARNER)))
            self._checkpoint_due = False
        if evaluates:
            self._evaluating.append(version)
            self._send(evaluate())
        for message in [each for each in outbox if each.kind != "publish"]:
            self._send(message)
        self._told(version, metrics)

    # -- what the driver wants ---------------------------------------------------------------------------------

    @property
    def holds_up(self) -> bool:
        """New answers are asked for once their weights are where workers find them."""
        return not self._begun or self._publishing is not None

    def start(self, lease: Lease, asked: Asked, now: float) -> str | None:
        self.groups.asked(lease)
        first = lease.id * self.driver.answers
        for index in range(self.driver.answers):
            self.crew.ask(Request(first + index, asked.prompt, asked.epoch, index))
        return None

    def again(self, answer: int, now: float) -> None:
        lease, index = divmod(answer, self.driver.answers)
        asked = self.driver.asked[lease]
        self.crew.ask(Request(answer, asked.prompt, asked.epoch, index))

    def stop(self, leases: Sequence[int], left_out: Container[int], now: float) -> None:
        answers = self.driver.answers
        self.crew.withdraw([lease * answers + index for lease in leases for index in range(answers)])
        for lease in leases:
            self.groups.ended(lease)

    def dropped(self, lease: int) -> None:
        self.groups.dropped(lease)

    def delivers(self, lease: int, left_out: Collection[int], now: float) -> str | None:
        """The group is whole, or as whole as it will be: it waits for the trainer."""
        self.groups.whole(lease)
        return None

    def take(self, step: Step, now: float) -> None:
        self._step = step
        if self.driver.ended:
            return
        self._send(train(step.version + 1, self.groups.of(step), sorted(self.driver.coordinator.asks)))

    def publish(self, event: Published, now: float) -> None:
        self._publishing = event
        self._send(publish(event.version))

    def write_unfinished(self) -> None:
        """The run has ended: rows of the answers of what is still in flight."""
        for lease in sorted(self.groups.leases):
            self.groups.ended(lease)
