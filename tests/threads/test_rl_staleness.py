"""Threads about reinforcement learning whose bound on staleness is not what it says, and about what a bound does.

The number in a test's name is that of the public thread; docs/threads.md has the table.
"""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import pytest

from fedasync.core import EveryN, EveryVersion, Strategy, Tumbling
from fedasync.runs.run import Run
from fedasync.simulation.cluster import AllowShort, Cluster, Faults, Prompts, Refill, RequireFull, simulate_cluster
from fedasync.simulation.cluster.agents import Tool, Turns
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Values
from fedasync.strategies.bounds import most_in_turn, told_of_bounds
from fedasync.strategies.rollouts import areal, nemo_rl, prime_rl, verl

from ..simulation.cluster.ideal import cluster, play, prompts


@cache
def run(strategy: Strategy, train_s: float = 1.0, sigma: float = 1.0, versions: int = 100, seed: int = 0) -> Run:
    """64 slots, single answers of 1 s on average."""
    return simulate_cluster(strategy, cluster(train_s=train_s), prompts(sigma), versions=versions, seed=seed)


def staleness(of: Run, kind: str) -> dict[str, Any]:
    (found,) = (row for row in of.summary["rollouts"]["staleness"] if row["kind"] == kind)
    return found


# -- the bound -------------------------------------------------------------------------------------------------


def test_tinker_822_pacing_trains_the_slow_problems_and_discarding_starves_them() -> None:
    """Discarded and asked again, slow problems came back too late each time, and some were never trained."""
    hard = Values((300.0,) * 15 + (9000.0,))
    asked = prompts(answer_tokens=hard, count=160)

    def told(strategy: Strategy) -> tuple[float, int]:
        of = cluster(train_s=1.0, slots=40, dropped="requeue")
        rollouts = simulate_cluster(strategy, of, asked, versions=100).summary["rollouts"]
        return rollouts["length_bias"]["trained_mean_tokens"], rollouts["reissues"]["most"]

    discards, again = told(areal(batch=8, eta=4, max_staleness=4))
    paces, none = told(areal(batch=8, eta=4, max_staleness=4, at_bound="wait"))
    mean = (15 * 300 + 9000) / 16
    assert discards < 0.8 * mean
    assert again >= 4, "times that one prompt was asked again"
    assert paces == pytest.approx(mean, rel=0.1)
    assert none == 0


def test_tinker_822_depth_and_bound_are_two_knobs() -> None:
    """One knob for both: staleness lay at the bound instead of under it."""
    shallow = run(areal(batch=64, eta=1, limit=64, max_staleness=8), train_s=2.0)
    deep = run(areal(batch=64, eta=8, limit=64, max_staleness=8), train_s=2.0)
    assert shallow.summary["staleness"]["mean"] <= 1.0
    assert deep.summary["staleness"]["mean"] > 6.5
    assert max(shallow.summary["staleness"]["max"], deep.summary["staleness"]["max"]) <= 8


def test_prime_rl_2674_time_in_the_queue_counts_and_both_parts_are_told() -> None:
    """Only versions that came while a rollout was in flight counted, so that one that waited looked fresh (#3009)."""
    of = run(areal(batch=64, eta=6, limit=64), train_s=3.0)
    whole, flying, queued = (staleness(of, kind) for kind in ("oldest", "oldest_in_flight", "in_queue"))
    assert whole["mean"] == pytest.approx(flying["mean"] + queued["mean"])
    assert queued["mean"] > 3 * flying["mean"]
    bounded = run(prime_rl(batch=64, target_lag=6, max_off_policy_steps=3, limit=64), train_s=3.0)
    assert bounded.summary["staleness"]["max"] <= 3
    assert bounded.summary["ledger"]["rejected"]["stale"] > 0, "and dropped from the queue"


def test_prime_rl_3310_a_bound_that_nothing_reaches_is_told_from_the_knobs() -> None:
    """A constant of 1 batch ahead, which no page named, kept all rollouts far from a bound of 8 (#2812)."""
    strategy = prime_rl(batch=64)
    assert told_of_bounds(strategy) == (
        "prime_rl: at most 128 in flight; what is trained in its turn is at most 1 version old; dropped is what would "
        "be older than 8 (max_staleness), which only what was overtaken reaches"
    )
    assert "target_lag" in (prime_rl.__kwdefaults__ or {}), "the constant is a knob"
    assert most_in_turn(prime_rl(batch=64, target_lag=8)) == 8
    typical = run(strategy, sigma=0.5)
    assert typical.summary["staleness"]["max"] < 8
    assert typical.summary["staleness"]["p90"] <= 1 + 1


