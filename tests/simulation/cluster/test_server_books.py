"""What a server books: prefills that are not done, prefixes that it holds, those whom a full cache put off."""

from __future__ import annotations

import pytest

from fedasync.core import EveryVersion
from fedasync.simulation.cluster import Cluster, Faults, Prompts, ServerDown, Tool, Turns
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.server import RolloutServer
from fedasync.simulation.cluster.training import Trainer
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Lognormal
from fedasync.strategies import areal, synchronous_rl

from .ideal import play
from .test_server import cost


def slow_prefill(*, kv: str = "keep", running: int = 4) -> Cluster:
    return Cluster(
        generation_gpus=2,
        training_gpus=1,
        decoding=FixedSpeed(tokens_per_second=1000.0, max_running=running, prefill_tokens_per_second=1000.0),
        trainer=Trainer(step_s=1.0),
        weights=Weights(kv=kv, transfer=False),  # type: ignore[arg-type]
    )


def test_who_is_cancelled_in_the_same_instant_is_not_let_in_first() -> None:
    """An abort takes all out before anybody takes their places: nobody is started to be stopped at once."""
    asked = Prompts(answers=2, prompt_tokens=Constant(2000.0), answer_tokens=Lognormal(800.0, 0.5))
    strategy = areal(batch=4, eta=4, publication=EveryVersion("abort"))
    simulation = play(strategy, slow_prefill(), asked, versions=20)
    assert simulation.coordinator.ledger.cancelled.total() > 20
    columns = simulation.answers.columns(simulation.rollouts.servers)
    starts = len(columns["lease"])
    finished = int((columns["end_s"] == columns["end_s"]).sum())
    assert starts <= finished + 8 * simulation.coordinator.version  # those that ran at each of the aborts, no more


def test_a_prefill_of_a_sequence_that_is_withdrawn_is_not_done() -> None:
    server = RolloutServer(0, cost(prefill_token_s=0.01, context_s=0.0, per_sequence_s=0.0))
    server.start(0.0, 0, 100, 10)  # 1 s
    server.start(0.0, 1, 300, 10)  # 3 s behind it
    assert server.withdraw(0.5, 1) is not None
    assert server.prefill_s == pytest.approx(1.0)
    assert server.next_s() == pytest.approx(1.0 + 0.1)


def test_a_server_that_slows_down_slows_the_prefill_under_way() -> None:
    server = RolloutServer(0, cost(prefill_token_s=0.1, context_s=0.0, per_sequence_s=0.0))
    server.start(0.0, 0, 100, 100)  # 10 s, then 1 s of decoding
    server.set_slowness(1.0, 10.0)
    assert server.next_s() == pytest.approx(1.0 + 90.0 + 10.0)


@pytest.mark.parametrize("limits", [{"versions": 20, "warm_up_versions": 7}, {"time_s": 33.3}])
def test_shares_of_time_lie_between_0_and_1_and_add_up(limits: dict[str, float]) -> None:
    """Also where a prefill is under way as the warm-up, or the run, ends."""
    asked = Prompts(answers=2, prompt_tokens=Constant(3000.0), answer_tokens=Lognormal(500.0, 1.0))
    simulation = play(areal(batch=4, eta=4), slow_prefill(), asked, **{"versions": None, **limits})
    for shares in simulation.trainer.use.shares().values():
        assert all(0.0 <= share <= 1.0 for share in shares.values())
        assert sum(shares.values()) == pytest.approx(1.0)


def test_what_a_server_holds_of_agents_at_their_tools_takes_room_and_goes_first() -> None:
    server = RolloutServer(0, cost(capacity=1000.0, prefill_token_s=0.001))
    server.hold(7, 600)
    server.hold(8, 300)
    server.hold(9, 200)  # no room
    assert list(server.held) == [7, 8]
    server.start(0.0, 0, 300, 50)  # the oldest makes room
    assert list(server.held) == [8]
    server.start(0.0, 1, 300, 50)
    assert server.context + server.held_tokens <= 1000
    while server.ends:
        now = server.next_s()
        if server.is_full:
            assert server.held
            assert not server.evict(now)
        else:
            server.finish(now)
    server.hold(5, 100)
    server.load_weights(1)
    assert not server.held


def test_weights_that_wait_for_what_runs_wait_for_those_that_a_full_cache_put_off() -> None:
    decoding = FixedSpeed(tokens_per_second=1000.0, max_running=64, capacity_tokens=3000.0)
    of = Cluster(
        generation_gpus=1,
        training_gpus=1,
        decoding=decoding,
        trainer=Trainer(step_s=0.2),
        weights=Weights(transfer=False),
    )
    asked = Prompts(answers=1, prompt_tokens=Constant(100.0), answer_tokens=Lognormal(700.0, 0.6), most_tokens=2000)
    simulation = play(areal(batch=2, eta=3, interrupt=False), of, asked, versions=40)
    columns = simulation.answers.columns(simulation.rollouts.servers)
    whole = columns["end_s"] == columns["end_s"]
    assert (columns["first_version"] == columns["last_version"])[whole].all()
    assert set(columns["segments"][whole]) == {1}


def test_segments_count_changes_of_version_and_no_turns() -> None:
    tool = Tool("search", latency_s=Constant(0.5), observation_tokens=Constant(10.0), failure_probability=0.0)
    turns = Turns(tool_calls=Constant(3.0), segment_tokens=Constant(500.0), tools=(tool,))
    of = slow_prefill(running=64)
    simulation = play(synchronous_rl(batch=2), of, Prompts(answers=2, turns=turns), versions=4)
    columns = simulation.answers.columns(simulation.rollouts.servers)
    assert set(columns["turns"]) == {4}
    assert set(columns["segments"]) == {1}


def test_an_outage_a_day_is_no_reason_to_give_up() -> None:
    """Answers lost in a row are counted from the last that came back."""
    downs = tuple(ServerDown(0, 5.0 + 10.0 * k, 1.0) for k in range(40))
    asked = Prompts(answers=16, prompt_tokens=Constant(0.0), answer_tokens=Lognormal(1000.0, 0.5))
    strategy = synchronous_rl(batch=4)
    of = slow_prefill(running=256)
    simulation = play(strategy, of, asked, faults=Faults(servers_down=downs), versions=100)
    assert simulation.ended == "versions"
    assert len(simulation.incidents) > 70
