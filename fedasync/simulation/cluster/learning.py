"""Learning under the virtual clock: what a simulation wants of a learner, and answers whose lengths the policy decides.

An answer is generated whole when it goes to a server, under the version that the server has; the number of its tokens
is how long it runs there. When a server takes new weights, what it runs is generated anew from the tokens that it has
by the server's clock. Nothing is generated before its first token may be the last: all that begins within the time of
one token is one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from math import ceil, floor
from typing import NamedTuple, Protocol

import numpy as np

from fedasync.rl.engine import Finished, Request
from fedasync.rl.episodes import Start
from fedasync.rl.trajectory import Group, Trajectory
from fedasync.simulation.cluster.answers import Answers, Columns
from fedasync.simulation.cluster.draws import MOST_TOKENS
from fedasync.simulation.cluster.prompts import Group as Lengths
from fedasync.simulation.cluster.server import RolloutServer, Running

UNKNOWN = MOST_TOKENS
"""Tokens of an answer that nobody has asked the policy for."""
MOST_AHEAD = 1024
"""Answers that are generated in one call before it is sure that they are wanted."""
_AHEAD = 1 << 48
"""The number of the first of them: none of a run has it."""
_ROUNDING = 1e-6
"""Tokens by which a server's clock may miss a whole number."""


