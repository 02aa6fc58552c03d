"""Throughput, length bias, prompts and waste of a cluster's run: known answers, laws, and slow recounts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.runs.cluster_measures import LEFT_OUT, shares_text, told_by_rollouts, waste
from fedasync.runs.lease_arrays import lease_arrays
from fedasync.runs.length_bias import length_bias
from fedasync.runs.prompt_accounts import PromptAccounts
from fedasync.runs.rollouts import columns_of

from .cluster_logs import METRICS, Cluster, rollouts
from .logs import Row, record, table

NOTHING = pl.DataFrame(schema=METRICS)
WORLDS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "eta": st.integers(0, 5),
        "most_stale": st.sampled_from([None, 1, 2]),
        "abort": st.booleans(),
        "short": st.booleans(),
        "requeue": st.booleans(),
        "prompts": st.sampled_from([None, 25, 200]),
    }
)
STORY: list[Row] = [
    (0.0, "admitted", 0, 4, 0, 0, -1, None),
    (0.0, "admitted", 1, 1, 0, 0, -1, None),
    (0.0, "admitted", 2, 2, 0, 0, -1, None),
    (1.0, "delivered", 0, 4, 0, 0, 0, None),
    (2.0, "consumed", 0, 4, 0, 0, 0, None),
    (2.0, "committed", -1, -1, -1, 1, -1, None),
    (2.0, "published", -1, -1, -1, 1, -1, None),
    (2.5, "rejected", 1, 1, 0, 1, 1, "stale"),
    (2.5, "admitted", 3, 1, 1, 1, -1, None),
    (3.0, "failed", 3, 1, 1, 1, 0, "timeout"),
    (3.0, "admitted", 4, 3, 1, 1, -1, None),
    (3.5, "delivered", 4, 3, 1, 1, 0, None),
    (5.0, "consumed", 4, 3, 1, 1, 0, None),
    (5.0, "committed", -1, -1, -1, 2, -1, None),
    (5.0, "published", -1, -1, -1, 2, -1, None),
    (5.0, "admitted", 5, 0, 2, 2, -1, None),
    (5.5, "delivered", 5, 0, 2, 2, 0, None),
]
"""Prompts 4 and 3 trained, 2 in flight, 0 buffered, 1 lost twice; the data set has a prompt 5 too. It ends at 6 s."""
ANSWERS = rollouts(
    {"lease": 0, "prompt": 4, "generated_tokens": 10, "end_s": 0.8},
    {"lease": 0, "prompt": 4, "answer": 1, "generated_tokens": 40, "end_s": np.nan},
    {"lease": 1, "prompt": 1, "generated_tokens": 90, "end_s": 2.5},
    {"lease": 2, "prompt": 2, "generated_tokens": 500, "end_s": np.nan},
    {"lease": 3, "prompt": 1, "base_version": 1, "generated_tokens": 7, "start_s": 2.6, "end_s": np.nan},
    {"lease": 4, "prompt": 3, "base_version": 1, "generated_tokens": 20, "start_s": 3.0, "end_s": 3.5},
    {"lease": 5, "prompt": 0, "base_version": 2, "generated_tokens": 33, "start_s": 5.0, "end_s": 5.5},
)


def told(rows: list[Row] = STORY, answers: pl.DataFrame = ANSWERS, **settings: Any) -> dict[str, Any]:
    """The same of a log in packed rows and of its table."""
    asked: dict[str, Any] = {"end_s": 6.0, "prompts": 6, "epochs": 1, **settings}
    found = told_by_rollouts(table(rows), answers, NOTHING, **asked)
    assert found == told_by_rollouts(record(rows), answers.lazy(), NOTHING, **asked)
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_story_of_six_prompts() -> None:
    found = told()
    assert [verdict["holds"] for verdict in found["verdicts"]] == [True, True]
    assert found["verdicts"][0]["detail"] == "6 prompts = 1 unissued + 1 in flight + 1 buffered + 2 trained + 1 dropped"
    assert found["verdicts"][1]["detail"] == "7 answers of 6 groups"
    assert found["conservation"] == {
        "prompts": {"unissued": 1, "in flight": 1, "buffered": 1, "trained": 2, "dropped": {"timeout": 1}},
        "groups": {"in flight": 1, "buffered": 1, "trained": 2, "dropped": {"stale": 1, "timeout": 1}},
    }
    assert found["starvation"] == {
        "prompts": 1,
        "longest_s": 6.0,
        "most_attempts": 2,
        "first": [{"prompt": 1, "since_s": 6.0, "attempts": 2, "reason": "timeout"}],
    }
    assert found["reissues"] == {"groups": 1, "prompts": 1, "most": 1}
    assert found["waste"] == {
        "generated_tokens": 700,
        "trained_tokens": 30,
        "on_the_way_tokens": 533,
        "wasted_tokens": 137,
        "wasted_share": 137 / 700,
        "by_reason": {LEFT_OUT: 40, "stale": 90, "timeout": 7},
    }
    bias = found["length_bias"]
    assert bias["answers"] == {"generated": 3, "trained": 2, "dropped": 1, "aborted": 2, "undecided": 2}
    assert bias["generated_mean_tokens"] == 40.0
    assert bias["ratio"] == pytest.approx(15 / 40)
    assert bias["dropped_ratio"] == pytest.approx(90 / 40)
    assert bias["ratio_at_most"] == pytest.approx(15 / (167 / 5))


def test_throughput_leaves_the_warm_up_out() -> None:
    metrics = pl.DataFrame(
        [(2.0, 1, "tokens", 100.0), (2.0, 1, "train_s", 1.0), (5.0, 2, "tokens", 60.0), (5.0, 2, "train_s", 2.0)],
        schema=METRICS,
        orient="row",
    )

    def throughput(warm_up_versions: int) -> dict[str, Any]:
        found = told_by_rollouts(table(STORY), ANSWERS, metrics, end_s=6.0, warm_up_versions=warm_up_versions)
        told: dict[str, Any] = found["throughput"]
        return told

    whole, late = throughput(0), throughput(1)
    assert (whole["tokens_per_second"], late["tokens_per_second"]) == (160 / 5, 60 / 3)
    assert (whole["generated_tokens_per_second"], late["generated_tokens_per_second"]) == (30 / 5, 20 / 3)
    assert (whole["groups_per_second"], late["groups_per_second"]) == (2 / 5, 1 / 3)
    assert whole["step_s"] == {"mean": 2.5, "p50": 2.0, "p95": 3.0}
    assert late["step_s"] == {"mean": 3.0, "p50": 3.0, "p95": 3.0}
    assert (whole["train_s"], late["train_s"], late["sync_s"]) == (1.5, 2.0, None)
    assert throughput(2)["versions"] == 0
    assert throughput(2)["step_s"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": 4}, "1 that the data set does not have"),
        ({"prompts": 3}, "2 that the data set does not have"),
    ],
)
def test_prompts_beyond_the_data_set_break_conservation(change: dict[str, Any], words: str) -> None:
    verdict = told(**change)["verdicts"][0]
    assert not verdict["holds"]
    assert words in verdict["detail"]


def test_a_prompt_used_twice_in_one_epoch_breaks_conservation() -> None:
    twice: list[Row] = [*STORY, (5.6, "admitted", 6, 3, 2, 2, -1, None)]
    verdict = told(twice)["verdicts"][0]
    assert not verdict["holds"]
    assert verdict["detail"].endswith("; 1 used more often than in 1 epochs")
    assert told(twice, epochs=2)["verdicts"][0]["holds"]
    assert told(twice, epochs=None)["verdicts"][0]["holds"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": 5},
        {"base_version": 1},
        {"lease": 17},
        {"end_s": 6.5},
        {"start_s": -1.0},
        {"last_version": 3, "segments": 2},
    ],
)
def test_rollouts_that_contradict_the_log_are_found(change: dict[str, Any]) -> None:
    row = {**ANSWERS.row(0, named=True), **change}
    answers = pl.concat([pl.DataFrame([row], schema=ANSWERS.schema), ANSWERS[1:]])
    found = told(answers=answers)
    assert list(found) == ["verdicts"]
    assert not found["verdicts"][1]["holds"]
    assert "1 that contradict the log" in found["verdicts"][1]["detail"]


def test_a_trained_group_without_an_answer_is_found() -> None:
    verdict = told(answers=ANSWERS.filter(pl.col("lease") != 4))["verdicts"][1]
    assert not verdict["holds"]
    assert verdict["detail"] == "6 answers of 6 groups, 1 trained groups without an answer that ended"


@settings(max_examples=25, deadline=None)
@given(WORLDS)
def test_laws_of_any_run(chosen: dict[str, Any]) -> None:
    cluster = Cluster(versions=12, **chosen).play()
    found = told_by_rollouts(
        cluster.events,
        cluster.rollouts,
        cluster.metric_table,
        end_s=cluster.now,
        prompts=cluster.prompts,
        epochs=1,
    )
    assert all(verdict["holds"] for verdict in found["verdicts"])
    groups, prompts = found["conservation"]["groups"], found["conservation"]["prompts"]
    places = Counter(group.place for group in cluster.groups)
    assert (groups["in flight"], groups["buffered"]) == (places["in flight"], places["delivered"])
    assert groups["trained"] == places["consumed"]
    assert sum(groups["dropped"].values()) == places["rejected"] + places["cancelled"]
    assert sum(prompts["dropped"].values()) == found["starvation"]["prompts"]
    assert found["reissues"]["groups"] == len(cluster.groups) - len({group.prompt for group in cluster.groups})
    spent = found["waste"]
    parts = spent["trained_tokens"] + spent["on_the_way_tokens"] + spent["wasted_tokens"]
    assert parts == spent["generated_tokens"] == sum(cluster.rollouts["generated_tokens"])
    bias = found["length_bias"]
    assert sum(bias["answers"][name] for name in ("generated", "aborted", "undecided")) == len(cluster.rollouts)
    assert bias["answers"]["trained"] + bias["answers"]["dropped"] == bias["answers"]["generated"]
    if chosen["most_stale"] is None and bias["answers"]["generated"]:
        assert bias["ratio"] == 1.0
        assert all(part["ratio"] in (None, 1.0) for part in bias["deciles"])
    if bias["deciles"]:
        for name in ("generated_share", "trained_share"):
            shares = [part[name] for part in bias["deciles"] if part[name] is not None]
            assert not shares or sum(shares) == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(WORLDS)
def test_length_bias_and_starvation_are_what_a_slow_recount_finds(chosen: dict[str, Any]) -> None:
    cluster = Cluster(versions=10, **chosen).play()
    leases = lease_arrays(cluster.events)
    columns = columns_of(cluster.rollouts, "lease", "generated_tokens", "end_s")
    found = length_bias(leases, *columns.values())
    generated, trained, aborted = [], [], []
    for group in cluster.groups:
        for answer in group.answers:
            if answer.start_s is None or group.place in ("in flight", "delivered"):
                continue
            if answer.end_s is None:
                aborted.append(int(sum(s for s, _ in cluster.stretches(answer)) * cluster.speed))
                continue
            generated.append(answer.tokens)
            if group.place == "consumed":
                trained.append(answer.tokens)
    assert found["answers"]["aborted"] == len(aborted)
    if trained:
        assert found["ratio"] == pytest.approx(np.mean(trained) / np.mean(generated))
        assert found["ratio_at_most"] == pytest.approx(np.mean(trained) / np.mean(generated + aborted))
        for part, before in zip(found["deciles"], [{"to_tokens": 0}, *found["deciles"]], strict=False):
            inside = [before["to_tokens"] < n <= part["to_tokens"] for n in generated]
            own = [before["to_tokens"] < n <= part["to_tokens"] for n in trained]
            assert part["generated_share"] == pytest.approx(np.mean(inside))
            assert part["trained_share"] == pytest.approx(np.mean(own))
    starved = PromptAccounts.of(leases).starvation(cluster.now)
    places: dict[int, list[str]] = {}
    for group in cluster.groups:
        places.setdefault(group.prompt, []).append(group.place)
    lost = {
        prompt: seen
        for prompt, seen in places.items()
        if "consumed" not in seen and seen[-1] in ("rejected", "cancelled")
    }
    assert starved["prompts"] == len(lost)
    assert starved["most_attempts"] == max(map(len, lost.values()), default=None)
    assert {one["prompt"]: one["attempts"] for one in starved["first"]}.items() <= {
        prompt: len(seen) for prompt, seen in lost.items()
    }.items()


def test_dropping_what_is_stale_drops_what_is_long() -> None:
    """The bias that a bound at delivery has: over 0.9 it would hardly be one; aborting shows it in the upper end."""
    plain, dropping, aborting = (
        Cluster(versions=120, eta=4, answers=1, batch=16, servers=4, running=4, **settings).run()
        for settings in ({}, {"most_stale": 2}, {"most_stale": 2, "abort": True})
    )
    bias = {
        name: run.summary["rollouts"]["length_bias"]
        for name, run in zip("pda", (plain, dropping, aborting), strict=True)
    }
    assert bias["p"]["ratio"] == bias["p"]["ratio_at_most"] == 1.0
    assert bias["d"]["ratio"] < 0.9
    assert bias["d"]["dropped_ratio"] > 2.0
    assert bias["d"]["deciles"][9]["ratio"] < 0.7
    assert bias["d"]["deciles"][0]["ratio"] > 0.95
    assert bias["a"]["ratio_at_most"] < 0.95


def test_lengths_that_are_all_equal_are_one_tenth() -> None:
    rows = [row for row in STORY if row[2] in (-1, 0)]
    answers = rollouts(
        *({"lease": 0, "prompt": 4, "answer": j, "generated_tokens": 8, "end_s": 1.0} for j in range(20))
    )
    bias = length_bias(lease_arrays(table(rows)), *columns_of(answers, "lease", "generated_tokens", "end_s").values())
    assert [part["generated_share"] for part in bias["deciles"]] == [1.0, *[0.0] * 9]
    assert [part["ratio"] for part in bias["deciles"]] == [1.0, *[None] * 9]


def test_an_empty_run_is_told_too() -> None:
    found = told([], ANSWERS.clear(), prompts=3)
    assert found["conservation"]["prompts"]["unissued"] == 3
    assert found["staleness"] == []
    assert found["length_bias"]["ratio"] is None
    assert found["waste"]["wasted_share"] == 0.0
    nothing = lease_arrays(table([]))
    assert waste(nothing, *(np.zeros(0, np.int64),) * 3)["generated_tokens"] == 0  # type: ignore[call-arg]


def test_shares_are_told_where_there_are_any() -> None:
    assert shares_text({"training": 0.5, "syncing": 0.0, "waiting": 0.5}) == {"training": "50.0%", "waiting": "50.0%"}