@pytest.mark.parametrize("limit", [64, None])
def test_areal_1722_the_gate_bounds_the_mean_and_a_bound_of_its_own_each_group(limit: int | None) -> None:
    """A pull request says it: the budget of admission does not guarantee how fresh a trajectory is."""
    gate = run(areal(batch=64, eta=2, limit=limit))
    assert gate.summary["staleness"]["mean"] <= 2
    assert gate.summary["staleness"]["max"] > 2
    drops = run(areal(batch=64, eta=2, limit=limit, max_staleness=2))
    waits = run(areal(batch=64, eta=2, limit=limit, max_staleness=2, at_bound="wait"))
    assert max(each.summary["staleness"]["max"] for each in (drops, waits)) <= 2
    assert not waits.summary["ledger"]["rejected"]
    length = waits.summary["rollouts"]["length_bias"]
    assert length["ratio"] == 1.0
    assert drops.summary["rollouts"]["length_bias"]["ratio"] < 0.9


def test_areal_1722_answers_of_groups_that_are_not_whole_yet_free_their_slots() -> None:
    """A group holds its slots until its slowest answer ends; counted by answers, most of them are used meanwhile."""
    asked = prompts(1.0, answers=16)
    groups, samples = (
        simulate_cluster(strategy, cluster(slots=1024), asked, versions=20)
        for strategy in (areal(batch=16, eta=4, limit=16), areal(batch=16, eta=4, limit_samples=256, answers=16))
    )
    ends = samples.rollouts
    assert ends is not None
    assert samples.summary["time_s"] < 0.75 * groups.summary["time_s"]


# -- versions of tokens ----------------------------------------------------------------------------------------


def test_slime_2092_with_partial_rollouts_off_no_answer_has_tokens_of_two_versions() -> None:
    """Aborted groups went on where they had stopped all the same: one sample had tokens of versions 2, 4 and 6."""
    for partial, most in ((False, 0), (True, 6)):
        strategy = verl(mini_batch=1, trigger_parameter_sync_step=2, staleness_threshold=12.0, partial_rollout=partial)
        asked = prompts(answer_tokens=Values((1000.0, 8000.0) + (1000.0,) * 40))
        simulation = play(strategy, cluster(train_s=0.5, slots=2), asked, versions=12)
        columns = simulation.answers.columns(simulation.rollouts.servers)
        ended = ~np.isnan(columns["end_s"])
        spans = (columns["last_version"] - columns["first_version"])[ended]
        assert spans.max() == most
        assert columns["segments"][ended].max() == 1 + most // 2


def test_slime_1800_what_is_asked_again_is_the_prompt_and_not_what_was_generated_of_it() -> None:
    """Fragments of older versions came back as if they were new (#1781, #2278)."""
    abort = areal(batch=4, eta=2, publication=EveryVersion("abort"))
    of = simulate_cluster(abort, cluster(), prompts(1.0), versions=40)
    table = of.rollouts
    assert table is not None
    assert of.summary["ledger"]["cancelled"]["aborted by a publication"] > 20
    assert table["first_version"].equals(table["base_version"])
    assert table["first_version"].equals(table["last_version"])
    ended = table.filter(table["end_s"].is_not_null())
    assert ended["generated_tokens"].min() >= 1
    trained = of.summary["rollouts"]["waste"]
    assert trained["wasted_tokens"] > 0
    assert trained["generated_tokens"] == (
        trained["trained_tokens"] + trained["wasted_tokens"] + trained["on_the_way_tokens"]
    )


def test_xtuner_2003_how_old_tokens_are_is_told_apart_from_how_old_an_answer_is() -> None:
    """An answer's age is that of its first token: most of its tokens may be fresh."""
    of = run(areal(batch=64, eta=4, limit=64), train_s=0.5)
    assert staleness(of, "token_mean")["mean"] < staleness(of, "dispatch")["mean"]
    table, events = of.rollouts, of.events
    assert table is not None
    trained = table.join(events.filter(events["kind"] == "consumed").select("lease", "staleness"), on="lease")
    for row in of.summary["rollouts"]["older_tokens"][:4]:
        old = trained.filter(trained["staleness"] > row["versions"])
        share = old["generated_tokens"].sum() / trained["generated_tokens"].sum()
        assert row["share_at_least"] <= row["share_at_most"] < share


def test_unirl_310_the_age_of_data_and_the_lag_of_publications_are_two_numbers() -> None:
    """Both were called lag; and a gain of 0.91 times lay within what seeds do."""
    strategy = areal(batch=64, eta=4, limit=64, publication=EveryN(3))
    of = run(strategy)
    debt, age = staleness(of, "publication_debt"), staleness(of, "dispatch")
    assert 0.5 < debt["mean"] < 1.5
    assert debt["max"] == 2
    assert age["mean"] > debt["mean"]
    same = areal(batch=64, eta=4, limit=64)
    assert staleness(run(same), "publication_debt")["max"] == 0
    times = [run(same, versions=20, seed=seed).summary["time_s"] for seed in range(3)]
    assert max(times) / min(times) > 1.01, "one run of each would show a difference where there is none"


