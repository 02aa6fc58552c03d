"""Who is there: the trainer and the workers that came, died, fell silent, are started again, or join from elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fedasync.trainer.crew import Crew, Worker, listed
from fedasync.trainer.link import Link
from fedasync.trainer.messages import refused, wait, welcome
from fedasync.trainer.settings import ProcessSettings
from fedasync.trainer.source import fedasync_version

PATIENCE_S = 5.0
"""How long a trainer that failed may take to end, so that it is known which of its ranks ended first."""


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


class Owner(Protocol):
    """The controller, which is told what follows."""

    def note(self, what: str) -> None:
        """Something went wrong."""
        ...

    def lost(self, answers: Sequence[int]) -> list[int]:
        """These answers will not come, since their worker has gone; their prompts."""
        ...

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        ...


class _Guest(NamedTuple):
    """A worker from another machine for which there is no place yet."""

    link: Link
    offset_s: float


class Attendance:
    """The ``crew`` and the ``trainer``'s link, and what becomes of those that are not there.

    Processes of this machine are started again, ``settings.restarts`` times in all. Workers of other machines come by
    themselves: each is told ``told_remote``, takes the first free number, and waits while there is none. Where one goes
    another may come in its place, at any time. ``say`` tells a person what remote workers do.

    ``drop`` closes a link, of which nothing more is heard then.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        children: Processes,
        drop: Callable[[Link], object],
        owner: Owner,
        clock: Callable[[], float],
        told_remote: Mapping[str, Any],
        say: Callable[[str], object],
    ) -> None:
        self._settings, self._children, self._drop, self._owner = settings, children, drop, owner
        self._clock, self._told_remote, self._say = clock, told_remote, say
        self.crew = Crew(settings.workers, settings.kv, settings.remote_workers)
        self.trainer: Link | None = None
        self.trainer_is_new = False
        """It has not published anything yet."""
        self.restarts = 0
        self.were_all_there = False
        """Everybody was there once: from then on nobody waits for workers of other machines."""
        self._trainer_failed: tuple[str, float] | None = None
        """What the trainer said when it failed, and when, until it is known whether a rank was killed."""
        self._had: dict[str, Collection[int]] = {}
        """Prompts of the answers that a worker had when it died last."""
        self._guests: deque[_Guest] = deque()

    # -- who comes ---------------------------------------------------------------------------------------------

    def hello(self, link: Link, header: Mapping[str, Any]) -> None:
        """Somebody says who it is."""
        now_s = self._clock()
        offset_s = 0.0 if link.local else now_s - header["clock_s"]
        if header["kind"] == "trainer":
            self.trainer, self.trainer_is_new = link, True
        elif header["kind"] == "worker":
            if (former := self.crew.workers[header["number"]]).link is not None:
                self._lose(former)
            self.crew.joined(header["number"], link, now_s, offset_s)
        elif why := self._refusal(header):
            link.send(refused(why))  # and it goes
            self._say(f"a worker at {link.name} is refused: {why}")
        else:
            self._guests.append(_Guest(link, offset_s))
            self._let_in()
            if any(guest.link is link for guest in self._guests):
                link.send(wait(f"all {self._settings.remote_workers} remote workers are there"))

    def _refusal(self, header: Mapping[str, Any]) -> str | None:
        """Why a worker of another machine cannot be one; None where it can."""
        if not self._settings.remote_workers:
            return "this run has no remote workers (processes.remote_workers)"
        mine, its = fedasync_version(), str(header.get("version"))[:100]
        return None if its == mine else f"its fedasync is {its}, and the controller's is {mine}; the same would do"

    def _let_in(self) -> None:
        """Guests take the places that are free."""
        for worker in self.crew.workers:
            if worker.remote and worker.link is None and self._guests:
                guest = self._guests.popleft()
                self.crew.joined(worker.number, guest.link, self._clock(), guest.offset_s)
                guest.link.send(welcome(worker.number, self._told_remote))
                self._say(f"{worker} has come, from {guest.link.name}")

    @property
    def complete(self) -> bool:
        """Whether the run can begin; or go on, once all were there, for which one worker and those of here will do."""
        away = [worker for worker in self.crew.workers if not worker.ready]
        if self.trainer is None or self.trainer_is_new or not self.crew.ready:
            return False
        return not away or (self.were_all_there and all(worker.remote for worker in away))

    def missing(self) -> str | None:
        """Which workers are not there, in words."""
        away = [worker for worker in self.crew.workers if not worker.ready]
        if not away:
            return None
        remote = [worker.number for worker in away if worker.remote]
        named = [("", [worker.number for worker in away if not worker.remote]), ("remote ", remote)]
        words = [f"{kind}rollout worker{'s' * (len(them) > 1)} {listed(them)}" for kind, them in named if them]
        nobody = "; no worker is left" if self.were_all_there and not self.crew.ready else ""
        return f"{' and '.join(words)} not there{nobody}"

    # -- who goes ----------------------------------------------------------------------------------------------

    def gone(self, link: Link) -> bool:
        """A link has ended: who was there has died, or will. Whether it was the trainer's."""
        if link is self.trainer:
            self.trainer = None
            return True
        self._guests = deque(guest for guest in self._guests if guest.link is not link)
        if (worker := self.crew.of(link)) is not None:
            self._lose(worker, "has gone")
        return False

    def failed(self, link: Link, what: str) -> None:
        """Somebody says that it cannot go on. Raises TrainerFailedError for a worker of this machine."""
        if link is self.trainer:
            self._trainer_failed = (what, self._clock())  # perhaps of a rank that was killed: who ended tells
        elif (worker := self.crew.of(link)) is not None and worker.remote:
            self._lose(worker, f"cannot go on ({what})")
        elif worker is not None:
            raise TrainerFailedError(f"a worker: {what}")

    def kill(self, worker: Worker, why: str) -> None:
        """A worker of this machine is killed, and found to have ended; another's link is closed."""
        if not worker.remote:
            self._children.kill(f"worker-{worker.number}")
            return
        if worker.link is not None:
            self._drop(worker.link)
        self._lose(worker, why)

    def look_for_silent(self) -> None:
        """Whoever has said nothing for too long is taken to be dead."""
        now_s, silent_s = self._clock(), self._settings.silent_s
        for worker in self.crew.workers:
            why = f"has said nothing for {silent_s:g} s"
            if worker.ready and now_s - worker.heard_s > silent_s:
                if not worker.remote:
                    self._owner.note(f"{worker} {why} and is killed")
                worker.heard_s = now_s
                self.kill(worker, why)
            elif worker.remote and worker.link is not None and not worker.ready:
                # Only once the run has begun: before, the whole run stalls within the same limit, and first.
                limit_s = self._settings.start_timeout_s
                if now_s - worker.heard_s > limit_s:
                    self.kill(worker, f"has not made its engine within {limit_s:g} s")

    def look_at_processes(self) -> None:
        """Those that have ended by themselves are started again, if they may; ranks come back together.

        Raises TrainerFailedError, LostProcessError.
        """
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
            self._owner.note(words)
            if self.restarts >= self._settings.restarts:
                raise LostProcessError(
                    f"{words}; processes were started again {self.restarts} times (processes.restarts)"
                    f"{self._suspects(each.name)}; {self._owner.explain()}"
                )
            self.restarts += 1
            self._children.restart(each.name)

    def _lose(self, worker: Worker, why: str = "") -> None:
        """A worker has gone, and what it had must be generated by another."""
        prompts = self._owner.lost(self.crew.lost(worker))
        self._had[f"worker-{worker.number}"] = prompts
        if worker.remote:
            what = f"{worker} {why}" + ("; its answers are given to others" if prompts else "")
            self._owner.note(what)
            self._say(what)
            self._let_in()

    def _suspects(self, name: str) -> str:
        """Prompts that a worker had when it died, in words: one of them may be what kills it."""
        prompts = self._had.get(name, [])
        return f"; it had answers to prompts {listed(set(prompts))}" if prompts else ""
