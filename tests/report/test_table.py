"""The table's values against the runs they come from."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from fedasync.report import Report, markdown, mean_interval, readable_table, rich_table, summary_table
from fedasync.report.statistics import Interval
from fedasync.report.table import alike, number, plus_minus
from fedasync.runs.run import Run

from .test_ranking import diverging

REPORT = Report(baseline="FedAvg")


def of(study: list[Run], strategy: str, tail: str) -> list[Run]:
    return [run for run in study if run.labels == {"strategy": strategy, "tail": tail}]


def row(table: pl.DataFrame, strategy: str, tail: str) -> dict[str, object]:
    return table.filter((pl.col("strategy") == strategy) & (pl.col("tail") == tail)).row(0, named=True)


def test_numbers_are_those_of_the_runs(study: list[Run]) -> None:
    table = summary_table(study, REPORT)
    assert table.height == 6
    runs, found = of(study, "FedBuff", "0.3"), row(table, "FedBuff", "0.3")
    final = mean_interval(run.summary["final"]["accuracy"] for run in runs)
    assert found["final"] == pytest.approx(final.mean)
    assert found["final_half_width"] == pytest.approx(final.half_width)
    assert found["best"] == pytest.approx(np.mean([run.summary["best"]["accuracy"] for run in runs]))
    times = [run.summary["targets"][0]["reached_s"] for run in runs]
    base = [run.summary["targets"][0]["reached_s"] for run in of(study, "FedAvg", "0.3")]
    assert found["reached"] == 3
    assert found["time_to_target_s"] == pytest.approx(np.mean(times))
    assert found["speedup"] == pytest.approx(np.exp(np.mean(np.log(np.array(base) / times))))
    assert found["speedup_pairs"] == 3
    assert found["updates"] == pytest.approx(np.mean([run.summary["consumed"] for run in runs]))
    assert found["versions"] == pytest.approx(np.mean([run.summary["versions"] for run in runs]))
    stale = pl.concat([run.events.filter(pl.col("kind") == "consumed")["staleness"] for run in runs]).to_numpy()
    assert found["staleness_mean"] == pytest.approx(stale.mean())
    assert found["staleness_p90"] == np.quantile(stale, 0.9, method="inverted_cdf")
    assert found["staleness_max"] == stale.max()
    assert found["wasted_share"] == pytest.approx(np.mean([run.summary["utilisation"]["wasted"] for run in runs]))


def test_a_missed_target_says_by_how_much(study: list[Run]) -> None:
    found = row(summary_table(study, REPORT), "FedAsync", "0.3")
    best = np.mean([run.summary["best"]["accuracy"] for run in of(study, "FedAsync", "0.3")])
    assert found["reached"] == 0
    assert found["time_to_target_s"] is None
    base = [run.summary["targets"][0]["reached_s"] for run in of(study, "FedAvg", "0.3")]
    assert found["speedup"] == pytest.approx(np.exp(np.mean(np.log(np.array(base) / 60.0))))
    assert (found["speedup_bound"], found["speedup_low"]) == ("≤", 0.0)
    assert found["missed_by"] == pytest.approx(0.8 - best)
    text = row(readable_table(study, REPORT), "FedAsync", "0.3")
    assert text["reached"] == f"0/3, missed by {0.8 - best:.4g}"
    assert str(text["speed-up over FedAvg"]).startswith("≤ 0.4")
    assert str(text["speed-up over FedAvg"]).endswith("(3 of 3 seeds did not reach)")


def test_differences_are_paired_and_missing_partners_are_named(study: list[Run]) -> None:
    some = [run for run in study if not (run.labels["strategy"] == "FedAvg" and run.seed == 1)]
    found, text = (row(table(some, REPORT), "FedBuff", "0.3") for table in (summary_table, readable_table))
    own, base = (of(some, name, "0.3") for name in ("FedBuff", "FedAvg"))
    values, others = ({run.seed: run.summary["final"]["accuracy"] for run in runs} for runs in (own, base))
    assert found["gain"] == pytest.approx(np.mean([values[seed] - others[seed] for seed in (0, 2)]))
    assert (found["gain_pairs"], found["speedup_pairs"]) == (2, 2)
    assert "seed 1 without a partner" in str(text["accuracy over FedAvg"])
    assert "seed 1 without a partner" in str(text["speed-up over FedAvg"])


def test_runs_that_diverged_are_counted_beside_the_value_and_in_what_rests_on_them(study: list[Run]) -> None:
    bad = {"strategy": "FedAvg", "tail": "0.3"}
    some = [diverging(run, 4.0) if run.labels == bad and run.seed == 1 else run for run in study]
    found, text = (row(table(some, REPORT), "FedAvg", "0.3") for table in (summary_table, readable_table))
    assert (found["diverged"], found["reached"]) == (1, 2)
    assert str(text["accuracy"]).endswith(" (1 of 3 diverged)")
    other, told = (row(table(some, REPORT), "FedBuff", "0.3") for table in (summary_table, readable_table))
    assert other["diverged"] == 0
    assert other["speedup_bound"] == "≥"
    assert str(told["accuracy over FedAvg"]).endswith("(baseline: 1 of 3 diverged)")
    assert "baseline: 1 of 3 did not reach, 1 of these diverged" in str(told["speed-up over FedAvg"])
    # Who has nothing to do with it is compared where he was.
    final = {run.seed: run.summary["final"]["accuracy"] for run in of(some, "FedBuff", "0.3")}
    base = {run.seed: run.summary["final"]["accuracy"] for run in of(some, "FedAvg", "0.3")}
    assert other["gain"] == pytest.approx(np.mean([final[seed] - base[seed] for seed in range(3)]))


def test_a_metric_that_is_not_finite_at_the_end_counts_as_diverged(study: list[Run]) -> None:
    lost = Run({}, {**study[0].summary, "final": {"accuracy": None}}, study[0].tables)
    found = row(summary_table([lost, *study[1:]], REPORT), "FedAvg", "0.3")
    assert found["diverged"] == 1
    assert found["final"] == pytest.approx(
        np.mean([run.summary["final"]["accuracy"] for run in of(study, "FedAvg", "0.3")[1:]])
    )


def test_intervals_stay_whole_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=60)
    wide = {
        "a": ["words that can be broken anywhere"],
        "b": ["1.20× [0.997, 1.45], within noise (seed 3 without a partner)"],
    }
    console.print(rich_table(pl.DataFrame(wide)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")
    assert "1.20× [0.997, 1.45] " in shown
    assert "│ within noise" in shown


def test_readable_text(study: list[Run]) -> None:
    table = readable_table(study, REPORT)
    assert row(table, "FedAvg", "0.3")["speed-up over FedAvg"] == "1×"
    ratio = str(row(table, "FedBuff", "0.3")["speed-up over FedAvg"])
    assert "× [" in ratio
    assert str(row(table, "FedBuff", "0.3")["accuracy"]).count("±") == 1
    assert "speed-up over FedAvg" not in readable_table(study, replace(REPORT, baseline=None)).columns


def test_one_seed_and_timing_only(study: list[Run], timing_study: list[Run]) -> None:
    alone = summary_table([run for run in study if run.seed == 0], REPORT)
    assert alone["final_half_width"].null_count() == alone.height
    assert "±" not in markdown(readable_table([run for run in study if run.seed == 0], REPORT))
    timed = summary_table(timing_study, REPORT)
    assert timed["target"].null_count() == timed.height
    faster = timed.filter(pl.col("strategy") == "FedBuff").row(0, named=True)
    consumed = {
        name: np.array([run.summary["consumed"] for run in timing_study if run.labels["strategy"] == name])
        for name in ("FedAvg", "FedBuff")
    }
    # Without a target, the speed-up is that of the time per applied update.
    assert faster["speedup"] == pytest.approx(np.exp(np.mean(np.log(consumed["FedBuff"] / consumed["FedAvg"]))))
    assert "reached" not in readable_table(timing_study, REPORT).columns


def test_markdown_is_github_s() -> None:
    frame = pl.DataFrame({"name": ["a|b", "c\nd"], "x": [1.23456, None], "ok": [True, False]})
    assert markdown(frame).splitlines() == [
        "| name | x | ok |",
        "| --- | ---: | --- |",
        "| a\\|b | 1.235 | True |",
        "| c d | – | False |",
    ]


def test_the_terminal_shows_labels_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(rich_table(pl.DataFrame({"strategy": ["FedBuff [K=10]"], "x": [2.0]}), "a study"))
    assert isinstance(console.file, io.StringIO)
    assert "FedBuff [K=10]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(0.93127, 0.00412, 5), "0.9313 ± 0.0041"),
        (Interval(812.3, 40.1, 5), "812 ± 40"),
        (Interval(1234567.0, 98765.0, 5), "1234567 ± 98765"),
        (Interval(0.5, None, 1), "0.5"),
        (Interval(0.0, 0.0, 3), "0"),
        (None, "–"),
    ],
)
def test_plus_minus(interval: Interval | None, text: str) -> None:
    assert plus_minus(interval) == text


def test_number() -> None:
    assert [number(x) for x in (None, float("nan"), 0.123456, 3, 123456.7)] == ["–", "–", "0.1235", "3", "123457"]


def test_numbers_of_a_column_have_decimals_alike() -> None:
    assert [alike(x, (0.96, 0.9438)) for x in (0.96, 0.9438)] == ["0.9600", "0.9438"]
    assert [alike(x, (12345.6, 1.0)) for x in (12345.6, 1.0)] == ["12346", "1"]
