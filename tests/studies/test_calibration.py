"""Calibration: known parameters are found again, once and in the same bytes, and bad requests are told in a line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from fedasync.studies.study import load

from .running import Command, changed, moments, runs, summary

IDEAL = """
[study]
title = "small"
seeds = 2

[run]
versions = 6

[cluster]
generation_gpus = 2
training_gpus = 1
decoding = { kind = "fixed_speed", tokens_per_second = 100.0, max_running = 64 }
trainer = { step_s = 4.0 }
weights = { transfer = false }

[prompts]
answers = 2
prompt_tokens = { kind = "constant", value = 0.0 }
answer_tokens = { kind = "constant", value = 1_000.0 }

[strategy]
name = "synchronous_rl"
batch = 8

[[axis]]
name = "system"
points = [
  { label = "in turns" },
  { label = "overlap", strategy = { name = "one_step_overlap", batch = 8 } },
]

[[calibrate]]
run = { versions = 3 }
free = [{ key = "cluster.decoding.tokens_per_second", low = 10.0, high = 1_000.0 }]

[[published]]
labels = { system = "in turns" }
metric = "step_s"
value = 24.0
source = "a paper"
fitted = true

[[published]]
labels = { system = "overlap" }
metric = "step_s"
value = 20.0
source = "a paper"
tolerance = 0.2

[report]
figures = []
"""
"""An answer takes 1,000 tokens / speed, training 4 s: 24 s a step are 50 tokens a second, and with overlap 20 s."""
TWO = changed(
    IDEAL,
    (
        'free = [{ key = "cluster.decoding.tokens_per_second", low = 10.0, high = 1_000.0 }]',
        """free = [
  { key = "cluster.decoding.tokens_per_second", low = 10.0, high = 1_000.0 },
  { key = "cluster.trainer.step_s", low = 1.0, high = 30.0 },
]

