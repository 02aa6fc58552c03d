"""Plans whose best candidate is known in closed form, limits that hold, and the same answer however it is computed."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.report.pareto import front
from fedasync.studies.errors import StudyError
from fedasync.studies.plan_file import Limit, Range, load_plan
from fedasync.studies.plan_measures import measures

from .running import TIMING, Command, Ended, changed, contents, moments, runs

P = Path("results/plans/p")

SPLIT = """
[plan]
title = "split"
total_gpus = 8
confirm_seeds = 2

[plan.search]
cluster.generation_gpus = [2, 3, 4, 5, 6, 7]

[run]
versions = 40
warm_up_versions = 10

[cluster]
decoding = { kind = "fixed_speed", tokens_per_second = 10.0, max_running = 8 }
trainer = { tokens_per_second_per_gpu = 240.0 }
weights = { transfer = false }

[prompts]
answers = 4
answer_tokens = { kind = "uniform", low = 10, high = 30 }
prompt_tokens = { kind = "constant", value = 0 }

[strategy]
name = "areal"
batch = 24
eta = 4
"""
"""A generation GPU makes 8 × 10 tokens a second, a training GPU takes 240: of 8 GPUs, 6 and 2 are balanced at 480."""

BUFFERS = """
[plan]
title = "buffers"
objective = "updates_per_second"
confirm_seeds = 3
limits.staleness_mean.at_most = 4.2

[plan.search]
strategy.concurrency = [11, 21, 41, 61]
strategy.buffer_size = [5, 10]

[run]
time_s = 400.0

[population]
clients = 100
duration_s = { kind = "exponential", mean = 10.0 }

