"""A rollout server as a fluid: sequences that run on it advance in step, so one clock, in tokens, tells where all are.

A decode iteration gives every running sequence one token and takes base_s[b] + context_s·L seconds, with b sequences
running and L tokens resident. L grows by b an iteration, so Δ iterations from L on take

    T(Δ) = (base_s[b] + context_s·L)·Δ + context_s·b·Δ²/2,

and both T and its inverse are closed forms: nothing happens between two events. A sequence ends when the clock has
advanced by its length; the next to end is the first of an ordered list, and a change of speed moves one event, not b.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from math import ceil, inf, sqrt
from typing import NamedTuple

from fedasync.simulation.cluster.decoding import ServerCost

ADMIT_BELOW = 0.90
"""A sequence starts where the resident tokens stay below this share of the KV cache: room for those that run to grow
(ours; engines estimate it)."""
EVICT_TO = 0.95
"""A full KV cache gives up its youngest sequences until this share is left (ours)."""


ROUNDING = 1e-6
"""Tokens by which a clock may be off a whole number, after an hour of additions."""


class Running(NamedTuple):
    """A sequence on a server: when it ends, whose it is, and where it began."""

    end_clock: float
    answer: int
    start_clock: float
    context: int
    """Tokens that were resident for it when it began."""


_new = tuple.__new__
"""Makes a record without the keyword handling of its class: there are two million in a run."""


class RolloutServer:
    """One replica of the model.

    ``clock`` are tokens that a sequence which had run from the beginning would have; it stands for the moment ``at_s``,
    which may lie ahead while the server prefills. Times that a server is told never go back.
    """

    __slots__ = (
        "_base",
        "_capacity",
        "_context_s",
        "_end_clocks",
        "_most",
        "_prefill_call_s",
        "_prefill_called_s",
        "_prefill_square_s",
        "_prefill_token_s",
        "_stepwise",
        "_unfinished_s",
        "at_s",
        "boundaries",
        "clock",
        "closed",
        "context",
        "decoding_s",
        "down_s",
        "ends",
        "evicted",
        "held",
        "held_tokens",
        "is_full",
        "is_up",
        "number",
        "paused",
        "paused_s",
        "prefill_s",
        "slowness",
        "squares",
        "version",
        "waiting",
    )

    def __init__(self, number: int, cost: ServerCost) -> None:
        self.number = number
        self.clock = 0.0
        self.at_s = 0.0
        self.context = 0.0
        """Resident tokens."""
        self.squares = 0.0
        """Σ (resident tokens of a sequence)², which the attention of a prefill costs."""
        self.ends: list[Running] = []
        """What runs, the next to end first. Some hundreds: to keep them in order takes fewer looks than a heap."""
        self._end_clocks: list[float] = []
        """Their ends, which numbers alone are searched faster in."""
        self.waiting: deque[int] = deque()
        """Answers that wait for room."""
        self.evicted: set[int] = set()
        """Those among them that a full KV cache gave up."""
        self.held: dict[int, int] = {}
        """Answers that are at a tool, and the tokens of theirs that the KV cache holds meanwhile, as long as it can."""
        self.held_tokens = 0
        self.paused = False
        self.is_full = False
        """What ``next_s`` foresaw last is a full KV cache, not an end."""
        self.closed = False
        """Nothing new starts: what runs is to end before new weights are loaded."""
        self.is_up = True
        self.slowness = 1.0
        self.version = 0
        self.boundaries: list[tuple[float, int]] = [(0.0, 0)]
        """Clock at which a version began to generate, and the version."""
        self.decoding_s = 0.0
        self.prefill_s = 0.0
        self.paused_s = 0.0
        self.down_s = 0.0
        self._unfinished_s = 0.0
        """Of a prefill that a pause interrupted."""
        self._base = list(cost.base_s)
        self._context_s = cost.context_s
        self._prefill_call_s = cost.prefill_call_s
        self._stepwise = cost.stepwise
        self._prefill_called_s = -inf
        """When a call of prefill began last: what else begins then is part of it."""
        self._prefill_token_s = cost.prefill_token_s
        self._prefill_square_s = cost.prefill_square_s
        self._capacity = cost.capacity_tokens
        self._most = cost.max_running

    @property
    def load(self) -> int:
        """Answers that run or wait here."""
        return len(self.ends) + len(self.waiting)

    def spent_s(self, now: float) -> tuple[float, float, float, float]:
        """Seconds of decoding, of prefill, paused and down until now, though nothing has happened for a while.

        A prefill is booked whole when it begins.
        """
        since_s = max(0.0, now - self.at_s)
        decodes = self.is_up and not self.paused and bool(self.ends)
        return (
            self.decoding_s + (since_s if decodes else 0.0),
            self.prefill_s - max(0.0, self.at_s - now),
            self.paused_s + (since_s if self.is_up and self.paused else 0.0),
            self.down_s + (0.0 if self.is_up else since_s),
        )

    def has_room(self, context: int, *, evicted: bool = False) -> bool:
        """A sequence of that many tokens may start now; one always may on an empty server.

        A closed server takes only those that a full KV cache has ``evicted`` from it.
        """
        running = len(self.ends)
        if running >= self._most or self.paused or (self.closed and not evicted) or not self.is_up:
            return False
        if self._stepwise and running and self._end_clocks[0] <= self.clock + ROUNDING:
            return False  # more ends in this iteration: what follows begins together
        return not running or self.context + context <= ADMIT_BELOW * self._capacity

    def next_s(self) -> float:
        """When the next sequence ends, or the KV cache is full (infinite: never, as things are)."""
        ends = self.ends
        if not ends or self.paused:
            return inf
        running = len(ends)
        x = self._end_clocks[0] - self.clock
        self.is_full = False
        free = self._capacity - self.context - self.held_tokens
        if (running > 1 or self.held) and (room := free / running) < x:
            x = max(0.0, room)
            self.is_full = True
        context_s = self._context_s
        seconds = (self._base[running] + context_s * (self.context + 0.5 * running * x)) * x
        return self.at_s + seconds * self.slowness

    def advance(self, now: float) -> None:
        """Decode until ``now``; nothing ends before."""
        seconds = now - self.at_s
        if seconds <= 0:
            return
        self.at_s = now
        running = len(self.ends)
        if not self.is_up:
            self.down_s += seconds
        elif self.paused:
            self.paused_s += seconds
        if not running or self.paused:
            return
        self.decoding_s += seconds
        slowness = self.slowness
        a = (self._base[running] + self._context_s * self.context) * slowness
        k = self._context_s * running * slowness
        x = 2.0 * seconds / (a + sqrt(a * a + 2.0 * k * seconds))
        left = self._end_clocks[0] - self.clock
        self._tokens(x if x < left else left, running)

    def start(self, now: float, answer: int, context: int, tokens: float, prefilled: int | None = None) -> None:
        """Begin a sequence of ``context`` tokens that is to grow by ``tokens``.

        ``prefilled`` of its tokens are computed first (None: all); the others of the server wait for that.
        """
        self.advance(now)
        while self.held and self.context + self.held_tokens + context > self._capacity:
            self.release(next(iter(self.held)))
        if self._stepwise:
            clock = max(self.clock, float(ceil(self.clock - ROUNDING)))
            if not self.ends:
                self.clock = clock
            self.context -= clock - self.clock  # what it seems to grow by until it begins
        else:
            clock = self.clock
        end_clock = clock + tokens
        place = bisect(self._end_clocks, end_clock)
        self._end_clocks.insert(place, end_clock)
        self.ends.insert(place, _new(Running, (end_clock, answer, clock, context)))
        square = float(context) * context
        self.context += context
        self.squares += square
        if prefilled is None:
            self._prefill(now, context, square)
        else:
            self._prefill(now, prefilled, square - float(context - prefilled) ** 2)

    def finish(self, now: float) -> Running:
        """The sequence whose end ``next_s`` foresaw for now."""
        running = len(self.ends)
        ended = self.ends.pop(0)
        x = self._end_clocks.pop(0) - self.clock
        self.decoding_s += now - self.at_s
        self.at_s = now
        self._tokens(x, running)
        self.clock = ended.end_clock
        self._leave(ended)
        return ended

    def replace_ends(self, end_clocks: Sequence[float]) -> None:
        """What runs ends elsewhere than was thought: by the clock, in the order of ``ends``; ties by the answers."""
        moved = zip(self.ends, end_clocks, strict=True)
        self.ends = sorted(running._replace(end_clock=max(end, self.clock)) for running, end in moved)
        self._end_clocks = [running.end_clock for running in self.ends]

    def evict(self, now: float) -> list[Running]:
        """The youngest sequences, which a full KV cache gives up, after all that it only holds."""
        self.advance(now)
        given_up = []
        while self.held and self.context + self.held_tokens > EVICT_TO * self._capacity:
            self.release(next(iter(self.held)))
        while len(self.ends) > 1 and self.context > EVICT_TO * self._capacity:
            youngest = max(self.ends, key=lambda entry: (entry.start_clock, entry.answer))
            given_up.append(self._take_out(youngest))
        return given_up

    def withdraw(self, now: float, answer: int) -> Running | None:
        """Stop a sequence; None when it does not run here. What is left of its prefill is not done."""
        self.advance(now)
        found = next((entry for entry in self.ends if entry.answer == answer), None)
        if found is None:
            return None
        if self.at_s > now and found.start_clock == self.clock:
            left_s = min(self.at_s - now, self._prefill_seconds(found.context, float(found.context) ** 2))
            self.at_s -= left_s
            self.prefill_s -= left_s
        return self._take_out(found)

    def hold(self, answer: int, tokens: int) -> None:
        """Keep in the KV cache, if there is room, what an answer at a tool will need again."""
        if self.context + self.held_tokens + tokens <= self._capacity:
            self.held[answer] = tokens
            self.held_tokens += tokens

    def release(self, answer: int) -> bool:
        """Hold no more; whether it was held."""
        tokens = self.held.pop(answer, None)
        self.held_tokens -= tokens or 0
        return tokens is not None

    def fail(self, now: float) -> list[Running]:
        """The server dies: all that ran on it stops."""
        self.advance(now)
        lost = sorted(self.ends, key=lambda entry: entry.answer)
        self.ends.clear()
        self._end_clocks.clear()
        self.evicted.clear()
        self._forget_held()
        self.context = self.squares = 0.0
        self.prefill_s -= max(0.0, self.at_s - now)
        self.at_s = now
        self.is_up = False
        self.paused = False
        return lost

    def pause(self, now: float) -> None:
        """Stop decoding, and a prefill that is under way."""
        if self.paused:
            return
        self.advance(now)
        self.paused = True
        self._unfinished_s = self.at_s - now
        self.prefill_s -= self._unfinished_s
        self.at_s = now

    def resume(self, now: float, *, recompute: bool) -> None:
        """Decode again; ``recompute``: what is resident must be prefilled first."""
        self.advance(now)
        if not self.paused:
            return
        self.paused = False
        if recompute:
            self._prefill(now, self.context, self.squares)
        else:
            self.at_s += self._unfinished_s
            self.prefill_s += self._unfinished_s

    def load_weights(self, version: int) -> None:
        """What is generated from here on is of that version."""
        self.version = version
        self._forget_held()
        self.boundaries.append((self.clock, version))

    def set_slowness(self, now: float, times: float) -> None:
        """From now on everything takes so many times as long, what is left of a prefill included."""
        self.advance(now)
        left_s = max(0.0, self.at_s - now)
        more_s = left_s * (times / self.slowness - 1.0)
        self.at_s += more_s
        self.prefill_s += more_s
        self._unfinished_s *= times / self.slowness
        self.slowness = times

    def tokens_of(self, entry: Running) -> float:
        """Tokens that a sequence has by the clock."""
        return max(0.0, self.clock - entry.start_clock)

    # -- inside ------------------------------------------------------------------------------------------------

    def _tokens(self, x: float, running: int) -> None:
        """Every running sequence grows by x."""
        self.squares += x * (2.0 * self.context + running * x)
        self.context += running * x
        self.clock += x

    def _prefill(self, now: float, tokens: float, squares: float) -> None:
        seconds = self._prefill_seconds(tokens, squares)
        if self._prefill_call_s and tokens and self._prefill_called_s != now:
            self._prefill_called_s = now
            seconds += self._prefill_call_s * self.slowness
        self.prefill_s += seconds
        self.at_s += seconds

    def _prefill_seconds(self, tokens: float, squares: float) -> float:
        return (tokens * self._prefill_token_s + squares * self._prefill_square_s) * self.slowness

    def _forget_held(self) -> None:
        self.held.clear()
        self.held_tokens = 0

    def _leave(self, entry: Running) -> None:
        if not self.ends:
            self.context = self.squares = 0.0  # and rounding with them
            return
        own = entry.context + self.clock - entry.start_clock
        self.context -= own
        self.squares -= own * own

    def _take_out(self, entry: Running) -> Running:
        place = self.ends.index(entry)
        del self.ends[place], self._end_clocks[place]
        self._leave(entry)
        return entry