[[published]]
labels = { system = "in turns" }
metric = "wait_s"
value = 20.0
source = "a paper"
fitted = true""",
    ),
)


def fitted(folder: Path) -> dict[str, float]:
    """The values of the first calibration."""
    found: dict[str, float] = json.loads((folder / "calibration.json").read_text())["calibrations"][0]["values"]
    return found


def test_a_parameter_that_is_known_is_found_and_stands_in_every_run(fedasync: Command, study: Path) -> None:
    study.write_text(IDEAL)
    ended = fedasync("sim", "s.toml")
    assert ended.status == 0
    speed = fitted(Path("results/s"))["cluster.decoding.tokens_per_second"]
    assert speed == pytest.approx(50.0, rel=2e-3)
    assert "Fitted: cluster.decoding.tokens_per_second = " in ended.out
    assert "in turns: step_s = 24" in ended.out
    made = runs(Path("results/s"))
    assert len(made) == 4
    for run in made.values():
        config = json.loads((run / "config.json").read_text())
        assert config["cluster"]["decoding"]["tokens_per_second"] == speed
        assert config["run"] == {"versions": 6}  # the short runs are the fit's alone


def test_two_parameters_are_found_from_two_numbers(fedasync: Command, study: Path) -> None:
    study.write_text(TWO)
    assert fedasync("sim", "s.toml").status == 0
    found = fitted(Path("results/s"))
    assert found["cluster.decoding.tokens_per_second"] == pytest.approx(50.0, rel=5e-3)
    assert found["cluster.trainer.step_s"] == pytest.approx(4.0, rel=2e-2)


def test_predicted_stands_beside_published(fedasync: Command, study: Path) -> None:
    study.write_text(changed(IDEAL, ("tolerance = 0.2", "tolerance = 0.01")))
    fedasync("sim", "s.toml")
    folder = Path("results/s")
    table = pl.read_csv(folder / "published.csv")
    assert table["published"].to_list() == [24.0, 20.0]
    steps = [
        [
            summary(r)["rollouts"]["throughput"]["step_s"]["mean"]
            for r in runs(folder).values()
            if summary(r)["labels"]["system"] == label
        ]
        for label in ("in turns", "overlap")
    ]
    for predicted, error, values, published in zip(
        table["predicted"], table["error"], steps, table["published"], strict=True
    ):
        assert predicted == pytest.approx(sum(values) / len(values))
        assert error == pytest.approx(predicted / published - 1)
    assert table["verdict"].to_list() == ["fitted", "predicted, MISSED: 1 %"]  # the first batch overlaps nothing
    page = (folder / "published.md").read_text()
    assert "Fitted: cluster.decoding.tokens_per_second" in page
    assert "`fedasync sim s.toml`" in page


def test_a_fit_is_made_once_and_gives_the_same_bytes(fedasync: Command, study: Path) -> None:
    study.write_text(IDEAL)
    fedasync("sim", "s.toml", "--out", "a")
    kept = (Path("a/calibration.json").read_bytes(), moments(Path("a")))
    tried = {path: path.stat().st_mtime_ns for path in Path("a/calibration").rglob("*.json")}
    assert tried
    fedasync("sim", "s.toml", "--out", "a")
    assert (Path("a/calibration.json").read_bytes(), moments(Path("a"))) == kept
    assert {path: path.stat().st_mtime_ns for path in Path("a/calibration").rglob("*.json")} == tried
    fedasync("sim", "s.toml", "--out", "b", "--jobs", "2")
    assert Path("b/calibration.json").read_bytes() == kept[0]


def test_another_question_is_fitted_anew(fedasync: Command, study: Path) -> None:
    study.write_text(IDEAL)
    fedasync("sim", "s.toml")
    study.write_text(changed(IDEAL, ("value = 24.0", "value = 14.0")))
    fedasync("sim", "s.toml")
    assert fitted(Path("results/s"))["cluster.decoding.tokens_per_second"] == pytest.approx(100.0, rel=2e-3)


def test_fitted_values_are_those_of_the_runs_with_the_labels(fedasync: Command, study: Path) -> None:
    study.write_text(changed(IDEAL, ("[[calibrate]]\n", '[[calibrate]]\nlabels = { system = "in turns" }\n')))
    fedasync("sim", "s.toml")
    speeds = {
        summary(run)["labels"]["system"]: json.loads((run / "config.json").read_text())["cluster"]["decoding"][
            "tokens_per_second"
        ]
        for run in runs(Path("results/s")).values()
    }
    assert speeds["overlap"] == 100.0
    assert speeds["in turns"] == pytest.approx(50.0, rel=2e-3)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("high = 1_000.0", "high = 5.0", "0 < low < high would do"),
        ("high = 1_000.0", "high = 20.0", "so no value between gives 24"),
        ("fitted = true", "", "1 free parameters and 0 numbers to fit them to"),
        ("cluster.decoding.tokens_per_second", "clutser.speed", "unknown key; did you mean 'cluster'"),
        (
            '{ label = "in turns" }',
            '{ label = "in turns", cluster.decoding.tokens_per_second = 90.0 }',
            "is set by an axis",
        ),
        ("[[calibrate]]\n", '[[calibrate]]\nlabels = { system = "turns" }\n', "no label 'turns'"),
        ("value = 24.0", "value = 0.0", "a value other than 0 would do"),
        ('labels = { system = "overlap" }', 'labels = { system = "over" }', "published: no label 'over'"),
        ("[report]\n", "[report]\npublished = []\n", "written as [[published]] would do"),
        (
            'labels = { system = "in turns" }\nmetric = "step_s"',
            'labels = { system = "in turns" }\nmetric = "stop_s"',
            "has no number 'stop_s'",
        ),
    ],
)
def test_a_calibration_that_cannot_be_is_told_in_a_line(
    fedasync: Command, study: Path, old: str, new: str, complaint: str
) -> None:
    study.write_text(changed(IDEAL, (old, new)))
    ended = fedasync("sim", "s.toml")
    assert ended.status == 2
    assert complaint in ended.complaint


STEPS_APART = changed(
    TWO,
    ('metric = "wait_s"\nvalue = 20.0', 'metric = "train_s"\nvalue = 40.0'),
    ("value = 24.0", "value = 60.0"),
)
"""A step of 60 s of which 40 are training: beyond the 30 s that the bounds allow."""


def test_a_fit_that_comes_nowhere_near_is_refused_and_not_kept(fedasync: Command, study: Path) -> None:
    study.write_text(STEPS_APART)
    for _ in range(2):
        ended = fedasync("sim", "s.toml")
        assert ended.status == 2
        assert "misses train_s = 40 of in turns by -2" in ended.complaint
        assert "come within 2%, would do" in ended.complaint
        assert not Path("results/s/calibration.json").exists()
    study.write_text(changed(STEPS_APART, ("high = 30.0", "high = 50.0")))
    assert fedasync("sim", "s.toml").status == 0
    assert fitted(Path("results/s"))["cluster.trainer.step_s"] == pytest.approx(40.0, rel=2e-2)


def test_more_numbers_than_parameters_are_a_compromise_which_the_page_says(fedasync: Command, study: Path) -> None:
    second = 'metric = "wait_s"\nvalue = 15.0\nsource = "a paper"\nfitted = true\n'
    extra = f'[[published]]\nlabels = {{ system = "in turns" }}\n{second}\n[report]\n'
    study.write_text(changed(IDEAL, ("[report]\n", extra)))
    assert fedasync("sim", "s.toml").status == 0
    page = (Path("results/s") / "published.md").read_text()
    assert "2 numbers for 1 parameters: least squares, none is met exactly." in page
    table = pl.read_csv("results/s/published.csv").filter(pl.col("verdict") == "fitted")
    assert sorted(error < 0 for error in table["error"]) == [False, True]


def test_a_fitted_key_cannot_be_set_by_hand(fedasync: Command, study: Path) -> None:
    study.write_text(IDEAL)
    ended = fedasync("sim", "s.toml", "--set", "cluster.decoding.tokens_per_second=70.0")
    assert ended.status == 2
    assert "the study fits it" in ended.complaint


def test_the_shipped_studies_of_published_numbers_can_be_read() -> None:
    sims = Path(__file__).parents[2] / "sims"
    for name in ("areal_paper", "areal_7b", "rl_published", "rl_no_gain", "rl_ideal"):
        study = load(sims / f"{name}.toml")
        assert study.report.published
        labels = [plan.labels for plan in study.plans([0])]
        for point in study.report.published:
            assert sum(point.matches(own) for own in labels) == 1, point
