"""Prompts: lengths as published or recorded, the order of a data set, and draws that depend on their names alone."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from math import exp, log
from pathlib import Path
from statistics import NormalDist

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.simulation.cluster.lengths import Recorded, TwoLevel
from fedasync.simulation.cluster.prompts import BLOCK, Prompts, PromptStream
from fedasync.simulation.laws import Constant, Law, Lognormal, Values
from fedasync.simulation.traces import Trace, series
from fedasync.studies.errors import StudyError, parse

AREAL = TwoLevel(median=6900, prompt_sigma=0.70, answer_sigma=0.40)
MOST = 27_648


def lengths(prompts: Prompts, count: int, seed: int = 0) -> np.ndarray:
    stream = PromptStream(prompts, seed)
    return np.array([stream.group(prompt, 0).tokens for prompt in range(count)], float)


def cut_share(law: TwoLevel, most: float) -> float:
    """Share of the answers that would be longer, in closed form."""
    return NormalDist().cdf(log(law.median / most) / law.sigma) if law.sigma else float(law.median > most)


def cut_moment(law: TwoLevel, order: int, most: float) -> float:
    """E[min(S, most)^order], in closed form."""
    if law.sigma == 0:
        return min(law.median, most) ** order
    below = NormalDist().cdf(log(most / law.median) / law.sigma - order * law.sigma)
    moment = law.median**order * exp((order * law.sigma) ** 2 / 2)
    return moment * below + most**order * cut_share(law, most)


# -- two levels ------------------------------------------------------------------------------------------------


def test_the_fit_to_areals_lengths_has_the_moments_that_it_was_chosen_for() -> None:
    """In closed form: mean 9.0k, 4.3 % cut at 27,648, E[s²]/E[s] = 14.2k; 95th percentile 26k."""
    assert cut_moment(AREAL, 1, MOST) == pytest.approx(9008, abs=1)
    assert cut_share(AREAL, MOST) == pytest.approx(0.0426, abs=5e-5)
    assert cut_moment(AREAL, 2, MOST) / cut_moment(AREAL, 1, MOST) == pytest.approx(14_152, abs=1)
    assert AREAL.quantile(0.95) == pytest.approx(26_000, rel=0.002)
    assert AREAL.mean == pytest.approx(6900 * np.exp(0.325))


def test_drawn_lengths_have_them_within_sampling_error() -> None:
    """20,000 prompts × 16: the mean of 9,008 has a standard error of about 40 tokens, for a prompt's answers go
    together; E[max of 16] = 15.4k as found before by another program."""
    drawn = lengths(Prompts(16, AREAL, most_tokens=MOST), 20_000)
    assert drawn.mean() == pytest.approx(cut_moment(AREAL, 1, MOST), rel=0.015)
    assert np.median(drawn) == pytest.approx(6900, rel=0.02)
    assert np.quantile(drawn, 0.95) == pytest.approx(26_000, rel=0.02)
    assert (drawn == MOST).mean() == pytest.approx(cut_share(AREAL, MOST), abs=0.003)
    squares = cut_moment(AREAL, 2, MOST) / cut_moment(AREAL, 1, MOST)
    assert (drawn**2).mean() / drawn.mean() == pytest.approx(squares, rel=0.015)
    assert drawn.max(axis=1).mean() == pytest.approx(15_400, rel=0.015)


def test_the_spread_splits_into_that_of_prompts_and_that_of_answers() -> None:
    logs = np.log(lengths(Prompts(16, AREAL), 5_000))
    within = logs.var(axis=1, ddof=1).mean()
    assert within == pytest.approx(0.16, rel=0.03)
    assert logs.mean(axis=1).var(ddof=1) - within / 16 == pytest.approx(0.49, rel=0.08)


@given(
    median=st.floats(1, 1e4),
    prompt_sigma=st.floats(0, 1.5),
    answer_sigma=st.floats(0, 1.5),
    most=st.floats(1, 1e5),
    order=st.sampled_from([1, 2]),
)
def test_moments_of_cut_lengths_equal_their_integral(
    median: float, prompt_sigma: float, answer_sigma: float, most: float, order: int
) -> None:
    law = TwoLevel(median, prompt_sigma, answer_sigma)
    z, step = np.linspace(-14, 14, 20_001, retstep=True)
    density = np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
    cut = np.minimum(median * np.exp(law.sigma * z), most)
    assert cut_moment(law, order, most) == pytest.approx((cut**order * density).sum() * step, rel=1e-4)


# -- one level, lists, traces ----------------------------------------------------------------------------------


def test_one_law_for_all_makes_answers_that_know_nothing_of_their_prompt() -> None:
    logs = np.log(lengths(Prompts(8, Lognormal(5000.0, 1.0)), 5_000))
    assert logs.mean(axis=1).var(ddof=1) == pytest.approx(logs.var(axis=1, ddof=1).mean() / 8, rel=0.08)


def test_a_trace_brings_its_own_distribution() -> None:
    drawn = lengths(Prompts(16, Trace("servegen_r1_output")), 4_000)
    source = np.array(series("servegen_r1_output"))
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(drawn, q) == pytest.approx(np.quantile(source, q), rel=0.06)


def test_lists_are_read_in_order() -> None:
    prompts = Prompts(2, Values((10, 20, 30, 40, 50)), prompt_tokens=Values((1, 2, 3)))
    stream = PromptStream(prompts, 0)
    assert [stream.group(prompt, 0).tokens for prompt in range(3)] == [[10, 20], [30, 40], [50, 10]]
    assert [stream.group(prompt, 5, 2).prompt_tokens for prompt in range(4)] == [1, 2, 3, 1]


# -- draws by name ---------------------------------------------------------------------------------------------

LAWS: list[TwoLevel | Law] = [AREAL, Lognormal(100.0, 1.0), Trace("servegen_r1_output")]


@settings(max_examples=30, deadline=None)
@given(
    law=st.sampled_from(LAWS),
    seed=st.integers(0, 2**32),
    asked=st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(0, 3), st.integers(0, 2)), max_size=12),
    count=st.sampled_from([None, 5_000]),
)
def test_a_group_is_the_same_whoever_asks_in_whatever_order(
    law: TwoLevel | Law, seed: int, asked: list[tuple[int, int, int]], count: int | None
) -> None:
    prompts = Prompts(4, law, prompt_tokens=Lognormal(200.0, 0.5), count=count)
    stream = PromptStream(prompts, seed)
    for prompt, epoch, attempt in asked:
        assert stream.group(prompt, epoch, attempt) == PromptStream(prompts, seed).group(prompt, epoch, attempt)


def test_what_is_forgotten_comes_back_the_same() -> None:
    stream = PromptStream(Prompts(4, AREAL), 3)
    first = stream.group(7, 0)
    for prompt in range(0, 40 * BLOCK, BLOCK):
        stream.group(prompt, 0)
    assert stream.group(7, 0) == first
    assert len(stream._ready) <= 9 * BLOCK


def test_more_answers_begin_with_the_same_ones() -> None:
    few, many = (PromptStream(Prompts(n, AREAL), 0).group(11, 2, 1) for n in (4, 16))
    assert many.tokens[:4] == few.tokens


def test_another_epoch_or_attempt_is_other_luck_with_the_same_prompt() -> None:
    stream = PromptStream(Prompts(2000, AREAL), 0)
    found = [np.log(stream.group(5, *again).tokens) for again in ((0, 0), (1, 0), (0, 1))]
    assert not np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    middles = [logs.mean() for logs in found]
    assert max(middles) - min(middles) < 5 * 0.4 / np.sqrt(1000)


# -- the order of a data set -----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 2_000), seed=st.integers(0, 2**32), shuffle=st.booleans())
def test_each_epoch_holds_every_prompt_once_and_the_last_is_followed_by_none(
    count: int, seed: int, shuffle: bool
) -> None:
    stream = PromptStream(Prompts(1, Constant(5.0), count=count, epochs=3, shuffle=shuffle), seed)
    found = [stream.order.prompt_at(position) for position in range(3 * count)]
    for epoch in range(3):
        own = found[epoch * count : (epoch + 1) * count]
        assert {place[1] for place in own if place} == {epoch}
        order = [place[0] for place in own if place]
        assert sorted(order) == list(range(count))
        assert shuffle or order == list(range(count))
    assert stream.order.prompt_at(3 * count) is None


def test_epochs_are_shuffled_anew_and_every_place_is_as_likely() -> None:
    stream = PromptStream(Prompts(1, Constant(5.0), count=6), 0)
    orders = [tuple(stream.order.prompt_at(6 * epoch + place)[0] for place in range(6)) for epoch in range(3_000)]  # type: ignore[index]
    assert len(set(orders)) > 690  # of 720, 708.8 on average
    for place in range(6):
        counts = Counter(order[place] for order in orders)
        assert all(abs(counts[prompt] - 500) < 4.5 * np.sqrt(3000 * 5 / 36) for prompt in range(6))


def test_without_a_count_every_prompt_is_a_new_one() -> None:
    stream = PromptStream(Prompts(1, Constant(5.0)), 0)
    assert [stream.order.prompt_at(position) for position in (0, 1, 10**9)] == [(0, 0), (1, 0), (10**9, 0)]


# -- recorded --------------------------------------------------------------------------------------------------

RECORDED = {"prompt": [7, 7, 7, 2, 2, 2, 5], "generated_tokens": [100, 110, 120, 900, 950, 990, 4]}


def written(folder: Path, kind: str, **more: list[object]) -> str:
    table = pl.DataFrame({**RECORDED, **more})
    path = folder / f"rollouts.{kind}"
    if kind == "parquet":
        table.write_parquet(path)
    elif kind == "csv":
        table.write_csv(path)
    else:
        table.write_ndjson(path)
    return str(path)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_recorded_groups_stay_together(tmp_path: Path, kind: str) -> None:
    drawn = lengths(Prompts(3, Recorded(written(tmp_path, kind))), 3_000)
    found = Counter(tuple(sorted(group)) for group in drawn.tolist())
    assert set(found) == {(100.0, 110.0, 120.0), (900.0, 950.0, 990.0), (4.0, 4.0, 4.0)}
    assert all(abs(times - 1000) < 4.5 * np.sqrt(3000 * 2 / 9) for times in found.values())


def test_fewer_answers_are_a_part_of_a_recorded_group_each_of_its_answers_as_often(tmp_path: Path) -> None:
    drawn = lengths(Prompts(2, Recorded(written(tmp_path, "csv"), scale=10.0)), 6_000)
    pairs = drawn[drawn[:, 0] > 8_000]
    assert (pairs[:, 0] != pairs[:, 1]).all()
    counts = Counter(pairs.ravel().tolist())
    assert set(counts) == {9000.0, 9500.0, 9900.0}
    assert all(abs(times - len(pairs) * 2 / 3) < 4.5 * np.sqrt(len(pairs)) for times in counts.values())


def test_answers_that_were_not_finished_are_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, "parquet", end_s=[1.0, 2.0, 3.0, None, None, None, 4.0])
    assert Recorded(file).mean == pytest.approx((100 + 110 + 120 + 4) / 4)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is neither Parquet, CSV nor JSON lines"),
        ("prompt,tokens\n1,2\n", "has no column 'generated_tokens'; it has prompt, tokens"),
        ("prompt,generated_tokens\n", "has no finished answers"),
        ("prompt,generated_tokens\n1,0\n", "column 'generated_tokens' does not hold numbers ≥ 1 alone"),
        ("prompt,generated_tokens\n1,x\n", "column 'generated_tokens' does not hold numbers ≥ 1 alone"),
        ("prompt,generated_tokens\n,5\n1,5\n", "column 'prompt': a value is missing"),
        (json.dumps({"prompt": 1, "generated_tokens": None}) + "\n", "does not hold numbers ≥ 1 alone"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_at_once(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "file.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^recorded: .*{told}"):
        Recorded(str(path))
    with pytest.raises(ValueError, match=r"^recorded: .*nowhere.csv cannot be read: No such file"):
        Recorded(str(tmp_path / "nowhere.csv"))


# -- TOML ------------------------------------------------------------------------------------------------------

WHERE = "study.toml: prompts"


def test_prompts_are_read_from_toml(tmp_path: Path) -> None:
    table = {
        "answers": 8,
        "answer_tokens": {"kind": "two_level_lognormal", "median": 6900, "prompt_sigma": 0.7, "answer_sigma": 0.4},
        "prompt_tokens": {"kind": "constant", "value": 150},
        "most_tokens": MOST,
        "count": 40_000,
        "epochs": 2,
    }
    wanted = Prompts(8, AREAL, Constant(150.0), most_tokens=MOST, count=40_000, epochs=2)
    assert parse(Prompts, table, WHERE) == wanted
    assert wanted.total == 80_000
    trace = {"kind": "trace", "name": "servegen_r1_output"}
    assert parse(Prompts, {"answer_tokens": trace}, WHERE).answer_tokens == Trace("servegen_r1_output")
    file = {"kind": "recorded", "file": written(tmp_path, "csv")}
    assert parse(Prompts, {"answer_tokens": file}, WHERE).answer_tokens == Recorded(file["file"])


def test_the_prompts_of_the_page_can_be_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
    block = page.split("```toml\n[prompts]\n")[1].split("```")[0]
    found = parse(Prompts, tomllib.loads(block), WHERE)
    assert found == Prompts(16, AREAL, Constant(150.0), most_tokens=MOST, count=40_000, epochs=2)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"answer_tokens": {"kind": "constant", "value": 5}, "turns": "v1_end"}, "got both"),
        (
            {"answer_tokens": {"median": 5}},
            "answer_tokens.kind: this key is missing; 'two_level_lognormal', 'recorded'",
        ),
        ({"answer_tokens": {"kind": "constant", "value": 5}, "answers": 0}, "answers must be .*, got 0"),
        ({"answer_tokens": {"kind": "constant", "value": 5}, "epochs": 2}, "epochs = 2 of a data set without end"),
        ({"answer_tokens": {"kind": "constant", "value": 5}, "count": 0}, "count must be an integer ≥ 1"),
        ({"answer_tokens": {"kind": "constant", "value": 5}, "most_tokens": 0}, "most_tokens must be"),
        (
            {"answer_tokens": {"kind": "two_level_lognormal", "median": 0, "prompt_sigma": 1, "answer_sigma": 1}},
            "median",
        ),
        ({"turns": "v3"}, "turns: no preset 'v3'; one of v1_start, v1_end, v2_end, base_7b, or a table, would do"),
    ],
)
def test_prompts_that_cannot_be_are_refused(table: dict[str, object], told: str) -> None:
    with pytest.raises(StudyError, match=f"^study.toml: prompts.*{told}"):
        parse(Prompts, table, WHERE)