def test_skyrl_2246_a_prefix_cache_does_not_outlive_its_weights() -> None:
    """Keys and values of weights up to 17 versions old were used; the switch against it was ignored.

    Three agents take turns on a server of one sequence. A version is published while the third waits for its tool: its
    2,000 tokens are computed anew, though the caches of what runs are kept.
    """
    turns = Turns(Constant(1.0), Constant(1000.0), (Tool("search", Constant(8.0), Constant(500.0)),))
    asked = prompts(answer_tokens=None, turns=turns, prompt_tokens=Constant(500.0), count=3, epochs=1)
    for every, tokens in ((3, 3 * (500 + 500)), (1, 3 * (500 + 500) + 1500)):
        of = cluster(
            decoding=FixedSpeed(1000.0, max_running=1, prefill_tokens_per_second=1e6),
            weights=Weights(transfer=False, kv="keep"),
            prefix_cache=True,
            train_s=0.5,
        )
        strategy = areal(batch=1, eta=2, limit=3, publication=EveryN(every))
        simulation = play(strategy, of, asked, versions=3)
        assert simulation.rollouts.servers[0].prefill_s == pytest.approx(tokens / 1e6)


# -- groups ----------------------------------------------------------------------------------------------------


def _failures(policy: Any, answers: int = 8, failure: float = 0.05) -> tuple[float, float]:
    """Share of groups that failed, and tokens generated for one that is trained."""
    of: Cluster = cluster(slots=512, train_s=0.1, partial_groups=policy, most_attempts=100)
    asked: Prompts = prompts(0.0, answers=answers)
    faults = Faults(answer_failure_probability=failure)
    told = simulate_cluster(areal(batch=32, eta=1), of, asked, faults=faults, versions=40).summary
    failed, consumed = told["ledger"]["failed"].get("answer failed", 0), told["consumed"]
    waste = told["rollouts"]["waste"]
    return failed / (failed + consumed), (waste["trained_tokens"] + waste["wasted_tokens"]) / waste["trained_tokens"]


def test_miles_2800_a_failure_of_one_in_twenty_costs_a_third_of_all_groups_or_one_answer_in_twenty() -> None:
    """An abort of one of eight killed the group: 1 − 0.95⁸ = 33.7 %. Refilled by the answer, none is lost."""
    lost, _ = _failures(RequireFull())
    assert abs(lost - 0.337) <= 4 * sqrt(0.337 * 0.663 / 1900)
    lost, tokens = _failures(Refill())
    assert lost == 0
    assert tokens == pytest.approx(1 / 0.95, abs=0.02)


def test_labs_molt_48_what_becomes_of_a_group_that_lacks_an_answer_is_a_policy() -> None:
    """Whole groups were required, then not any more (#109, #111): a baseline of few, or seven answers for nothing.

    The same question: AReaL #1559 and #1416.
    """
    whole, short, refilled = (_failures(policy) for policy in (RequireFull(), AllowShort(7), Refill()))
    two_lost = 1 - 0.95**8 - 8 * 0.05 * 0.95**7
    assert whole[0] > 5 * short[0] > refilled[0] == 0
    assert abs(short[0] - two_lost) <= 4 * sqrt(two_lost / 1300)
    assert whole[1] > short[1], "what is thrown away"
    assert short[1] > 1.04


def test_nemo_rl_3665_who_evicts_the_slowest_is_told_what_that_does_to_lengths() -> None:
    """Each step leaves the longest answers out. What is trained is compared with what is generated."""
    keeps = run(areal(batch=64, eta=2))
    evicts = run(nemo_rl(batch=64, sampler="windowed_freshest", interrupt=True))
    stops = run(areal(batch=64, eta=2, lease_timeout_s=3.0))
    assert keeps.summary["rollouts"]["length_bias"]["ratio"] == 1.0
    assert evicts.summary["rollouts"]["length_bias"]["ratio"] < 0.9
    cut = stops.summary["rollouts"]["length_bias"]
    assert cut["answers"]["aborted"] > 0
    assert cut["trained_mean_tokens"] < 0.85 * keeps.summary["rollouts"]["length_bias"]["trained_mean_tokens"]


def test_trinity_rft_382_when_generation_stops_what_is_left_is_still_held_to_the_bound() -> None:
    """Freshest first, a queue paid out ever older samples at the end of the run, and training became unstable."""
    asked = prompts(0.5, count=400, epochs=1)
    of = cluster(train_s=2.0)

    def ages(bound: int | None) -> np.ndarray:
        freshest = Strategy(
            "freshest",
            areal(batch=8, eta=12).admission,
            Tumbling(8, "freshest_first"),
            None,
            EveryVersion(),
            max_staleness=bound,
        )
        told = simulate_cluster(freshest, of, asked, versions=99)
        assert told.summary["ended"].startswith("data exhausted")
        trained = told.events.filter(told.events["kind"] == "consumed")
        return trained["staleness"].to_numpy()

    free, held = ages(None), ages(3)
    drain = free[-80:]
    assert np.all(np.diff(drain[::8]) >= 0)
    assert drain[-1] > 10
    assert held.max() <= 3
