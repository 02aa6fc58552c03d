"""The rollout servers at work: who generates where, what happens next, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from fedasync.simulation.cluster.answers import NOWHERE, Answers
from fedasync.simulation.cluster.cluster import Cluster
from fedasync.simulation.cluster.learning import LearnedAnswers
from fedasync.simulation.cluster.server import RolloutServer, Running

DOWN = 1 << 62
"""The load of a server that takes nothing."""


class Rollouts:
    """Servers, the answers on them, and the tools that answers wait for.

    ``next_s`` says when something happens, and ``step`` makes it happen. Order at one instant: servers by their number,
    then tools by the number of the answer.
    """

    def __init__(self, cluster: Cluster, answers: Answers, learnt: LearnedAnswers | None = None) -> None:
        self.answers = answers
        self._learnt = learnt
        """Where a policy decides how long answers are."""
        cost = cluster.server_cost
        self.servers = [RolloutServer(number, cost) for number in range(cluster.servers)]
        self._prefix_cache = cluster.prefix_cache
        self._shares_prompts = cost.shared_prompts
        self._prompted: dict[int, tuple[float, set[int]]] = {}
        """By server: when something began last, and the leases whose prompts were computed then."""
        self._in_turn = cluster.routing == "round_robin"
        self._turn = 0
        # Servers are some hundreds: to look at all of them in one array costs less than to keep a heap of what each
        # foresees, most of which another event makes void.
        self._ahead_s = np.full(len(self.servers), inf)
        """What each server foresees."""
        self._loads = np.zeros(len(self.servers), np.int64)
        """Answers that run or wait on each server; beyond all bounds where it is down."""
        self._first = 0
        """The server whose turn it is next."""
        self._returns: list[tuple[float, int]] = []
        """(time, answer): tools that will have answered."""
        self._homeless: list[int] = []
        """Answers for which no server is up."""

    @property
    def next_s(self) -> float:
        """When the next thing happens (infinite: nothing will)."""
        self._first = first = int(self._ahead_s.argmin())
        at_s = float(self._ahead_s[first])
        return min(at_s, self._returns[0][0]) if self._returns else at_s

    @property
    def running(self) -> int:
        """Sequences on servers, those included that a full KV cache has put off."""
        return sum(len(server.ends) + len(server.evicted) for server in self.servers)

    def step(self, now: float) -> int | None:
        """What ``next_s`` foresaw for now: the answer that has ended, or None."""
        if self._returns and self._returns[0][0] < self._ahead_s[self._first]:
            self._come_back(now, heappop(self._returns)[1])
            return None
        server = self.servers[self._first]
        if self._learnt is not None and self._learnt.is_unknown(server):
            for told in self._learnt.settle(self.servers):
                self._ahead_s[told.number] = told.next_s()
            return None
        if server.is_full:
            for running in server.evict(now):
                self.answers.stretch(running, server, server.tokens_of(running))
                server.waiting.appendleft(running.answer)
                server.evicted.add(running.answer)
            self._changed(server, now)
            return None
        ended = server.finish(now)
        self.answers.stretch(ended, server, ended.end_clock - ended.start_clock)
        if self._learnt is not None:
            self._learnt.ended(ended.answer)
        self._changed(server, now)
        return None if self._goes_on(ended.answer, server, now) else ended.answer

    def place(self, answer: int, now: float) -> None:
        """Send an answer to a server, where it starts when there is room."""
        server = self._next_in_turn() if self._in_turn else self._least_loaded()
        if server is None:
            self._homeless.append(answer)
        else:
            self._send(answer, server, now)

    def place_group(self, numbers: range, prompt_tokens: int, tokens: Sequence[int], now: float) -> None:
        """``place`` for answers of one turn that have not begun, which is what a run does most."""
        servers, start_s, where = self.servers, self.answers.start_s, self.answers.server
        loads, ahead_s, ran_on = self._loads, self._ahead_s, self.answers.ran_on
        one_by_one = self._in_turn or self._learnt is not None
        for answer, goal in zip(numbers, tokens, strict=True):
            number = int(loads.argmin())
            server = servers[number]
            if one_by_one or server.waiting or not server.has_room(prompt_tokens):
                self.place(answer, now)
                continue
            where[answer] = ran_on[answer] = number
            start_s[answer] = now
            server.start(now, answer, prompt_tokens, goal, self._prefilled(answer, server, now))
            loads[number] += 1
            ahead_s[number] = server.next_s()

    def withdraw(self, answers: Iterable[int], now: float) -> None:
        """Nobody waits for these answers any more: they stop wherever they are, and then others are let in."""
        gone = set(answers)
        touched: dict[int, RolloutServer] = {}
        at_tools = False
        for answer in sorted(gone):
            number = self.answers.server[answer]
            if number == NOWHERE:
                continue
            server = touched[number] = self.servers[number]
            running = server.withdraw(now, answer)
            if running is not None:
                self.answers.stretch(running, server, server.tokens_of(running))
            elif answer in server.waiting:
                server.waiting.remove(answer)
                server.evicted.discard(answer)
            else:
                at_tools = True
                server.release(answer)
        self._homeless = [answer for answer in self._homeless if answer not in gone]
        if at_tools:
            self._returns = [entry for entry in self._returns if entry[1] not in gone]
            heapify(self._returns)
        for server in touched.values():
            self._changed(server, now)

    # -- weights -----------------------------------------------------------------------------------------------

    def pause(self, servers: Iterable[RolloutServer], now: float) -> None:
        """They stop decoding; what they run stays."""
        for server in servers:
            server.pause(now)
            self._ahead_s[server.number] = inf

    def close(self, servers: Iterable[RolloutServer]) -> None:
        """They start nothing new."""
        for server in servers:
            server.closed = True

    def reopen(self, servers: Iterable[RolloutServer], now: float, version: int | None, *, recompute: bool) -> None:
        """They go on, under another version where one is given; ``recompute``: the KV cache is made anew."""
        for server in servers:
            if not server.is_up:
                continue
            server.advance(now)
            if version is not None and version > server.version:  # one that died meanwhile may be back with a newer one
                server.load_weights(version)
                if self._learnt is not None:
                    self._learnt.loaded(server)
            server.closed = False
            server.resume(now, recompute=recompute)
            self._changed(server, now)

    def forget(self, *but: int) -> None:
        """No older weights will be loaded than those that a server has, or these, which are on their way."""
        if self._learnt is not None:
            self._learnt.learning.forget({*but, *(server.version for server in self.servers if server.is_up)})

    # -- faults ------------------------------------------------------------------------------------------------

    def fail(self, server: RolloutServer, now: float) -> list[int]:
        """The server dies: the answers that were on it, which have lost all their tokens."""
        lost: list[Running] = server.fail(now)
        for running in lost:
            self.answers.stretch(running, server, server.tokens_of(running))
        gone = [running.answer for running in lost] + list(server.waiting)
        server.waiting.clear()
        self._ahead_s[server.number] = inf
        self._loads[server.number] = DOWN
        return gone

    def revive(self, server: RolloutServer, now: float, version: int) -> None:
        """The server is back, with the weights of that version."""
        server.advance(now)
        server.is_up = True
        self.reopen([server], now, version, recompute=False)
        homeless, self._homeless = self._homeless, []
        for answer in homeless:
            self.place(answer, now)

    def set_slowness(self, server: RolloutServer, now: float, times: float) -> None:
        server.set_slowness(now, times)
        if server.is_up:
            self._changed(server, now)

    def until(self, now: float) -> None:
        """The run ends: what runs has the tokens that it has by now."""
        for server in self.servers:
            server.advance(now)

    # -- inside ------------------------------------------------------------------------------------------------

    def _changed(self, server: RolloutServer, now: float) -> None:
        """Let in who waits, and foresee anew."""
        if not server.is_up:
            return
        waiting, answers = server.waiting, self.answers
        while waiting and server.has_room(
            context := answers.context(waiting[0]), evicted=bool(server.evicted) and waiting[0] in server.evicted
        ):
            self._start(waiting.popleft(), context, server, now)
        self._loads[server.number] = len(server.ends) + len(waiting)
        self._ahead_s[server.number] = server.next_s()

    def _send(self, answer: int, server: RolloutServer, now: float) -> None:
        self.answers.server[answer] = server.number
        if server.waiting:
            server.waiting.append(answer)
        elif server.has_room(context := self.answers.context(answer)):
            self._start(answer, context, server, now)
        else:
            server.waiting.append(answer)
        self._loads[server.number] = len(server.ends) + len(server.waiting)
        self._ahead_s[server.number] = server.next_s()

    def _start(self, answer: int, context: int, server: RolloutServer, now: float) -> None:
        answers = self.answers
        prefilled = self._prefilled(answer, server, now)
        server.evicted.discard(answer)
        answers.ran_on[answer] = server.number
        if server.held and server.release(answer):
            prefilled = answers.turns[answer][answers.turn[answer] - 1].observation_tokens
        if answers.start_s[answer] != answers.start_s[answer]:  # NaN: it has not started before
            answers.start_s[answer] = now
        left = answers.left(answer) if self._learnt is None else self._learnt.left(answer, server)
        server.start(now, answer, context, left, prefilled)

    def _prefilled(self, answer: int, server: RolloutServer, now: float) -> int | None:
        """Tokens to compute first, of an answer that begins now; None: all."""
        if not self._shares_prompts or self.answers.generated[answer] or self.answers.observed[answer]:
            return None
        at_s, leases = self._prompted.get(server.number, (-inf, set()))
        if at_s != now:
            at_s, leases = self._prompted[server.number] = (now, set())
        lease = answer // self.answers.size
        if lease in leases:
            return 0
        leases.add(lease)
        return None

    def _goes_on(self, answer: int, server: RolloutServer, now: float) -> bool:
        """The turn that ended was not the last: a tool is called."""
        answers = self.answers
        turns = answers.turns.get(answer) if answers.turns else None
        if turns is None or answers.turn[answer] + 1 >= len(turns):
            return False
        if self._prefix_cache:
            server.hold(answer, answers.context(answer))
        heappush(self._returns, (now + turns[answers.turn[answer]].tool_s, answer))
        return True

    def _come_back(self, now: float, answer: int) -> None:
        """The tool has answered: the next turn begins, on the server of the turn before if that is there."""
        answers = self.answers
        answers.observed[answer] += answers.turns[answer][answers.turn[answer]].observation_tokens
        answers.turn[answer] += 1
        server = self.servers[answers.server[answer]]
        if server.is_up:
            self._send(answer, server, now)
        else:
            answers.server[answer] = NOWHERE
            self.place(answer, now)

    def _least_loaded(self) -> RolloutServer | None:
        server = self.servers[self._loads.argmin()]
        return server if server.is_up else None

    def _next_in_turn(self) -> RolloutServer | None:
        for _ in self.servers:
            server = self.servers[self._turn]
            self._turn = (self._turn + 1) % len(self.servers)
            if server.is_up:
                return server
        return None