class Learning(Protocol):
    """A policy that is trained, and old versions of it that still generate. Version 0 is there from the beginning."""

    @property
    def answers(self) -> int:
        """Answers of a group."""
        ...

    def prompt_tokens(self, prompt: int) -> int:
        """Tokens of a prompt; any number for one whose answers will fail."""
        ...

    def generate(self, version: int, starts: Sequence[Start]) -> Sequence[Finished]:
        """Each answer whole, from its prefix on, under the weights of a version that was published.

        Raises ValueError for answers of several turns, whose times nothing says.
        """
        ...

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make the next version; the metrics of the step."""
        ...

    def publish(self, version: int) -> None:
        """Keep the present weights, of that version, for ``generate``."""
        ...

    def forget(self, but: Collection[int]) -> None:
        """Nobody will ask for other versions any more than for these; the one published last stays."""
        ...

    def measure(self, names: Collection[str], published: int) -> dict[str, float]:
        """How far the present weights have moved from that version, which is the one published last."""
        ...

    def evaluate(self) -> dict[str, float]:
        """``reward`` and ``exact`` of the present weights on held-out prompts."""
        ...


class Failure(NamedTuple):
    """Why an answer failed, and whether it was its prompt's or its environment's fault, and would be again."""

    words: str
    own_fault: bool


class _Made(NamedTuple):
    """An answer as a version foresees it."""

    version: int
    kept: int
    """Generated tokens that are older: they were there when this version came."""
    finished: Finished
    there: Trajectory | None
    """Its tokens; of a failed answer those before it failed, if any."""

    @property
    def tokens(self) -> int:
        """Generated ones; a failed answer fails at the first token that it needs."""
        trajectory = self.finished.trajectory
        return self.kept + 1 if trajectory is None else trajectory.generated_tokens


class _Wanted(NamedTuple):
    """An answer to generate from its first ``kept`` tokens on."""

    start: Start
    kept: int
    answer: int | None
    """None: of a group that is not yet asked for."""


def _nothing(_: int) -> Sequence[tuple[int, int]]:
    return ()


class LearnedAnswers:
    """What the policy says in a simulated run, from the moment an answer is placed until its group is trained.

    ``upcoming(k)`` tells the next k prompts, with their epochs, that may be asked for: where answers start one by one,
    as many are generated together as started under the version before. What turns out otherwise is generated again, so
    this changes nothing but how many calls there are.
    """

    def __init__(
        self,
        learning: Learning,
        answers: Answers,
        upcoming: Callable[[int], Sequence[tuple[int, int]]] = _nothing,
    ) -> None:
        self.learning = learning
        self._answers = answers
        self._upcoming = upcoming
        self._epochs: dict[int, int] = {}
        """Of leases that are generated."""
        self._made: dict[int, _Made] = {}
        self._ahead: dict[tuple[int, int], tuple[int, list[Finished]]] = {}
        """(prompt, epoch) → a version, and answers that it gives."""
        self._groups: dict[int, Group] = {}
        """Leases that were delivered and wait for the trainer."""
        self._wanted: dict[int, int] = {}
        """Answers that began to run, or whose server has new weights, and the tokens that they had then."""
        self._touched: set[int] = set()
        """Servers of theirs."""
        self._newest = 0
        self._is_new = True
        """Nothing was generated since there is a newer version."""
        self._began = 0
        """Answers that servers began since then, but for those of that moment."""
        self._began_before: int | None = None
        """The same, under the version before."""
        self._told: dict[int, tuple[int, int, float, int]] = {}
        """Of answers that ended: first, last and mean version, stretches."""
        answers.correct = self._correct

    # -- what a run says ---------------------------------------------------------------------------------------

    def ask(self, lease: int, prompt: int, epoch: int) -> Lengths:
        """A lease's answers are to be generated; what is known of their lengths."""
        size = self.learning.answers
        self._epochs[lease] = epoch
        version, ahead = self._ahead.pop((prompt, epoch), (0, []))
        for index, finished in enumerate(ahead):
            answer = lease * size + index
            self._made[answer] = _Made(version, 0, finished._replace(answer=answer), finished.trajectory)
        return Lengths(self.learning.prompt_tokens(prompt), [UNKNOWN] * size, None)

    def failure(self, answer: int) -> Failure | None:
        """Why an answer that has ended failed; None where it did not."""
        finished = self._made[answer].finished
        return None if finished.failure is None else Failure(finished.failure, finished.own_fault)

    def complete(self, lease: int, left_out: Collection[int] = ()) -> None:
        """All answers of a group are there but those ``left_out``: it waits for the trainer."""
        size = self.learning.answers
        numbers = range(lease * size, (lease + 1) * size)
        told = tuple(self._trajectory(answer) for answer in numbers if answer not in left_out)
        base = self._answers.base_version[lease]
        self._forget(lease)
        self._groups[lease] = Group(lease, self._answers.prompt[lease], base, told, size)

    def take(self, leases: Sequence[int]) -> list[Group]:
        """Delivered groups, to train on them, as they were asked for: of one set of groups timing makes one batch."""
        return [self._groups.pop(lease) for lease in sorted(leases)]

    def drop(self, leases: Sequence[int]) -> None:
        """Nobody wants these leases any more."""
        for lease in leases:
            self._forget(lease)
            self._groups.pop(lease, None)

    # -- what servers say --------------------------------------------------------------------------------------

    def left(self, answer: int, server: RolloutServer) -> float:
        """Tokens of an answer that starts on a server now, to its end; to its next one where that is not known."""
        self._began += 1
        if self._is_ready(answer, server.version):
            self._answers.goal[answer] = self._made[answer].tokens
            return self._answers.left(answer)
        generated = self._answers.generated[answer]
        self._wanted[answer] = _whole(generated)
        self._touched.add(server.number)
        return self._wanted[answer] + 1 - generated

    def loaded(self, server: RolloutServer) -> None:
        """The server has new weights: what it runs goes on under them."""
        if server.version > self._newest:
            self._newest, self._is_new = server.version, True
            self._began_before, self._began = self._began, 0
            self._ahead.clear()
        end_clocks = []
        for running in server.ends:
            answer, generated = running.answer, self._answers.generated[running.answer]
            tokens = self._wanted.get(answer, _whole(generated + server.tokens_of(running)))
            if self._is_whole(server.version, answer, tokens):
                end_clocks.append(running.end_clock)
            else:
                self._wanted[answer] = tokens
                self._touched.add(server.number)
                end_clocks.append(running.start_clock + (tokens + 1 - generated))
        server.replace_ends(end_clocks)

    def is_unknown(self, server: RolloutServer) -> bool:
        """What the server foresees is an answer's end that may not be one."""
        return bool(self._wanted) and not server.is_full and server.ends[0].answer in self._wanted

    def ended(self, answer: int) -> None:
        """The answer has its last token."""
        trajectory = self._made[answer].finished.trajectory
        if trajectory is not None:
            versions = trajectory.versions[trajectory.generated]
            mean = float(versions.mean(dtype=np.float64))
            self._told[answer] = (int(versions.min()), int(versions.max()), mean, trajectory.segments)

    def settle(self, servers: Sequence[RolloutServer]) -> list[RolloutServer]:
        """Generate what runs and is not known, and tell servers when it ends; those that were told."""
        told = [servers[number] for number in sorted(self._touched)]
        wanted = [
            (server.version, self._from(running.answer, self._wanted[running.answer]))
            for server in told
            for running in server.ends
            if running.answer in self._wanted
        ]
        self._touched.clear()
        self._wanted.clear()
        wanted.extend(self._likely(servers, self._how_many()))
        if self._is_new:
            self._is_new, self._began = False, 0
        self._generate(wanted)
        for server in told:
            server.replace_ends([self._end_clock(running) for running in server.ends])
        return told

    # -- inside ------------------------------------------------------------------------------------------------

    def _is_ready(self, answer: int, version: int) -> bool:
        """What is known of an answer is what that version makes of the tokens that it has."""
        made = self._made.get(answer)
        return made is not None and made.version == version and made.kept <= _whole(self._answers.generated[answer])

    def _from(self, answer: int, tokens: int) -> _Wanted:
        """An answer, to be generated from its first so many tokens on, as far as they are there."""
        lease, index = divmod(answer, self.learning.answers)
        request = Request(answer, self._answers.prompt[lease], self._epochs[lease], index)
        there = self._made[answer].there if tokens and answer in self._made else None
        if there is None:
            return _Wanted(Start(request), 0, answer)
        tokens = min(tokens, there.generated_tokens)
        return _Wanted(Start(request, cut(there, tokens)), tokens, answer)

    def _is_whole(self, version: int, answer: int, tokens: int) -> bool:
        """The answer has all its tokens already, and gets none of the new version."""
        made = self._made.get(answer) if tokens else None
        if made is None or tokens < made.tokens:
            return False
        self._made[answer] = made._replace(version=version, kept=tokens)
        return True

    def _generate(self, wanted: Sequence[tuple[int, _Wanted]]) -> None:
        """One call a version, of answers in the order of their numbers, wherever they run."""
        for version in sorted({version for version, _ in wanted}):
            mine = sorted((each for own, each in wanted if own == version), key=lambda each: each.start.request.answer)
            found = self.learning.generate(version, [each.start for each in mine])
            for (start, kept, answer), finished in zip(mine, found, strict=True):
                if answer is None:
                    key = (start.request.prompt, start.request.epoch)
                    self._ahead.setdefault(key, (version, []))[1].append(finished)
                    continue
                there = start.prefix if finished.trajectory is None else finished.trajectory
                made = self._made[answer] = _Made(version, kept, finished, there)
                self._answers.goal[answer] = made.tokens

    def _end_clock(self, running: Running) -> float:
        return running.start_clock + (self._answers.goal[running.answer] - self._answers.generated[running.answer])

    def _how_many(self) -> int:
        """Answers that will probably start before there is another version: a quarter more than under the one before,
        and, where those were too few, twice as many as that was."""
        began = 0 if self._is_new else self._began
        rest = (self._began_before or 0) * 5 // 4 - began
        return min(abs(rest), MOST_AHEAD)

    def _likely(self, servers: Sequence[RolloutServer], count: int) -> Iterator[tuple[int, _Wanted]]:
        """So many answers that are the next to start: those that wait on servers, then prompts that are yet to be asked
        for. In the first instant of a run all that wait."""
        up = [server for server in servers if server.is_up]
        left = MOST_AHEAD if self._began_before is None and self._is_new else count
        for row in zip_longest(*(server.waiting for server in up)):
            for server, answer in zip(up, row, strict=True):
                if left <= 0:
                    return
                if answer is None:
                    continue
                left -= 1
                if not self._is_ready(answer, server.version):
                    tokens = _whole(self._answers.generated[answer])
                    if not self._is_whole(server.version, answer, tokens):
                        yield server.version, self._from(answer, tokens)
        size = self.learning.answers
        groups = ceil(min(left, count) / size)
        expected = dict.fromkeys(self._upcoming(groups) if groups else ())
        for place, (prompt, epoch) in enumerate(expected):
            if (prompt, epoch) not in self._ahead:
                for index in range(size):
                    request = Request(_AHEAD + place * size + index, prompt, epoch, index)
                    yield self._newest, _Wanted(Start(request), 0, None)

    def _trajectory(self, answer: int) -> Trajectory:
        trajectory = self._made[answer].finished.trajectory
        if trajectory is None:
            raise AssertionError(f"answer {answer} failed, and its group is delivered with it")
        return trajectory

    def _forget(self, lease: int) -> None:
        self._epochs.pop(lease, None)
        for answer in range(lease * self.learning.answers, (lease + 1) * self.learning.answers):
            self._made.pop(answer, None)

    def _correct(self, columns: Columns) -> None:
        """Versions of answers that ended, from their tokens: by the clock, a part of a token may be of another one."""
        size = self.learning.answers
        ended = np.flatnonzero(~np.isnan(columns["end_s"]))
        numbers = (columns["lease"][ended] * size + columns["answer"][ended]).tolist()
        told = zip(*(self._told[answer] for answer in numbers), strict=True)
        for name, values in zip(("first_version", "last_version", "mean_version", "segments"), told, strict=False):
            columns[name][ended] = values


def cut(trajectory: Trajectory, kept: int) -> Trajectory:
    """The prompt and the first ``kept`` generated tokens of an answer of one turn."""
    end = trajectory.prompt_tokens + kept
    seen = trajectory.observations
    return Trajectory(
        trajectory.tokens[:end],
        trajectory.generated[:end],
        trajectory.log_probs[:end],
        trajectory.versions[:end],
        trajectory.rewards[:end],
        trajectory.finish,
        observations=None if seen is None else seen[: end + 1],
    )


def _whole(tokens: float) -> int:
    return floor(tokens + _ROUNDING)
