"""Seeds added until the intervals are tight: whole seeds, the same stop for any jobs, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .running import LEARNING, STRATEGIES, TIMING, Command, changed, contents, runs

S = Path("results/s")
BASELINE = ("figures = []", 'figures = []\nbaseline = "FedAvg"')


def adaptive(width: float, *, text: str = TIMING, least: int = 3, most: int = 6, quantity: str = "speedup") -> str:
    until = f'until = {{ quantity = "{quantity}", relative_half_width = {width} }}'
    rule = f"seeds = {{ at_least = {least}, at_most = {most}, {until} }}"
    return changed(text, ("seeds = 1", rule), BASELINE) + STRATEGIES


def seeds(folder: Path = S) -> set[int]:
    named = json.loads((folder / "study.json").read_text())["runs"]
    found = [int(name.split("_seed")[1].split("_")[0]) for name in named]
    assert all(found.count(seed) == 5 for seed in found), "every configuration has the same seeds"
    return set(found)


def test_it_stops_when_tight_twice_in_a_row(fedasync: Command, study: Path) -> None:
    study.write_text(adaptive(100.0))
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, "")
    assert "small  (5 runs a seed, 3 to 6 seeds, none finished before)" in end.out
    assert "3 seeds: widest interval ± " in end.out
    assert "stopped at 4 seeds: every closed interval is within ± 10000.0%, for the second time in a row" in end.out
    assert seeds() == {0, 1, 2, 3}
    assert "Seeds: stopped at 4 seeds: every closed" in (S / "table.md").read_text()


def test_it_stops_at_at_most_and_says_so(fedasync: Command, study: Path) -> None:
    study.write_text(adaptive(1e-9, most=4))
    end = fedasync("sim", "s.toml")
    assert end.status == 0
    assert "stopped at at_most = 4 seeds: 4 of 4 intervals are wider than" in end.out
    assert seeds() == {0, 1, 2, 3}


def test_jobs_resuming_and_seeds_that_are_there_change_no_byte(fedasync: Command, study: Path, tmp_path: Path) -> None:
    study.write_text(adaptive(100.0))
    assert fedasync("sim", "s.toml").status == 0
    whole = contents(S)
    assert fedasync("sim", "s.toml", "--jobs", "2", "--out", str(tmp_path / "two")).status == 0
    assert contents(tmp_path / "two") == whole
    # All seeds are there already: it stops where it did, and shows the same.
    assert fedasync("sim", "s.toml", "--seeds", "6").status == 0
    assert seeds() == set(range(6))
    assert fedasync("sim", "s.toml").status == 0
    assert seeds() == {0, 1, 2, 3}
    after = contents(S)
    assert {name: after[name] for name in whole} == whole


def test_final_values_can_be_what_must_be_tight(fedasync: Command, study: Path) -> None:
    learning = changed(LEARNING, ("updates = 40", "time_s = 300"))
    study.write_text(adaptive(1e-9, text=learning, most=3, quantity="final"))
    end = fedasync("sim", "s.toml")
    assert end.status == 0
    assert "3 seeds: widest interval ± " in end.out
    assert " over FedAvg" in end.out


def test_a_failed_run_adds_no_seed(fedasync: Command, study: Path) -> None:
    text = changed(LEARNING, ('kind = "quadratic"', 'kind = "own_code.RaisesInTrain"'))
    study.write_text(adaptive(100.0, text=text))
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    assert "stopped at 3 seeds: a run failed, so others have no partner" in end.out
    assert not runs(S)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("at_least = 3", "at_least = 2", "s.toml: study.seeds: at_least must be an integer ≥ 3, got 2"),
        ("at_most = 6", "at_most = 2", "s.toml: study.seeds: at_most must be ≥ at_least = 3, got 2"),
        ("at_most = 6, ", "", "s.toml: study.seeds.at_most: this key is missing"),
        ("at_most", "at_mots", "s.toml: study.seeds.at_mots: unknown key; did you mean 'at_most'?"),
        ('"speedup"', '"speed"', "s.toml: study.seeds.until.quantity: got \"speed\"; 'speedup' or 'final' would do"),
        ("width = 0.5", "width = 0", "relative_half_width must be > 0, got 0"),
        ('baseline = "FedAvg"', "", "s.toml: study.seeds.until: report.baseline is missing"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(
    fedasync: Command, study: Path, old: str, new: str, said: str
) -> None:
    study.write_text(changed(adaptive(0.5), (old, new)))
    end = fedasync("sim", "s.toml")
    assert (end.status, end.out) == (2, "")
    assert said in end.complaint


def test_a_metric_that_no_run_has_is_one_line(fedasync: Command, study: Path) -> None:
    learning = changed(LEARNING, ("updates = 40", "time_s = 50"))
    text = adaptive(0.5, text=learning, quantity="final")
    study.write_text(changed(text, ("figures = []", 'figures = []\nmetric = "los"')))
    end = fedasync("sim", "s.toml")
    assert end.status == 2
    assert end.complaint.startswith("fedasync: results/s: report.metric: no metric 'los' in these runs; there are: ")


def test_a_baseline_that_is_no_series_is_refused_before_any_run(fedasync: Command, study: Path) -> None:
    study.write_text(changed(adaptive(0.5), ('name = "strategy"', 'name = "s"')))
    end = fedasync("sim", "s.toml")
    assert (end.status, end.out) == (2, "")
    assert "s.toml: report.baseline: no label 'FedAvg' on axis 'strategy'; there are: 'fedavg', " in end.complaint
    assert "report.series = 's', which has it, would do" in end.complaint
    assert not S.exists()


def test_a_number_on_the_command_line_is_a_fixed_number(fedasync: Command, study: Path) -> None:
    study.write_text(adaptive(100.0))
    end = fedasync("sim", "s.toml", "--seeds", "2")
    assert end.status == 0
    assert "10 runs, none finished before" in end.out
    assert "stopped" not in end.out
