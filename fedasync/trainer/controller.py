"""The controller of a real run on prompts: it knows the clock, the workers and the trainer, and asks the driver.

One loop, one thread. What workers and the trainer say comes in through a listener, is told to the session's driver at
one instant, and what follows is sent. Where the trainer dies, or the whole run, another session goes on from the newest
checkpoint. Who is there, and what becomes of those who are not, is `Attendance`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedasync.core import Strategy
from fedasync.rl.group_driver import GroupDriver
from fedasync.trainer.attendance import Attendance, Processes, TrainerFailedError
from fedasync.trainer.crew import Crew, Worker
from fedasync.trainer.link import EOF, Link, Listener, Received
from fedasync.trainer.messages import Message, finished_of, save, stop
from fedasync.trainer.run_state import RunState
from fedasync.trainer.session import Session, Told
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings

HOPELESS = ("stalled", "nothing")
"""How ``ended`` begins of runs that somebody keeps waiting."""
SEE_OFF_S = 5.0
"""How long workers may take to leave when the run has ended."""
LOOK_S = 0.25
"""How long the loop waits at most before it looks at the clock and at processes."""


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, and what was done."""

    time_s: float
    what: str


class Controller:
    """One run. ``run`` returns why it ended; then ``session`` and the other fields tell what it made.

    ``prompts`` is the size of the task's data set (None: without end). ``told`` is called with each new version's
    metrics. ``told_remote`` is what workers of other machines are told to do, and ``say`` is called with a line when
    one of them comes or goes. Raises TrainerFailedError, LostProcessError, CheckpointError.
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
        told: Told = lambda version, metrics: None,
        told_remote: Mapping[str, Any] | None = None,
        say: Callable[[str], object] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.strategy, self._processes, self._settings = strategy, processes, settings
        self._state, self._listener, self._clock = state, listener, clock
        self.attendance = Attendance(processes, children, listener.drop, self, clock, told_remote or {}, say)
        self.incidents: list[Incident] = []
        self._died: tuple[float, float] | None = None
        """The run's time and the clock's when the trainer died, until another is there."""
        self._waits_since_s = clock()
        self._session_from = partial(
            Session, strategy, prompts, asked, processes, settings, seed, state, self.crew,
            lambda: self.attendance.trainer, self, told,
        )  # fmt: skip
        checkpoint = state.newest()
        self.session = self._session_from(checkpoint)
        if checkpoint is not None:
            self.incidents = [Incident(*each) for each in checkpoint.state["incidents"]]
            self.attendance.restarts = checkpoint.state["restarts"]
            self.note(f"the run goes on from version {checkpoint.version}")

    @property
    def crew(self) -> Crew:
        return self.attendance.crew

    @property
    def driver(self) -> GroupDriver:
        """The session's."""
        return self.session.driver

    @property
    def now(self) -> float:
        """The run's time."""
        return self.session.now

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> str:
        """From here to the end of the run, which says why it ended."""
        while not self.driver.ended:
            for link, received in self._listener.poll(self._patience_s()):
                self._look_at_the_clock()
                self._ring()  # what came after its time came after its time
                self._hear(link, received)
                if self.driver.ended:
                    break
            self._look_at_the_clock()
            self.attendance.look_at_processes()
            if self.driver.ended:
                break
            if self.session.begun:
                self._ring()
                self.driver.fill(self.now)
                if self._settings.time_s is not None and self.now >= self._settings.time_s:
                    self.driver.ended = "time"
                elif self.session.stands_still:
                    self.driver.ended = f"data exhausted: {self.explain()}"
            self.crew.flush()
            self._watch()
        return self.driver.ended

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
        ended while the trainer made a step. What others say meanwhile is heard only where the run goes on. Raises
        TrainerFailedError where nothing comes.
        """
        if (trainer := self.attendance.trainer) is None:
            self.crew.stop()
            return True
        trainer.send(save(str(folder)))
        until_s = self._clock() + timeout_s
        unheard: list[tuple[Link, Received]] = []
        while True:
            arrived = iter(self._listener.poll(LOOK_S))
            for link, received in arrived:
                if link is not trainer:
                    unheard.append((link, received))
                    continue
                if received is EOF:
                    self._gone(link)
                    for each in (*unheard, *arrived):
                        self._hear(*each)
                    return False
                if received.kind == "saved" and received.header["folder"] == str(folder):
                    self.crew.stop()
                    self._see_off([each for each, said in unheard if said is EOF])
                    trainer.send(stop())
                    return True
                self._receive(link, received)
            if self._clock() > until_s:
                raise TrainerFailedError(f"the trainer has not saved {folder} within {timeout_s:g} s")

    def _see_off(self, gone: Sequence[Link]) -> None:
        """Until the workers have left that were told to stop: one may still be getting weights from the trainer."""
        gone, until_s = list(gone), self._clock() + SEE_OFF_S
        while self._clock() < until_s:
            if all(any(worker.link is each for each in gone) for worker in self.crew.ready):
                return
            gone += [link for link, received in self._listener.poll(LOOK_S) if received is EOF]

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        parts = [self.driver.coordinator.explain()]
        if missing := self.attendance.missing():
            parts.append(missing)
        if self.crew.outstanding or self.crew.pending:
            parts.append(f"{self.crew.outstanding} answers are with workers, {self.crew.pending} wait for one")
        parts += ["the trainer is not there"] if self.attendance.trainer is None else self.session.orders.explain()
        if self.driver.queue.exhausted:
            parts.append("the data set is exhausted")
        return "; ".join(parts)

    def note(self, what: str) -> None:
        """Something went wrong."""
        self.incidents.append(Incident(self.now, what))

    def picture(self) -> Mapping[str, Any]:
        """What a checkpoint holds of what outlives sessions."""
        incidents = [[each.time_s, each.what] for each in self.incidents]
        return {"restarts": self.attendance.restarts, "incidents": incidents}

    def _look_at_the_clock(self) -> None:
        if self.session.begun:
            self.session.now = max(self.now, self._clock() - self.session.start_s)

    def _ring(self) -> None:
        """The coordinator's time limits, if they are over."""
        timer_s = self.driver.coordinator.next_timer() if self.session.begun else None
        if timer_s is not None and timer_s <= self.now:
            self.driver.ring(self.now)

    def _patience_s(self) -> float:
        """How long nothing needs to happen."""
        timer_s = self.driver.coordinator.next_timer() if self.session.begun else None
        return LOOK_S if timer_s is None else min(LOOK_S, max(0.0, timer_s - self.now))

    def _watch(self) -> None:
        """Whoever waits too long says for whom, and the run fails."""
        self.attendance.look_for_silent()
        limit_s = self._settings.watchdog_s if self.session.begun else self._processes.start_timeout_s
        if self._clock() - self._waits_since_s > limit_s:
            what = "no new version" if self.session.begun else "the run has not begun"
            self.driver.ended = f"stalled: {what} for {limit_s:g} s: {self.explain()}"

    # -- who comes and goes ------------------------------------------------------------------------------------

    def lost(self, answers: Sequence[int]) -> list[int]:
        """A worker has gone, and what it had must be generated by another; the prompts of these answers."""
        return self.session.lost(answers)

    def _gone(self, link: Link) -> None:
        """A link has ended: who was there has died, or will."""
        if self.attendance.gone(link):
            self._roll_back()

    def _roll_back(self) -> None:
        """The trainer and what it knew have gone: the run goes on from the newest checkpoint."""
        died_s, version = self.now, self.session.version
        self.crew.start_over()
        self.session = self._session_from(self._state.newest())
        self.session.now = died_s
        self._died = self._died or (died_s, self._clock())
        self.note(f"the trainer died at version {version}; the run goes on from version {self.session.version}")
        self._waits_since_s = self._clock()

    def _begin_when_all_are_there(self) -> None:
        """The clock starts when everybody is there and has the weights."""
        session = self.session
        if session.begun or session.orders.publishing is not None or not self.attendance.complete:
            return
        self.attendance.were_all_there = True
        if self._died is not None:
            died_s, since_s = self._died
            session.now, self._died = died_s + self._clock() - since_s, None
            session.time.died(died_s, session.now)
        self._waits_since_s = self._clock()
        session.begin(self._clock())

    # -- what is said ------------------------------------------------------------------------------------------

    def _hear(self, link: Link, received: Received) -> None:
        if received is EOF:
            self._gone(link)
        else:
            self._receive(link, received)

    def _receive(self, link: Link, message: Message) -> None:
        """Do what a message says."""
        if message.kind == "hello":
            self.attendance.hello(link, message.header)
        elif message.kind == "failed" and message.header["fatal"]:
            self.attendance.failed(link, message.header["what"])
        elif link is self.attendance.trainer:
            self._from_trainer(message)
        elif (worker := self.crew.of(link)) is not None:
            worker.heard_s = self._clock()
            self._from_worker(worker, message)

    def _from_worker(self, worker: Worker, message: Message) -> None:
        match message.kind:
            case "ready":
                self.crew.begins(worker)
                self._begin_when_all_are_there()
            case "finished":
                for finished in finished_of(message):
                    self.session.answered(worker, finished)
            case "loaded":
                worker.version, worker.failed_loads = message.header["version"], 0
            case "iterations":
                self.session.note_iterations(worker, message)
            case "failed":
                self.note(f"{worker} goes on under its old weights: {message.header['what']}")
                if not self.crew.load_again(worker):
                    self.attendance.kill(worker, "could not get the weights")
            case "pulse":
                worker.pulse(message.header["clock_s"], self._clock())
            case kind:
                raise TrainerFailedError(f"{worker} said {kind!r}, which no worker says")

    def _from_trainer(self, message: Message) -> None:
        match message.kind:
            case "ready":
                self.session.trainer_is_ready()
            case "restored":
                self.session.publish_first()
            case "published":
                if self.session.published(message.header):
                    self.attendance.trainer_is_new = False
                    self._begin_when_all_are_there()
            case "trained":
                if self.session.trained(message.header):
                    self._waits_since_s = self._clock()
            case "evaluated":
                self.session.evaluated(message.header)
            case "saved":
                self.session.saved(message.header)
            case kind:
                raise TrainerFailedError(f"the trainer said {kind!r}, which no trainer says")
