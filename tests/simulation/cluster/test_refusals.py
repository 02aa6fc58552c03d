"""What can never run on a cluster, or says nothing there, is refused in one line; what ends too early says so."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import Concurrency, Strategy, Tumbling
from fedasync.report import Report
from fedasync.report.cluster_figures import shares
from fedasync.report.rollouts_table import readable_rollouts, rollouts_table
from fedasync.rl.prompt_queue import PromptQueue
from fedasync.simulation.cluster import AllowShort, Cluster, ClusterSettings, Prompts, Reward, simulate_cluster
from fedasync.simulation.cluster.agents import Tool, Turns
from fedasync.simulation.cluster.draws import MOST_TOKENS
from fedasync.simulation.cluster.lengths import AnswerTokens, TwoLevel, largest
from fedasync.simulation.cluster.prompts import MOST_PROMPTS, PromptStream
from fedasync.simulation.cluster.training import Trainer
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import (
    Constant,
    Empirical,
    Exponential,
    HalfNormal,
    Lognormal,
    Normal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Values,
    Zipf,
)
from fedasync.simulation.traces import Trace, series
from fedasync.strategies.rollouts import PolicyStep, areal
from fedasync.studies.errors import StudyError, parse
from fedasync.studies.plan_measures import measures
from fedasync.studies.show import show_run

from .ideal import cluster, prompts

AREAL = areal(batch=4, eta=1)
NEXT_VERSION = Strategy("next version", Concurrency(4, redispatch="next_version"), Tumbling(2), PolicyStep("ppo"))


def run(strategy: Strategy = AREAL, of: Cluster | None = None, asked: Prompts | None = None, **limits: Any) -> Any:
    return simulate_cluster(strategy, of or cluster(), asked or prompts(), **{"versions": 3, **limits})


# -- every prompt of the data set waits ------------------------------------------------------------------------


@given(count=st.integers(1, 12), waiting=st.sets(st.integers(0, 11)), shuffle=st.booleans(), calls=st.integers(1, 20))
def test_a_queue_looks_for_a_prompt_that_need_not_wait_and_ends(
    count: int, waiting: set[int], shuffle: bool, calls: int
) -> None:
    """It finds one as long as there is one, in whatever epoch, and does not look for ever where there is none."""
    queue = PromptQueue(PromptStream(prompts(count=count, shuffle=shuffle), 0).order, 3)
    free = set(range(count)) - waiting
    for _ in range(calls):
        asked = queue.next(waiting.__contains__)
        assert (asked is None) == (not free)
        assert asked is None or asked.prompt in free
    assert not queue.exhausted
    found = [queue.next(lambda _: False) for _ in range(count)]  # nothing was lost of those passed over
    assert waiting & set(range(count)) <= {asked.prompt for asked in found if asked is not None}


def test_slots_that_wait_for_the_step_are_no_more_than_prompts() -> None:
    told = r"^strategy 'next version': 4 prompts at a time.*data set of 3; prompts.count ≥ 4 would do$"
    with pytest.raises(ValueError, match=told):
        run(NEXT_VERSION, asked=prompts(count=3))
    assert run(NEXT_VERSION, asked=prompts(count=4)).summary["ended"] == "versions"
    assert run(NEXT_VERSION).summary["ended"] == "versions"


# -- what never fits into a server's memory --------------------------------------------------------------------

LAWS = {
    Constant(70.0): 70,
    Uniform(10.0, 90.0): 90,
    Values((3.0, 80.0, 7.0)): 80,
    Zipf(1.2, 16, 180, 2.0): 360,
    Pareto(10.0, 1.5, cap=99.0): 99,
    Lognormal(50.0, 0.0): 50,
    TwoLevel(60.0, 0.0, 0.0): 60,
    Trace("servegen_r1_output"): max(series("servegen_r1_output")),
    Lognormal(50.0, 0.5): inf,
    TwoLevel(60.0, 0.1, 0.0): inf,
    Pareto(10.0, 1.5): inf,
    Exponential(5.0): inf,
    ShiftedExponential(5.0, 1.0): inf,
    HalfNormal(3.0): inf,
    Normal(9.0, 1.0): inf,
}


@pytest.mark.parametrize(("law", "most"), LAWS.items(), ids=lambda value: getattr(value, "kind", ""))
def test_no_draw_exceeds_the_largest_of_a_law(law: AnswerTokens, most: float) -> None:
    assert largest(law) == most
    tokens = PromptStream(prompts(answer_tokens=law, answers=64), 1).group(0, 0).tokens
    assert max(tokens) <= most


def test_a_file_and_a_recorded_run_have_a_largest(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt,generated_tokens\n0,30\n0,12\n1,44\n")
    assert largest(Empirical(str(file), "generated_tokens", 2.0)) == 88
    assert largest(parse(Prompts, {"answer_tokens": {"kind": "recorded", "file": str(file)}}, "s").answer_tokens) == 44


TOOLS = (
    Tool("a", Constant(1.0), Uniform(0.0, 20.0), share=0.5),
    Tool("b", Constant(1.0), Constant(5.0), share=0.5),
)
LONGEST: list[tuple[dict[str, Any], float]] = [
    ({"answer_tokens": Constant(70.0), "prompt_tokens": Uniform(1.0, 30.0)}, 100),
    ({"answer_tokens": Constant(70.0), "prompt_tokens": Exponential(3.0), "most_prompt_tokens": 10}, 80),
    ({"answer_tokens": Constant(70.0), "prompt_tokens": Exponential(3.0)}, inf),
    ({"answer_tokens": Lognormal(9.0, 1.0), "most_tokens": 50}, 50),
    ({"answer_tokens": Constant(70.0), "most_tokens": 50}, 50),
    ({"answer_tokens": None, "turns": Turns(Constant(3.0), Constant(10.0), TOOLS)}, 4 * 10 + 3 * 20),
    ({"answer_tokens": None, "turns": Turns(Constant(3.0), Constant(10.0), TOOLS), "most_tokens": 25}, 25 + 3 * 20),
    ({"answer_tokens": None, "turns": Turns(Lognormal(3.0, 1.0), Constant(10.0), TOOLS)}, inf),
    (
        {"answer_tokens": None, "turns": Turns(Lognormal(3.0, 1.0), Constant(10.0), TOOLS, most_tool_calls=2)},
        3 * 10 + 2 * 20,
    ),
]


@pytest.mark.parametrize(("knobs", "longest"), LONGEST)
def test_the_longest_answer_is_known_where_laws_or_cuts_say_so(knobs: dict[str, Any], longest: float) -> None:
    asked = prompts(answers=4, **knobs)
    assert asked.longest == longest
    stream = PromptStream(asked, 0)
    for group in (stream.group(prompt, 0) for prompt in range(50)):
        if group.prompt_tokens > (asked.most_prompt_tokens or inf):
            continue  # refused when it is its turn
        observed = [sum(turn.observation_tokens for turn in answer) for answer in group.turns or [[]] * 4]
        assert group.prompt_tokens + max(map(sum, zip(group.tokens, observed, strict=True))) <= longest
    small = replace(cluster(), decoding=replace(cluster().decoding, capacity_tokens=max(1, min(longest, 1e9) - 1)))
    if longest < inf:
        with pytest.raises(ValueError, match=rf"^cluster: an answer may need {longest:,} resident tokens, and the KV"):
            run(of=small, asked=asked)
        room = replace(small, decoding=replace(small.decoding, capacity_tokens=longest))
        assert run(of=room, asked=asked).summary["ended"] == "versions"


# -- numbers that are too large --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"count": 10**12}, f"^prompts: count must be ≤ {MOST_PROMPTS:,}, got 1000000000000$"),
        ({"most_tokens": 2**31}, f"^prompts: most_tokens must be ≤ {MOST_TOKENS:,}, got 2147483648$"),
        ({"most_prompt_tokens": 2**31}, "^prompts: most_prompt_tokens must be ≤"),
    ],
)
def test_a_data_set_and_its_cuts_have_a_most(knobs: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        prompts(**knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"answer_tokens": Constant(2.0**31)},
        {"prompt_tokens": Constant(1e300)},
        {"answer_tokens": None, "turns": Turns(Constant(1.0), Constant(2.0**31), TOOLS)},
        {"answer_tokens": None, "turns": Turns(Constant(3.0), Constant(2.0**30), TOOLS)},
        {
            "answer_tokens": None,
            "turns": Turns(Constant(3.0), Constant(1.0), (Tool("a", Constant(1.0), Constant(2.0**30)),)),
        },
    ],
)
def test_more_tokens_than_can_be_counted_are_refused_where_they_are_drawn(knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^prompts: .* tokens were drawn.*≤ 2,147,483,647 would do"):
        run(asked=prompts(**knobs))


@pytest.mark.parametrize("turns", [None, Turns(Constant(3.0), Constant(2.0**40), TOOLS)])
def test_what_is_cut_is_not_too_long(turns: Turns | None) -> None:
    of = {"answer_tokens": Constant(2.0**40)} if turns is None else {"answer_tokens": None, "turns": turns}
    assert PromptStream(prompts(most_tokens=MOST_TOKENS, **of), 0).group(0, 0).tokens == [MOST_TOKENS]


def test_a_prompt_beyond_all_counting_is_refused_as_any_other_that_is_too_long() -> None:
    asked = prompts(prompt_tokens=Values((1e300, 5.0)), most_prompt_tokens=100)
    assert run(asked=asked).summary["ledger"]["failed"]["prompt too long"] >= 12


def test_servers_are_numbered_in_16_bits() -> None:
    assert cluster(servers=32_767).servers == 32_767
    with pytest.raises(ValueError, match=r"^32,768 rollout servers .*; ≤ 32,767 would do$"):
        cluster(servers=32_768)


# -- settings that would say nothing ---------------------------------------------------------------------------


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^switch_s = 5 says nothing where other GPUs train; colocated = true"):
        cluster(switch_s=5.0)
    with pytest.raises(ValueError, match=r"^weights: order = 'one_by_one' says nothing on a colocated cluster"):
        cluster(colocated=True, weights=Weights(order="one_by_one"))
    with pytest.raises(ValueError, match=r"^cluster: allow_short with least = 5 of groups of 4 answers.* 1 to 4 would"):
        run(of=cluster(partial_groups=AllowShort(5)), asked=prompts(answers=4))
    of = cluster(colocated=True, switch_s=5.0, partial_groups=AllowShort(4))
    assert run(of=of, asked=prompts(answers=4)).summary["ended"] == "versions"


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (cluster, {"colocated": "no"}, "colocated must be true or false, got 'no'"),
    (cluster, {"prefix_cache": 1}, "prefix_cache must be true or false, got 1"),
    (
        cluster,
        {"partial_groups": "require_full"},
        "partial_groups must be a RequireFull, an AllowShort or a Refill, got 'require_full'",
    ),
    (cluster, {"partial_groups": AllowShort}, "partial_groups must be a RequireFull, an AllowShort or a Refill, got <"),
    (
        cluster,
        {"decoding": Trainer(mfu=0.4)},
        "decoding must be a Decoding, a FixedSpeed, a SharedSpeed or a MeasuredSpeed, got Train",
    ),
    (cluster, {"trainer": 3.0}, "trainer must be a Trainer, got 3.0"),
    (cluster, {"weights": None}, "weights must be a Weights, got None"),
    (cluster, {"reward": Constant(1.0)}, "reward must be a Reward, got Constant"),
    (cluster, {"gpu": 3}, "gpu must be the name of a preset, or a Gpu, got 3"),
    (cluster, {"model": ("7b",)}, "model must be the name of a preset, or a LanguageModel, got ('7b',)"),
    (Reward, {"latency_s": 1.0}, "reward: latency_s must be a law such as Constant(1.0), got 1.0"),
    (Weights, {"poll_s": "3"}, "weights: poll_s must be a number ≥ 0, or a law such as Constant(1.0), got '3'"),
    (Weights, {"sharded": "yes"}, "weights: sharded must be true or false, got 'yes'"),
    (Trainer, {"mfu": 0.4, "recompute_logprobs": "no"}, "trainer: recompute_logprobs must be true or false, got 'no'"),
    (prompts, {"answer_tokens": 300}, "prompts: answer_tokens must be a TwoLevel, a Recorded or a law, got 300"),
    (prompts, {"prompt_tokens": 150}, "prompts: prompt_tokens must be a law such as Constant(150.0), got 150"),
    (prompts, {"answer_tokens": None, "turns": 3}, "prompts: turns must be a Turns, or the name of a preset, got 3"),
    (prompts, {"shuffle": "no"}, "prompts: shuffle must be true or false, got 'no'"),
    (ClusterSettings, {"versions": 3, "keep_rollouts": 1}, "keep_rollouts must be true or false, got 1"),
    (ClusterSettings, {"versions": 3, "divergence": 0.1}, "divergence must be a ModelledDivergence, got 0.1"),
]


@pytest.mark.parametrize(("make", "knobs", "told"), WRONG)
def test_a_part_of_another_type_is_one_line(make: Any, knobs: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}") as refused:
        make(**knobs)
    assert "\n" not in str(refused.value)


# -- a run that ends in its warm-up ----------------------------------------------------------------------------


def test_a_warm_up_that_leaves_no_updates_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^warm_up_versions = 50 leaves nothing of 3 updates to measure.*0 to 2 would"
    ):
        ClusterSettings(updates=3, warm_up_versions=50)
    told = r"^run: warm_up_versions = 2 leaves nothing to measure of 8 updates, which are 2 versions of 4; 0 to 1 would"
    with pytest.raises(ValueError, match=told):
        run(versions=None, updates=8, warm_up_versions=2)
    assert run(versions=None, updates=9, warm_up_versions=2).summary["shares"]["trainer"]["training"] > 0


@pytest.mark.parametrize("limits", [{"time_s": 2.5}, {"time_s": 0.5}])
def test_a_run_that_ends_in_its_warm_up_measures_nothing_and_says_so(
    limits: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = prompts(sigma=0.0, count=100)
    found = run(asked=asked, **{"versions": None, "warm_up_versions": 50, **limits}, name="early", labels={"s": "x"})
    told = found.summary
    assert told["versions"] < 50
    assert told["incidents"][-1]["what"] == (
        f"the run made {told['versions']} versions, and its warm-up takes 50: throughput, staleness and shares of time "
        "are not measured"
    )
    assert told["rollouts"]["throughput"]["tokens_per_second"] is None
    assert told["rollouts"]["staleness"] == []
    for parts in told["shares"].values():
        assert set(parts.values()) == {None}
    found.save(tmp_path)
    show_run(tmp_path)
    assert "not measured: no version came after the warm-up" in " ".join(capsys.readouterr().out.split())
    report = Report(series="s", figures=())
    (row,) = rollouts_table([found], report).rows(named=True)
    assert row["trainer_waiting"] is None
    assert row["tokens_per_second"] is None
    (readable,) = readable_rollouts([found], report).rows(named=True)
    assert (readable["trainer waits"], readable["servers idle"]) == ("–", "–")
    shares([found], report)
    config: dict[str, Any] = {"cluster": {"generation_gpus": 1, "training_gpus": 1}, "prompts": {"turns": "v1_start"}}
    of_a_plan = {name: measure.of(told, config) for name, measure in measures(on_cluster=True, targets={}).items()}
    for name in ("tokens_per_second", "trainer_waiting_share", "trainer_syncing_share", "servers_idle_share"):
        assert of_a_plan[name] is None


def test_many_incidents_do_not_hide_that_nothing_was_measured() -> None:
    asked = prompts(prompt_tokens=Values((*[9.0] * 40, 1.0)), most_prompt_tokens=5, sigma=0.0)
    found = run(of=cluster(most_attempts=1), asked=asked, versions=None, time_s=3.5, warm_up_versions=9).summary
    assert found["incidents"][-1]["what"].startswith("the run made")
    assert found["incidents_total"] >= len(found["incidents"])


# -- from TOML -------------------------------------------------------------------------------------------------


def test_areals_gate_can_be_taken_away_in_toml() -> None:
    table = {"batch": 4, "eta": "unbounded", "limit": 8}
    assert parse(areal, table, "s.toml: strategy") == areal(batch=4, eta=None, limit=8)
    for eta in ("none", 1.5):
        with pytest.raises(StudyError, match=r"^s.toml: strategy.eta: got .*; an integer would do$"):
            parse(areal, {**table, "eta": eta}, "s.toml: strategy")


GPU = {
    "name": "x",
    "memory_bytes": 8e10,
    "memory_bytes_per_second": 3e12,
    "flops_per_second": 1e15,
    "network_bytes_per_second": 5e10,
    "usd_per_hour": 1.0,
}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"gpu": {**GPU, "memory_byte": 1.0}}, r"gpu\.memory_byte: unknown key; did you mean 'memory_bytes'\?.*\)$"),
        ({"gpu": {**GPU, "usd_per_hour": "3"}}, r"gpu\.usd_per_hour: got \"3\"; a number would do$"),
        ({"gpu": {**GPU, "memory_bytes": -1.0}}, r"gpu: gpu 'x': memory_bytes must be a finite number > 0, got -1.0$"),
        ({"gpu": {"name": "x"}}, r"gpu\.memory_bytes: this key is missing \(and 4 more\)$"),
        ({"gpu": 3}, r"gpu: got 3; a string would do$"),
        ({"model": {"name": "x", "layer": 3}}, r"model\.layer: unknown key; did you mean 'layers'\?"),
    ],
)
def test_a_table_of_ones_own_hardware_is_told_what_it_lacks(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(StudyError, match=r"^s\.toml: cluster\." + told) as refused:
        parse(Cluster, {"generation_gpus": 1, "training_gpus": 1, **keys}, "s.toml: cluster")
    assert "memory_byte:" not in str(refused.value) or "more)" not in str(refused.value)
    assert (
        parse(Cluster, {"generation_gpus": 1, "training_gpus": 1, "gpu": GPU}, "s.toml: cluster").hardware.name == "x"
    )


# -- what only a policy knows, and what it knows by itself -----------------------------------------------------


def test_without_a_policy_lengths_have_to_be_told_and_nothing_is_evaluated() -> None:
    with pytest.raises(ValueError, match=r"prompts: give answer_tokens, or turns \(.*\), got neither"):
        simulate_cluster(AREAL, cluster(), Prompts(answers=2), versions=1)
    with pytest.raises(ValueError, match=r"run: evaluate_every = 2, and nothing is learnt; a \[task\]"):
        simulate_cluster(AREAL, cluster(), prompts(), versions=1, evaluate_every=2)
