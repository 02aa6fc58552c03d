"""How new weights reach servers, and what versions the tokens of an answer have: small cases, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import EventLog, EveryN, EveryVersion, Strategy
from fedasync.core.publication import InFlight
from fedasync.runs.measures import event_table
from fedasync.simulation.cluster import ClusterSettings, Faults
from fedasync.simulation.cluster.agents import Tool, Turns
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Uniform, Values
from fedasync.strategies.rollouts import areal, synchronous_rl

from .faulty import Watched, small
from .ideal import cluster, play, prompts

ONE_LONG = prompts(answer_tokens=Values((8000.0,) + (1000.0,) * 20))
"""Beside a first answer of 8 s there is one of 1 s at a time."""


def pair(way: InFlight, every: int = 1) -> Strategy:
    """Two groups in flight, and a version of each."""
    return areal(batch=1, eta=20, limit=2, interrupt=way != "continue", publication=EveryN(every, way))


def answers(simulation: ClusterSimulation) -> dict[str, list[Any]]:
    """The table of rollouts, without answers that did not end."""
    columns = simulation.answers.columns(simulation.rollouts.servers)
    ended = ~np.isnan(columns["end_s"])
    return {name: values[ended].tolist() for name, values in columns.items()}


def commits(simulation: ClusterSimulation) -> list[float]:
    events = event_table(simulation.log)
    return [float(time_s) for time_s in events.filter(events["kind"] == "committed")["time_s"]]


def test_one_answer_has_tokens_of_versions_0_2_4_and_6() -> None:
    """Commits are at 1.5, 2.5, …, and every second one is published: 2,500, 2,000, 2,000, 1,500 tokens."""
    table = answers(play(pair("interrupt", 2), cluster(train_s=0.5), ONE_LONG, versions=9))
    assert (table["start_s"][0], table["end_s"][0]) == (0.0, 8.0)
    assert [table[name][0] for name in ("base_version", "first_version", "last_version", "segments")] == [0, 0, 6, 4]
    assert table["mean_version"][0] == pytest.approx((2 * 2000 + 4 * 2000 + 6 * 1500) / 8000)
    second = [table[name][1] for name in ("base_version", "first_version", "last_version", "segments")]
    assert second == [0, 0, 0, 1]
    third = [table[name][3] for name in ("start_s", "base_version", "first_version", "last_version", "segments")]
    assert third == [2.0, 0, 0, 2, 2]


def test_while_servers_drain_the_trainer_waits_and_an_answer_has_one_version() -> None:
    simulation = play(pair("continue", 2), cluster(train_s=0.5), ONE_LONG, versions=4)
    table = answers(simulation)
    assert set(table["segments"]) == {1}
    assert commits(simulation) == pytest.approx([1.5, 2.5, 8.5, 9.0])  # of what came at 3 s and at 8 s
    shares = simulation.trainer.use.shares()
    assert shares["trainer"]["syncing"] * 9 == pytest.approx(5.5)
    assert shares["servers"]["paused"] == 0.0


def test_aborted_answers_start_anew_under_the_new_version() -> None:
    simulation = play(pair("abort", 2), cluster(train_s=0.5), ONE_LONG, versions=4)
    assert simulation.coordinator.ledger.cancelled.total() == 4
    assert set(answers(simulation)["segments"]) == {1}
    assert answers(simulation)["first_version"] == answers(simulation)["base_version"]


@pytest.mark.parametrize(("kv", "prefill_s"), [("recompute", 0.1 + 0.5), ("keep", 0.1)])
def test_the_kv_cache_is_computed_anew_or_kept(kv: str, prefill_s: float) -> None:
    """Server 1 delivers at 1.1 s, the trainer commits at 4.1 s, and at 4.6 s server 0 goes on with 5,000 tokens."""
    decoding = FixedSpeed(1000.0, max_running=8, prefill_tokens_per_second=10_000.0)
    of = cluster(decoding=decoding, servers=2, train_s=3.0, weights=Weights(transfer=False, load_s=0.5, kv=kv))
    asked = prompts(prompt_tokens=Constant(1000.0), answer_tokens=Values((8000.0, 1000.0, 9000.0)))
    simulation = play(areal(batch=1, eta=1, limit=2), of, asked, versions=2)
    assert simulation.rollouts.servers[0].prefill_s == pytest.approx(prefill_s)
    table = answers(simulation)
    assert table["end_s"][0] == pytest.approx(8.5 + prefill_s)
    assert (table["first_version"][0], table["last_version"][0], table["segments"][0]) == (0, 1, 2)


def test_before_it_learns_of_a_version_a_server_goes_on_with_the_old_one() -> None:
    of = cluster(train_s=0.5, weights=Weights(transfer=False, load_s=0.25, poll_s=0.75))
    simulation = play(pair("interrupt", 2), of, ONE_LONG, versions=3)
    table = simulation.trainer.times.table()
    assert table.filter(table["name"] == "sync_s")["value"].to_list() == [0.0, 0.0, 1.0]
    assert simulation.rollouts.servers[0].paused_s == pytest.approx(0.25)
    columns = simulation.answers.columns(simulation.rollouts.servers)
    # v2 at 2.5 s arrives at 3.5 s: 3,250 tokens of version 0, and at 4 s, the end, 500 of version 2.
    assert simulation.now == pytest.approx(4.0)
    assert columns["mean_version"][0] == pytest.approx(2 * 500 / 3750)


# -- one by one ------------------------------------------------------------------------------------------------


class OneRuns(Watched):
    """Looks at every event whether all servers are paused."""

    all_paused = False

    @property
    def holds_up(self) -> bool:
        self.all_paused |= all(server.paused for server in self.rollouts.servers)
        return super().holds_up


def run(order: str, poll_s: Any = 0.0) -> OneRuns:
    of = small(servers=3, slots=4, train_s=2.0, weights={"order": order, "poll_s": poll_s})
    strategy = areal(batch=4, eta=2)
    simulation = OneRuns(strategy, of, prompts(0.7), ClusterSettings(versions=30), Faults(), 1, EventLog())
    simulation.run()
    return simulation


@pytest.mark.parametrize("poll_s", [0.0, Uniform(0.0, 0.5)])
def test_all_at_once_all_servers_stop_and_one_by_one_never_do(poll_s: Any) -> None:
    together, in_turn = run("all_at_once", poll_s), run("one_by_one", poll_s)
    assert together.all_paused
    assert not in_turn.all_paused
    assert together.trainer.use.shares()["trainer"]["syncing"] > 0
    assert in_turn.trainer.use.shares()["trainer"]["syncing"] == 0
    for simulation in (together, in_turn):
        paused_s = [server.paused_s for server in simulation.rollouts.servers]
        assert paused_s == pytest.approx([29 * 0.3] * 3, abs=0.3 + 1e-9)  # the last version arrives after the end


def test_one_by_one_a_group_may_start_on_a_server_that_is_behind() -> None:
    """Staleness that the gate does not see: its base is the published version, its first token is of an older one."""
    in_turn, together = answers(run("one_by_one")), answers(run("all_at_once"))
    hidden = [base - first for base, first in zip(in_turn["base_version"], in_turn["first_version"], strict=True)]
    assert max(hidden) == 1
    assert min(hidden) <= 0
    assert all(b <= f for b, f in zip(together["base_version"], together["first_version"], strict=True))


# -- colocated, agents, memory ---------------------------------------------------------------------------------


def test_on_a_colocated_cluster_generation_stops_while_training_goes_on() -> None:
    of = cluster(colocated=True, train_s=2.0, switch_s=0.25)
    asked = prompts(answer_tokens=Values((1000.0, 1000.0) + (3000.0,) * 8))
    simulation = play(areal(batch=2, eta=1), of, asked, versions=2)
    # Trained from 1 s to 3 s, and 0.25 s each way; 2 s of generation are left then, at 3.5 s.
    assert answers(simulation)["end_s"][:4] == pytest.approx([1.0, 1.0, 5.5, 5.5])
    spent = {
        what: share * simulation.now for what, share in simulation.trainer.use.shares()["trainer"].items() if share
    }
    assert spent == pytest.approx({"waiting": 3.0, "training": 4.0, "switching": 0.75})
    assert simulation.trainer.use.shares()["servers"]["decoding"] * simulation.now == pytest.approx(3.0)


AGENT = Turns(Constant(1.0), Constant(1000.0), (Tool("search", Constant(8.0), Constant(500.0)),))
"""A second of generation, eight of waiting for a tool, a second of generation."""


def test_an_agent_holds_its_place_in_the_budget_for_its_whole_episode_and_the_servers_idle() -> None:
    """Four episodes at a time keep a server of four sequences busy for two seconds of ten; twenty, all the time."""
    asked = prompts(answer_tokens=None, turns=AGENT)

    def decoding(limit: int) -> float:
        simulation = play(areal(batch=4, eta=9, limit=limit), cluster(slots=4, train_s=0.0), asked, versions=50)
        return simulation.trainer.use.shares()["servers"]["decoding"]

    assert decoding(4) == pytest.approx(0.2, abs=0.01)
    assert decoding(20) == pytest.approx(1.0, abs=0.05)


def test_an_episode_lasts_as_long_as_its_turns_and_tools() -> None:
    table = answers(play(synchronous_rl(batch=1), cluster(), prompts(answer_tokens=None, turns=AGENT), versions=1))
    assert (table["end_s"], table["turns"], table["generated_tokens"]) == ([10.0], [2], [2000])


@pytest.mark.parametrize(("prefix_cache", "prefilled"), [(True, 500 + 500), (False, 500 + 500 + 1000 + 500)])
def test_a_prefix_cache_prefills_what_the_tool_said_and_no_more(prefix_cache: bool, prefilled: int) -> None:
    decoding = FixedSpeed(1000.0, max_running=4, prefill_tokens_per_second=1000.0)
    of = cluster(decoding=decoding, prefix_cache=prefix_cache)
    asked = prompts(answer_tokens=None, turns=AGENT, prompt_tokens=Constant(500.0))
    simulation = play(synchronous_rl(batch=1), of, asked, versions=1)
    assert simulation.rollouts.servers[0].prefill_s == pytest.approx(prefilled / 1000)


def test_a_prefix_that_older_weights_computed_is_not_used() -> None:
    """A version is published at 2 s, while the tools of both agents are at work: 2,000 tokens each, and not 500."""
    decoding = FixedSpeed(1000.0, max_running=4, prefill_tokens_per_second=1e6)
    asked = prompts(answer_tokens=None, turns=AGENT, prompt_tokens=Constant(500.0), count=2, epochs=1)
    for versions, tokens in ((False, 1000), (True, 2500)):
        of = cluster(decoding=decoding, prefix_cache=True, weights=Weights(transfer=False))
        simulation = ClusterSimulation(synchronous_rl(batch=2), of, asked, ClusterSettings(versions=1), Faults(), 0)
        if versions:
            simulation.later(2.0, lambda s=simulation: s.rollouts.reopen(s.rollouts.servers, 2.0, 1, recompute=True))
        simulation.run()
        assert simulation.rollouts.servers[0].prefill_s == pytest.approx(2 * tokens / 1e6)


@given(
    lengths=st.lists(st.integers(1, 900), min_size=4, max_size=12),
    capacity=st.integers(1000, 3000),
    prompt=st.integers(0, 90),
)
@settings(deadline=None, max_examples=60)
def test_when_the_kv_cache_is_full_no_token_is_lost_and_none_made_twice(
    lengths: list[int], capacity: int, prompt: int
) -> None:
    decoding = FixedSpeed(1000.0, max_running=64, capacity_tokens=capacity, prefill_tokens_per_second=10_000.0)
    law = Values(tuple(float(length) for length in lengths))
    asked = prompts(
        answer_tokens=law, prompt_tokens=Constant(float(prompt)), count=len(lengths), shuffle=False, epochs=1
    )
    simulation = play(synchronous_rl(batch=len(lengths)), cluster(decoding=decoding), asked, versions=1)
    table = answers(simulation)
    assert simulation.ended == "versions"
    assert table["generated_tokens"] == lengths
    assert sum(simulation.answers.generated) == pytest.approx(sum(lengths))


def test_a_full_kv_cache_does_evict() -> None:
    """Four of 900 tokens do not fit into 2,000: one goes at 500, one at 667, and both come back later."""
    decoding = FixedSpeed(1000.0, max_running=64, capacity_tokens=2000, prefill_tokens_per_second=10_000.0)
    simulation = play(
        synchronous_rl(batch=4),
        cluster(decoding=decoding, train_s=0.0),
        prompts(answer_tokens=Constant(900.0)),
        versions=1,
    )
    assert simulation.rollouts.servers[0].prefill_s == pytest.approx((500 + 2000 / 3) / 10_000, abs=1e-4)
    assert simulation.now == pytest.approx(0.9 + (500 + 2000 / 3) / 10_000 + 0.4, abs=1e-4)


def test_publishing_every_version_publishes_every_version() -> None:
    simulation = play(areal(batch=4, eta=1, publication=EveryVersion("interrupt")), cluster(), prompts(0.5), versions=9)
    assert [version for _, version in simulation.rollouts.servers[0].boundaries] == list(range(10))
