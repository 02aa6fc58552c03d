"""The fluid server beside a server that decodes token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.simulation.cluster.decoding import ServerCost
from fedasync.simulation.cluster.server import RolloutServer


def cost(
    *,
    overhead_s: float = 0.01,
    per_sequence_s: float = 1e-3,
    context_s: float = 1e-6,
    prefill_token_s: float = 0.0,
    prefill_square_s: float = 0.0,
    capacity: float = inf,
    most: int = 64,
) -> ServerCost:
    base = tuple(overhead_s + per_sequence_s * running for running in range(most + 1))
    return ServerCost(base, context_s, prefill_token_s, prefill_square_s, capacity, most)


@dataclass
class TokenByToken:
    """Every iteration gives every running sequence one token; sequences start between iterations."""

    cost: ServerCost
    now: float = 0.0
    running: dict[int, list[int]] = field(default_factory=dict)  # answer → [context, tokens left]

    def iterate(self) -> list[int]:
        context = sum(sequence[0] for sequence in self.running.values())
        b = len(self.running)
        # The fluid integrates the context over the iteration: it grows by b while the iteration goes on.
        self.now += self.cost.base_s[b] + self.cost.context_s * (context + b / 2)
        for sequence in self.running.values():
            sequence[0] += 1
            sequence[1] -= 1
        ended = sorted(answer for answer, sequence in self.running.items() if not sequence[1])
        for answer in ended:
            del self.running[answer]
        return ended


jobs = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 400)), min_size=1, max_size=40)


@given(jobs)
@settings(deadline=None, max_examples=60)
def test_sequences_that_start_together_end_when_they_do_token_by_token(sequences: list[tuple[int, int]]) -> None:
    slow, fluid = TokenByToken(cost()), RolloutServer(0, cost())
    for answer, (context, tokens) in enumerate(sequences):
        slow.running[answer] = [context, tokens]
        fluid.start(0.0, answer, context, tokens)
    theirs = []
    while slow.running:
        theirs.extend((answer, slow.now) for answer in slow.iterate())
    ours = []
    while fluid.ends:
        now = fluid.next_s()
        ours.append((fluid.finish(now).answer, now))
    assert [answer for answer, _ in ours] == [answer for answer, _ in theirs]
    assert [now for _, now in ours] == pytest.approx([now for _, now in theirs], rel=1e-9)
    assert fluid.context == fluid.squares == 0.0


@given(jobs, st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_sequences_that_start_later_slow_the_others_down_as_they_do_token_by_token(
    sequences: list[tuple[int, int]], together: int
) -> None:
    """Each next one starts at the moment at which one ends, as on a server that is kept full."""
    slow, fluid = TokenByToken(cost()), RolloutServer(0, cost())
    queue = list(enumerate(sequences))
    for answer, (context, tokens) in queue[:together]:
        slow.running[answer] = [context, tokens]
        fluid.start(0.0, answer, context, tokens)
    theirs, rest = [], queue[together:]
    while slow.running:
        for answer in slow.iterate():
            theirs.append((answer, slow.now))
            if rest:
                following, (context, tokens) = rest.pop(0)
                slow.running[following] = [context, tokens]
    ours, rest = [], queue[together:]
    while fluid.ends:
        now = fluid.next_s()
        ours.append((fluid.finish(now).answer, now))
        if rest:
            following, (context, tokens) = rest.pop(0)
            fluid.start(now, following, context, tokens)
    assert [answer for answer, _ in ours] == [answer for answer, _ in theirs]
    assert [now for _, now in ours] == pytest.approx([now for _, now in theirs], rel=1e-9)


@given(jobs, st.lists(st.floats(0.0, 5.0), max_size=20))
@settings(deadline=None, max_examples=60)
def test_looking_at_a_server_in_between_changes_nothing(sequences: list[tuple[int, int]], looks: list[float]) -> None:
    """Advancing to any moments gives the same ends: T(Δ) and its inverse agree."""
    plain, looked_at = RolloutServer(0, cost()), RolloutServer(0, cost())
    for answer, (context, tokens) in enumerate(sequences):
        plain.start(0.0, answer, context, tokens)
        looked_at.start(0.0, answer, context, tokens)
    moments = sorted(looks)
    while plain.ends:
        now = plain.next_s()
        for moment in moments:
            if looked_at.at_s < moment < now:
                looked_at.advance(moment)
        assert looked_at.next_s() == pytest.approx(now, rel=1e-9)
        assert plain.finish(now).answer == looked_at.finish(looked_at.next_s()).answer
    assert looked_at.decoding_s == pytest.approx(plain.decoding_s, rel=1e-9)


def test_a_pause_moves_every_end_by_its_length_and_a_recomputed_cache_by_its_prefill() -> None:
    prices = cost(prefill_token_s=1e-4, prefill_square_s=1e-8, context_s=0.0, per_sequence_s=0.0)
    servers = [RolloutServer(number, prices) for number in range(3)]
    for server in servers:
        server.start(0.0, 0, 100, 1000, prefilled=0)
        server.start(0.0, 1, 200, 1000, prefilled=0)
    undisturbed, kept, recomputed = servers
    for server in (kept, recomputed):
        server.pause(4.0)
        assert server.next_s() == inf
    kept.resume(7.0, recompute=False)
    recomputed.resume(7.0, recompute=True)
    assert undisturbed.next_s() == pytest.approx(10.0)
    assert kept.next_s() == pytest.approx(13.0)
    tokens, squares = 500 + 600, 500**2 + 600**2
    assert recomputed.next_s() == pytest.approx(13.0 + tokens * 1e-4 + squares * 1e-8)
    assert kept.paused_s == recomputed.paused_s == pytest.approx(3.0)


def test_a_prefill_that_a_pause_interrupts_goes_on_afterwards() -> None:
    server = RolloutServer(0, cost(prefill_token_s=0.01, context_s=0.0, per_sequence_s=0.0))
    server.start(0.0, 0, 100, 10)  # 1 s of prefill, 0.1 s of decoding
    server.pause(0.25)
    server.resume(5.0, recompute=False)
    assert server.next_s() == pytest.approx(5.0 + 0.75 + 0.1)
    assert server.prefill_s == pytest.approx(1.0)
    server.finish(server.next_s())
    assert server.decoding_s == pytest.approx(0.1)


def test_time_is_decoding_prefilling_paused_down_or_idle_and_nothing_twice() -> None:
    server = RolloutServer(0, cost(prefill_token_s=0.01, context_s=0.0, per_sequence_s=0.0))
    server.start(2.0, 0, 100, 100)  # idle until 2, prefill to 3, then 1 s of decoding
    server.pause(3.5)
    server.resume(4.5, recompute=False)
    server.finish(server.next_s())  # at 5
    server.advance(6.0)
    server.fail(6.0)
    server.advance(9.0)
    assert (server.decoding_s, server.prefill_s, server.paused_s, server.down_s) == pytest.approx((1, 1, 1, 3))


def test_a_full_cache_gives_up_the_youngest_and_never_the_only_one() -> None:
    server = RolloutServer(0, cost(capacity=1000.0))
    server.start(0.0, 0, 300, 500)
    server.start(0.0, 1, 300, 500)
    server.advance(0.05)
    server.start(0.05, 2, 250, 500)
    now = server.next_s()
    assert server.is_full
    given_up = server.evict(now)
    assert [running.answer for running in given_up] == [2]
    assert server.context <= 950
    while server.ends:
        now = server.next_s()
        if server.is_full:
            assert len(server.evict(now)) < len(server.ends) + 1
        else:
            server.finish(now)
    alone = RolloutServer(0, cost(capacity=100.0))
    alone.start(0.0, 0, 90, 500)
    now = alone.next_s()
    assert not alone.is_full
    assert alone.finish(now).answer == 0


def test_room_is_a_place_among_those_that_run_and_tokens_in_the_cache() -> None:
    server = RolloutServer(0, cost(capacity=1000.0, most=2))
    assert server.has_room(5000)  # an empty server takes what it can never hold more of
    server.start(0.0, 0, 500, 10)
    assert server.has_room(400)
    assert not server.has_room(401)
    server.start(0.0, 1, 100, 10)
    assert not server.has_room(1)
    server.closed = True
    server.finish(server.next_s())
    assert not server.has_room(1)
