"""When a study has seeds enough: the widest interval against the table's, what is left out, two rounds in a row."""

from __future__ import annotations

import math

import polars as pl
import pytest

from fedasync.report import Report, summary_table
from fedasync.report.tightness import Until, look, tightness
from fedasync.runs.run import Run

from .synthetic import asynchronous, cohort

REPORT = Report(baseline="FedAvg")


def test_the_widest_speed_up_is_the_table_s_and_misses_are_left_out(study: list[Run]) -> None:
    found = tightness(study, REPORT, "speedup")
    rows = [row for row in summary_table(study, REPORT).iter_rows(named=True) if row["strategy"] != "FedAvg"]
    closed = [row for row in rows if row["speedup_bound"] == "="]
    widths = [max(row["speedup_high"] / row["speedup"], row["speedup"] / row["speedup_low"]) - 1 for row in closed]
    assert len(widths) >= 1
    assert [one.relative_half_width for one in found.closed] == pytest.approx(sorted(widths, reverse=True))
    assert found.widest is not None
    assert found.widest.comparison == "speed-up of FedBuff over FedAvg (tail = 0.3)"
    # FedAsync missed the target everywhere, and FedAvg did under the heavy tail.
    assert [one.comparison for one in found.unclosed] == [
        "speed-up of FedAsync over FedAvg (tail = 0.3)",
        "speed-up of FedBuff over FedAvg (tail = 1.2)",
        "speed-up of FedAsync over FedAvg (tail = 1.2)",
    ]
    assert found.unclosed[0].open_because == "3 of 3 seeds did not reach"
    assert "baseline: " in found.unclosed[1].open_because
    assert found.within(max(widths) * 1.000001)
    assert not found.within(max(widths) * 0.999)


def test_the_width_of_a_final_value_is_relative_to_the_baseline(study: list[Run]) -> None:
    found = tightness(study, REPORT, "final")
    table = list(summary_table(study, REPORT).iter_rows(named=True))
    base = {row["tail"]: row["final"] for row in table if row["strategy"] == "FedAvg"}
    widths = [
        (row["gain_high"] - row["gain_low"]) / 2 / base[row["tail"]] for row in table if row["strategy"] != "FedAvg"
    ]
    assert [one.relative_half_width for one in found.closed] == pytest.approx(sorted(widths, reverse=True))
    assert not found.unclosed


def test_tight_twice_in_a_row_ends_it_and_wide_at_most_does(study: list[Run]) -> None:
    loose, tight = Until("speedup", 100.0), Until("speedup", 1e-9)
    first = look(study, REPORT, loose, 3, 9, 0)
    assert (first.tight_in_a_row, first.stop) == (1, None)
    assert first.said.startswith("3 seeds: widest interval ± ")
    assert "FedBuff over FedAvg (tail = " in first.said
    assert "3 left out: speed-up of FedAsync over FedAvg (tail = 0.3): 3 of 3 seeds did not reach" in first.said
    second = look(study, REPORT, loose, 4, 9, first.tight_in_a_row)
    assert str(second.stop).startswith("stopped at 4 seeds: every closed interval is within")
    wide = look(study, REPORT, tight, 3, 9, 1)
    assert (wide.tight_in_a_row, wide.stop) == (0, None)
    assert "stopped at at_most = 3 seeds: 1 of 1 intervals are wider than" in str(
        look(study, REPORT, tight, 3, 3, 0).stop
    )


def test_what_no_seed_can_close_ends_it_at_once() -> None:
    runs = {
        "FedAvg": [cohort(seed=seed, end_s=60.0) for seed in range(3)],
        "slow": [asynchronous(seed=seed, end_s=60.0, gain=0.1) for seed in range(3)],
    }
    found = look(runs, REPORT, Until("speedup", 0.1), 3, 9, 0)
    assert found.said.startswith("3 seeds: no closed interval; 1 left out: speed-up of slow over FedAvg: 3 of 3")
    assert str(found.stop).startswith("stopped at 3 seeds: no comparison has an interval that more seeds would close")


def reaching(time_s: float, gain: float, seeds: int) -> list[Run]:
    made = [cohort(seed=seed, end_s=30.0, gain=gain) for seed in range(seeds)]
    at = {"metric": "accuracy", "value": 0.8, "reached_s": time_s, "reached_updates": 1}
    return [Run({}, {**run.summary, "targets": [at]}, run.tables) for run in made]


@pytest.mark.parametrize("wanted", [0.1, math.inf])
def test_pairs_that_agree_are_not_tight_and_seeds_are_added(wanted: float) -> None:
    """Times lie on the grid of evaluations: three that agree say nothing of the fourth."""
    runs = {"FedAvg": reaching(20.0, 1.0, 3), "fast": reaching(10.0, 1.0, 3)}
    found = look(runs, REPORT, Until("speedup", wanted), 3, 9, 1)
    assert (found.tight_in_a_row, found.stop) == (0, None)
    assert "speed-up of fast over FedAvg: no interval: 3 pairs agree" in found.said
    last = look(runs, REPORT, Until("speedup", wanted), 3, 3, 1)
    assert "1 of 1 intervals are wider than" in str(last.stop)
    assert str(last.stop).endswith(", 1 of these without an interval, as their pairs agree")


def test_values_that_agree_on_a_difference_are_not_tight_but_equal_ones_are() -> None:
    base = [cohort(seed=seed, end_s=30.0) for seed in range(3)]
    higher = [
        Run({}, run.summary, {**run.tables, "metrics": run.metrics.with_columns(pl.col("value") + 0.25)})
        for run in base
    ]
    rule = Until("final", 0.1)
    assert look({"FedAvg": base, "other": higher}, REPORT, rule, 3, 9, 1).tight_in_a_row == 0
    assert look({"FedAvg": base, "other": base}, REPORT, rule, 3, 9, 1).tight_in_a_row == 2


@pytest.mark.parametrize("width", [0.0, -1.0, math.nan])
def test_a_width_that_is_none_is_refused(width: float) -> None:
    with pytest.raises(ValueError, match="relative_half_width must be > 0, got"):
        Until("final", width)
