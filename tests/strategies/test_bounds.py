"""Bounds told before a run hold in runs, and are reached where generation outruns training."""

from __future__ import annotations

from math import inf

import pytest

from fedasync.core import EveryN, Strategy
from fedasync.runs.measures import event_table
from fedasync.strategies.bounds import most_in_turn, told_of_bounds
from fedasync.strategies.rollouts import areal, nemo_rl, prime_rl, streaming, synchronous_rl, trl, verl

from ..simulation.cluster.ideal import cluster, play, prompts

ROWS = [
    (synchronous_rl(batch=8), 0),
    (areal(batch=8, eta=3), 3),
    (areal(batch=8, eta=3, publication=EveryN(3)), 5),
    (streaming(batch=8, trigger_parameter_sync_step=4), 3),
    (verl(mini_batch=8, trigger_parameter_sync_step=2, staleness_threshold=0.5), 2),
    (nemo_rl(batch=8, max_trajectory_age_steps=2, sampler="ready_first"), 2),
    (nemo_rl(batch=8, max_trajectory_age_steps=2, sampler="in_order"), 2),
    (prime_rl(batch=8), 1),
]


@pytest.mark.parametrize(("strategy", "most"), ROWS, ids=lambda value: str(getattr(value, "name", value)))
def test_without_overtaking_the_oldest_is_as_old_as_told_and_no_older(strategy: Strategy, most: int) -> None:
    """Equal lengths, so that groups come back in order, and training of 5 s against generation of 1 s."""
    assert most_in_turn(strategy) == most
    simulation = play(strategy, cluster(train_s=5.0), prompts(0.0), versions=40)
    events = event_table(simulation.log)
    ages = events.filter(events["kind"] == "consumed")["staleness"].to_list()
    assert max(ages) == most


@pytest.mark.parametrize(
    "strategy", [row for row, _ in ROWS if row.name == "nemo_rl" and row.buffer.order == "dispatch"]
)
def test_in_order_it_holds_whatever_the_lengths(strategy: Strategy) -> None:
    events = event_table(play(strategy, cluster(), prompts(1.5), versions=100).log)
    assert max(events.filter(events["kind"] == "consumed")["staleness"]) <= most_in_turn(strategy)


def test_it_is_told_in_one_line() -> None:
    assert told_of_bounds(prime_rl(batch=64)) == (
        "prime_rl: at most 128 in flight; what is trained in its turn is at most 1 version old; dropped is what would "
        "be older than 8 (max_staleness), which only what was overtaken reaches"
    )
    assert told_of_bounds(areal(batch=512, eta=4)).endswith("what was overtaken may be older, and is trained")
    assert "a step waits for what would be older than 4" in told_of_bounds(
        areal(batch=8, eta=4, max_staleness=4, at_bound="wait")
    )
    assert "which only" not in told_of_bounds(trl(batch=8, max_staleness=2))
    assert told_of_bounds(nemo_rl(batch=8, sampler="in_order")).endswith("and a step waits for its turn")
    assert most_in_turn(areal(batch=8, eta=None, limit=4)) == inf
    assert "nothing that starts is bounded by age" in told_of_bounds(areal(batch=8, eta=None, limit=4))