[strategy]
name = "fedbuff"
"""
"""n clients at work deliver n/10 a second, (n − 1)/K versions late: within 4.2 on average is n = 41 with K = 10."""

SAMPLED = changed(
    BUFFERS,
    ("confirm_seeds = 3", "confirm_seeds = 3\ntrials = 20\nrungs = [0.25, 1.0]"),
    ("[11, 21, 41, 61]", "{ low = 2, high = 90 }"),
    ("[5, 10]", "{ low = 1, high = 16, log = true }"),
)


@pytest.fixture
def plan(fedasync: Command, folder: Path) -> Callable[..., Ended]:
    """Make a plan of this text; of one process, since runs are short."""

    def command(text: str, *words: str) -> Ended:
        Path("p.toml").write_text(text)
        return fedasync("plan", "p.toml", *words, *(() if "--jobs" in words else ("--jobs", "1")))

    return command


def found(folder: Path = P) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return told


def table(folder: Path = P) -> list[dict[str, str]]:
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_best_split_balances_generation_and_training(plan: Callable[..., Ended]) -> None:
    end = plan(SPLIT)
    assert (end.status, end.err) == (0, "")
    best = found()["recommended"]
    assert best["keys"] == {"cluster.generation_gpus": 6, "cluster.training_gpus": 2}
    assert "generation_gpus = 6\ntraining_gpus = 2" in end.out
    assert best["measures"]["tokens_per_second"]["mean"] == pytest.approx(480, rel=0.03)
    for row in table():
        generating = int(row["cluster.generation_gpus"])
        bound = min(80 * generating, 240 * (8 - generating))
        assert float(row["tokens_per_second"]) <= bound * 1.02
        if generating != 6:  # at the balance either side waits for the other a little
            assert float(row["tokens_per_second"]) == pytest.approx(bound, rel=0.03)
        side = "trainer_waiting_share" if generating < 6 else "servers_idle_share"
        assert (float(row[side]) > 0.05) == (generating != 6)
    assert best["measures"]["usd_per_hour"]["mean"] == 8 * 2.5
    million_usd = 8 * 2.5 / 3600 / best["measures"]["tokens_per_second"]["mean"] * 1e6
    assert best["measures"]["usd_per_million_tokens"]["mean"] == pytest.approx(million_usd, rel=0.01)


def test_the_side_that_waits_is_named(plan: Callable[..., Ended]) -> None:
    few = plan(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", "[2, 3]")))
    assert "Generation binds: the trainer waits" in few.out
    assert "cluster.generation_gpus = 3 is the largest that was searched." in few.out
    many = plan(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", "[7]")))
    assert "Training binds" in many.out


def test_a_limit_is_kept_and_what_it_costs_is_said(plan: Callable[..., Ended]) -> None:
    end = plan(BUFFERS)
    assert end.status == 0
    told = found()
    assert told["recommended"]["keys"] == {"strategy.concurrency": 41, "strategy.buffer_size": 10}
    assert told["recommended"]["measures"]["updates_per_second"]["mean"] == pytest.approx(4.1, rel=0.06)
    assert told["recommended"]["measures"]["staleness_mean"]["mean"] <= 4.2
    assert told["runner_up"]["keys"]["strategy.concurrency"] == 21
    assert told["difference"]["low"] > 0
    assert ": clear." in end.out
    assert "staleness_mean ≤ 4.2 excludes 3 of 8 candidates." in end.out
    (without,) = re.findall(r"Without staleness_mean ≤ 4.2: (.*)", end.out)
    assert re.fullmatch(
        r"concurrency = 61, buffer_size = \d+ has \+\d+\.\d% updates_per_second in 1-seed runs of the whole length, "
        r"chosen among 3 candidates\.",
        without,
    )
    fates = {(row["strategy.concurrency"], row["strategy.buffer_size"]): row["fate"] for row in table()}
    assert fates["41", "10"] == "recommended"
    assert fates["61", "5"] == "outside staleness_mean ≤ 4.2"


def test_seeds_of_the_confirmation_are_others(plan: Callable[..., Ended]) -> None:
    assert plan(changed(BUFFERS, ("confirm_seeds", "seeds = 2\nconfirm_seeds"))).status == 0
    assert found()["recommended"]["seeds"] == [2, 3, 4]
    trials = [json.loads((path / "config.json").read_text())["seed"] for path in (P / "trials").iterdir()]
    assert set(trials) == {0, 1}
    confirmed = runs(P)
    assert len(confirmed) == 3 * 3
    assert all((path / "events.parquet").is_file() for path in confirmed.values())
    assert {path.name for path in (P / "trials").glob("*/*")} == {"config.json", "summary.json"}


def test_nothing_within_the_limits_says_why_and_what_is_nearest(plan: Callable[..., Ended]) -> None:
    text = changed(
        BUFFERS,
        ("at_most = 4.2", "at_most = 0.5"),
        ("confirm_seeds", "limits.updates_per_second.at_least = 3\nconfirm_seeds"),
    )
    end = plan(text)
    assert end.status == 1
    assert "No candidate lies within the limits." in end.out
    assert "staleness_mean ≤ 0.5 excludes 8 of 8 candidates." in end.out
    assert "updates_per_second ≥ 3 excludes 4 of 8 candidates." in end.out
    assert "The nearest: concurrency = 11, buffer_size = 10, with" in end.out
    assert found()["recommended"] is None
    assert len(table()) == 8


@pytest.mark.parametrize("text", [SPLIT, BUFFERS, SAMPLED], ids=["split", "grid", "sampled"])
def test_any_number_of_processes_gives_the_same_bytes(plan: Callable[..., Ended], text: str, tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        assert plan(text, "--jobs", jobs, "--out", str(tmp_path / jobs)).status == 0
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


def test_a_plan_goes_on_where_it_was(plan: Callable[..., Ended]) -> None:
    assert "0 runs made now" not in plan(SAMPLED).out
    files, before = contents(P), moments(P)
    again = plan(SAMPLED)
    assert " 0 runs made now" in again.out
    assert contents(P) == files
    assert moments(P) == before
    for path in sorted((P / "trials").iterdir())[::2]:
        (path / "summary.json").unlink()
    assert plan(SAMPLED).status == 0
    assert contents(P) == files


def test_a_sampler_stays_within_its_trials_and_limits(plan: Callable[..., Ended]) -> None:
    assert plan(SAMPLED).status == 0
    rows = table()
    assert 8 <= len(rows) <= 20
    assert len({(row["strategy.concurrency"], row["strategy.buffer_size"]) for row in rows}) == len(rows)
    assert all(2 <= int(row["strategy.concurrency"]) <= 90 for row in rows)
    assert sum(row["share"] == "1.0" for row in rows) == 7  # a third of 20, rounded up
    told = found()["recommended"]
    assert told["measures"]["staleness_mean"]["mean"] <= 4.2
    within = [row for row in rows if row["share"] == "1.0" and float(row["staleness_mean"]) <= 4.2]
    best = max(float(row["updates_per_second"]) for row in within)
    assert told["measures"]["updates_per_second"]["mean"] >= 0.9 * best


def test_candidates_that_cannot_run_are_counted(plan: Callable[..., Ended]) -> None:
    end = plan(changed(BUFFERS, ("[5, 10]", "[0, 10]")))
    assert end.status == 0
    assert "4 of 8 candidates cannot run; the first, concurrency = 11, buffer_size = 0:" in end.out
    assert "concurrency = 41" in end.out


def test_a_plan_of_which_nothing_can_run_is_refused(plan: Callable[..., Ended]) -> None:
    end = plan(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", "[2, 3]"), ("[cluster]", "[cluster]\ntensor_parallel = 4")))
    assert end.status == 2
    assert "no candidate can run; the first, generation_gpus = 2: cluster: generation_gpus = 2 do not" in end.complaint


@pytest.mark.parametrize(
    "choice", ["[8, 9]", "[0]", "{ low = 8, high = 3_000_000_000 }", "{ low = -3, high = 11, step = 14 }"]
)
def test_a_plan_all_of_whose_splits_are_impossible_is_refused_when_it_is_read(folder: Path, choice: str) -> None:
    Path("p.toml").write_text(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", choice)))
    with pytest.raises(StudyError, match=r"plan\.total_gpus = 8 cannot be divided .* 1 to 7 would do"):
        load_plan(Path("p.toml"))
    Path("p.toml").write_text(changed(Path("p.toml").read_text(), ("[cluster]", "[cluster]\ncolocated = true")))
    assert load_plan(Path("p.toml")).config({"cluster.generation_gpus": 8})["cluster"]["training_gpus"] == 8


def test_a_split_that_leaves_nobody_to_train_is_refused_and_the_others_are_tried(plan: Callable[..., Ended]) -> None:
    end = plan(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", "[5, 6, 8, 9]")))
    assert end.status == 0
    assert found()["recommended"]["keys"] == {"cluster.generation_gpus": 6, "cluster.training_gpus": 2}
    told = "cluster.generation_gpus = 8 of plan.total_gpus = 8 leave nobody to train; < 8 would do"
    assert f"2 of 4 candidates cannot run; the first, generation_gpus = 8: {told}" in end.out
    with pytest.raises(StudyError, match="leave nobody to train"):
        load_plan(Path("p.toml")).config({"cluster.generation_gpus": 8})


def test_a_large_range_is_never_listed(folder: Path) -> None:
    """Lists of these would need tens of gigabytes."""
    for choice, count in (
        ("{ low = 1, high = 3_000_000_000 }", 3_000_000_000),
        ("{ low = 0.0, high = 1e9, step = 0.1 }", 10_000_000_001),
    ):
        Path("p.toml").write_text(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", choice)))
        plan = load_plan(Path("p.toml"))
        assert plan.grid() is None
        (found,) = plan.search.values()
        assert isinstance(found, Range)
        assert found.count == count


def test_aborted_answers_count_against_the_length_ratio(plan: Callable[..., Ended]) -> None:
    """A rule that aborts in flight trains what ends: without the aborted the ratio would be within the limit."""
    lengths = 'answer_tokens = { kind = "lognormal", mean = 100.0, sigma = 1.2 }'
    text = changed(
        SPLIT,
        ("[2, 3, 4, 5, 6, 7]", "[5, 6]"),
        ("answers = 4", "answers = 1"),
        ("confirm_seeds = 2", "confirm_seeds = 2\nlimits.length_ratio.at_least = 0.95"),
        ('answer_tokens = { kind = "uniform", low = 10, high = 30 }', lengths),
        ('name = "areal"\nbatch = 24\neta = 4', 'name = "prime_rl"\nbatch = 24\nmax_off_policy_steps = 3'),
    )
    end = plan(text)
    assert end.status == 1
    assert "length_ratio ≥ 0.95 excludes 2 of 2 candidates." in end.out
    summaries = [json.loads(path.read_text()) for path in (P / "trials").glob("*/summary.json")]
    biases = [summary["rollouts"]["length_bias"] for summary in summaries]
    assert all(bias["answers"]["aborted"] > 0 for bias in biases)
    assert all(bias["ratio"] > 0.95 > bias["ratio_at_most"] for bias in biases)
    assert sorted(float(row["length_ratio"]) for row in table()) == sorted(bias["ratio_at_most"] for bias in biases)


def test_few_tokens_of_aborted_answers_do_not_hide_that_dropped_answers_were_long() -> None:
    """Aborted early, they make the mean of what was begun small: the ratio without them is the lower one then."""
    measure = measures(on_cluster=True, targets={})["length_ratio"]
    for ratio, at_most, least in ((0.8, 1.3, 0.8), (1.0, 0.7, 0.7), (0.9, 0.9, 0.9), (None, None, None)):
        bias = {"ratio": ratio, "ratio_at_most": at_most}
        assert measure.of({"rollouts": {"length_bias": bias}}, {}) == least


MISTAKES = {
    (
        "cluster.generation_gpus =",
        "cluster.generation_gpu =",
    ): "cluster.generation_gpu: unknown key; did you mean 'generation_gpus'?",
    (
        "cluster.generation_gpus =",
        "clusters.generation_gpus =",
    ): "plan.search: clusters.generation_gpus: unknown table; did you mean 'cluster'?",
    ("total_gpus = 8", "total_gpu = 8"): "p.toml: plan.total_gpu: unknown key; did you mean 'total_gpus'?",
    (
        "total_gpus = 8",
        'total_gpus = 8\nobjective = "token_per_second"',
    ): "plan.objective: no measure 'token_per_second'; did you mean",
    ("total_gpus = 8", "total_gpus = 8\nlimits.staleness.at_most = 3"): "plan.limits.staleness: no measure 'staleness'",
    (
        "total_gpus = 8",
        "total_gpus = 8\nlimits.staleness_max.at_mos = 3",
    ): "at_mos: unknown key; did you mean 'at_most'?",
    ("total_gpus = 8", "total_gpus = 8\nlimits.staleness_max = {}"): "a limit without a number",
    (
        "total_gpus = 8",
        "total_gpus = 8\nlimits.staleness_max = { at_least = 3, at_most = 2 }",
    ): "plan.limits.staleness_max: no number is at least 3 and at most 2; at_least ≤ at_most would do",
    ("[2, 3, 4, 5, 6, 7]", "{ low = 1.0, high = inf }"): "high: got inf; a finite number would do",
    ("total_gpus = 8", "total_gpus = 8\nrungs = [0.5]"): "rungs must ascend from > 0 to 1",
    ("[cluster]", "[cluster]\ntraining_gpus = 2"): "leave cluster.training_gpus out",
    ("[2, 3, 4, 5, 6, 7]", "[]"): "plan.search: cluster.generation_gpus: got []; a list of values",
    ("[2, 3, 4, 5, 6, 7]", "[2, 2]"): "values must differ",
    ("[2, 3, 4, 5, 6, 7]", "{ low = 7, high = 2 }"): "low must be < high",
    ("[plan]", "[plans]"): "unknown table",
    ("[cluster]", "[population]\nclients = 3\n[cluster]"): "[population] and [cluster] in one run",
}


@pytest.mark.parametrize("change", MISTAKES)
def test_a_mistake_is_one_line(plan: Callable[..., Ended], change: tuple[str, str]) -> None:
    end = plan(changed(SPLIT, change))
    assert end.status == 2
    assert MISTAKES[change] in end.complaint


def test_a_plan_is_no_study_and_a_study_no_plan(fedasync: Command, plan: Callable[..., Ended]) -> None:
    assert "`fedasync sim p.toml`" in plan(TIMING).complaint
    Path("s.toml").write_text(SPLIT)
    assert "`fedasync plan s.toml`" in fedasync("sim", "s.toml").complaint
    assert "no plan is called 'areal_12'; did you mean 'areal_128'?" in fedasync("plan", "areal_12").complaint
    listed = fedasync("list").out
    assert "areal_128" not in listed
    assert "staleness_sweep" in listed


def test_a_key_of_the_base_can_be_set_and_one_that_is_searched_cannot(plan: Callable[..., Ended]) -> None:
    assert plan(SPLIT, "--set", "run.versions=12").status == 0
    assert all(json.loads((run / "config.json").read_text())["run"]["versions"] == 12 for run in runs(P).values())
    end = plan(SPLIT, "--set", "cluster.generation_gpus=3")
    assert "the plan searches cluster.generation_gpus" in end.complaint


@pytest.mark.parametrize("name", ["areal_128", "fedbuff"])
def test_the_plans_that_come_with_fedasync_can_be_read_and_their_candidates_built(name: str) -> None:
    from fedasync.studies.build import build

    found = load_plan(Path(__file__).parents[2] / "sims" / "plans" / f"{name}.toml")
    grid = replace(found, header=replace(found.header, trials=10**9)).grid()
    assert grid is not None
    candidates = list(grid)
    for values in (candidates[0], candidates[-1]):
        build({**found.config(values), "targets": {}, "seed": 0}, name)
    if found.header.total_gpus is not None:
        for values in candidates:
            cluster = found.config(values)["cluster"]
            assert cluster["generation_gpus"] + cluster["training_gpus"] == 128


def test_the_page_shows_a_plan_that_can_be_read_and_every_measure(folder: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "plan.md").read_text()
    (text,) = re.findall(r"```toml\n(\[plan\]\n.*?)```", page, re.DOTALL)
    Path("p.toml").write_text(text)
    shown, shipped = load_plan(Path("p.toml")), load_plan(root / "sims" / "plans" / "areal_128.toml")
    assert shown.base == shipped.base
    assert shown.search == shipped.search
    without = {"title": "", "description": "", "objective": None}
    assert replace(shown.header, **without) == replace(shipped.header, **without)
    for on_cluster, heading in ((True, "| measure on a cluster |"), (False, "| measure of federated clients |")):
        names = re.findall(
            r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", page.split(heading)[1].split("\n\n")[0], re.M))
        )
        assert set(names) == set(measures(on_cluster=on_cluster, targets={"accuracy": 0.9}))


def test_a_candidate_that_comes_to_a_standstill_cannot_run(plan: Callable[..., Ended]) -> None:
    dead = "[faults]\nservers_down = [{ server = 0, at_s = 1.0 }, { server = 1, at_s = 1.0 }]\n"
    end = plan(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", "[2, 5, 6]")) + dead)
    assert end.status == 0
    assert "1 of 3 candidates cannot run; the first, generation_gpus = 2: stalled" in end.out
    assert found()["recommended"]["keys"]["cluster.generation_gpus"] == 6


def test_a_run_is_shortened_to_whole_numbers_that_leave_something_to_measure(folder: Path) -> None:
    Path("p.toml").write_text(SPLIT)
    plan = load_plan(Path("p.toml"))
    for share in (0.01, 0.1, 0.25, 0.5, 1.0):
        short = plan.shortened(plan.base, share)["run"]
        assert short["versions"] == max(1, round(40 * share + 0.49))
        assert 0 <= short["warm_up_versions"] < short["versions"]
    assert plan.shortened(plan.base, 1.0) == plan.base


numbers = st.floats(-1e6, 1e6)


@given(numbers, numbers)
def test_a_limit_is_missed_by_a_share_of_its_bound(bound: float, value: float) -> None:
    most, least = Limit(at_most=bound), Limit(at_least=bound)
    assert (most.excess(value) > 0) == (value > bound)
    assert (least.excess(value) > 0) == (value < bound)
    assert most.excess(None) == least.excess(float("nan")) == float("inf")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_the_front_is_what_nobody_beats(points: list[tuple[int, int]], x_lower: bool, y_lower: bool) -> None:
    signs = (1 if x_lower else -1, 1 if y_lower else -1)

    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        ahead = [sign * (b - a) for sign, a, b in zip(signs, one, other, strict=True)]
        return min(ahead) >= 0 and max(ahead) > 0

    better = ("lower" if x_lower else "higher", "lower" if y_lower else "higher")
    chosen = [points[i] for i in front(points, *better)]  # type: ignore[arg-type]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) == {point for point in points if not any(beats(other, point) for other in points)}


@given(st.integers(-5, 5), st.integers(1, 30), st.integers(1, 7))
def test_a_range_has_the_numbers_that_it_says(low: int, width: int, step: int) -> None:
    numbers = Range(low, low + width, step)
    assert numbers.values == list(range(low, low + width + 1, step))
    assert numbers.count == len(range(low, low + width + 1, step))
    for least in range(low - 2, low + width + 3):
        for most in (least, least + 2):
            assert numbers.has_between(least, most) == any(least <= value <= most for value in numbers.values)
    assert Range(float(low), float(low + width)).values is None


def test_a_range_that_is_none_is_refused(folder: Path) -> None:
    for wrong in ("{ low = 1, high = 9, step = 0.5 }", "{ low = 0, high = 9, log = true }", "{ low = 1 }"):
        Path("p.toml").write_text(changed(SPLIT, ("[2, 3, 4, 5, 6, 7]", wrong)))
        with pytest.raises(StudyError, match=r"plan\.search: cluster\.generation_gpus"):
            load_plan(Path("p.toml"))
