"""Calibration of runs on prompts is a round trip: from known costs to a run, and from the run back to the costs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.runs.run import Run
from fedasync.studies.calibrate_command import calibrate
from fedasync.studies.contention_probe import Probed, timed
from fedasync.studies.errors import StudyError
from fedasync.studies.rollout_calibration import fitted
from fedasync.studies.rollout_fits import Mean, decode, line, prefill

from .rollout_runs import CONFIG, SPEED, config, recorded, simulated

SHORT = config(("cluster.decoding.max_running", 48), ("run", {"versions": 24, "warm_up_versions": 2}))
"""More answers than run at a time, so that calls of prefill differ in size."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and what was fitted to it, in ``fitted``."""
    room = tmp_path_factory.mktemp("room")
    recorded(room / "run", SHORT)
    assert calibrate([room / "run"], room / "fitted") == 0
    return room


def test_every_cost_comes_back(room: Path) -> None:
    study = tomllib.loads((room / "fitted" / "predicted.toml").read_text())
    cluster = study["cluster"]
    known: dict[str, dict[str, Any]] = {
        "decoding": {**SPEED, "max_running": 48},
        "trainer": SHORT["cluster"]["trainer"],
        "weights": SHORT["cluster"]["weights"],
        "reward": SHORT["cluster"]["reward"]["latency_s"],
    }
    found = {**cluster, "reward": cluster["reward"]["latency_s"]}
    for table, keys in known.items():
        for key, value in keys.items():
            wanted = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert found[table][key] == wanted, f"{table}.{key}"
    assert study["strategy"] == SHORT["strategy"]
    assert study["run"] == SHORT["run"]
    assert study["study"]["seeds"] == [0]


def test_lengths_are_the_recorded_ones_in_their_order(room: Path) -> None:
    run = Run.load(room / "run")
    assert run.rollouts is not None
    kept = pl.read_parquet(room / "fitted" / "answers.parquet")
    assert kept.height == 24 * 8 * 8
    assert kept["generated_tokens"].to_list() == run.rollouts.sort("lease", "answer")["generated_tokens"].to_list()


def test_the_account_tells_values_errors_and_what_is_not_modelled(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((room / "fitted" / "calibration.json").read_text())
    by_name = {row["name"]: row for row in told["parameters"]}
    assert by_name["iteration: overhead"]["value"] == pytest.approx(SPEED["overhead_s"])
    assert by_name["step: fixed"]["measurements"] == 22  # two are warm-up
    assert told["contention"] is None
    assert any("contention is not modelled" in note for note in told["notes"])
    assert {p.suffix for p in (room / "fitted" / "figures").iterdir()} == {".png", ".svg"}


def test_runs_are_pooled_and_may_differ_in_their_seeds_alone(tmp_path: Path) -> None:
    small = config(("run", {"versions": 6, "warm_up_versions": 1}))
    for seed in (0, 1):
        recorded(tmp_path / str(seed), small, seed)
    recorded(tmp_path / "other", config(("run", {"versions": 7})), 0)
    assert calibrate([tmp_path / "0", tmp_path / "1"], tmp_path / "out") == 0
    study = tomllib.loads((tmp_path / "out" / "predicted.toml").read_text())
    assert study["study"]["seeds"] == [0, 1]
    kept = pl.read_parquet(tmp_path / "out" / "answers.parquet")
    assert kept.group_by("run").len().sort("run")["len"].to_list() == [6 * 64, 6 * 64]
    with pytest.raises(StudyError, match=r"its \[run\] is not that of .*; runs that differ in nothing but their seed"):
        calibrate([tmp_path / "0", tmp_path / "other"], tmp_path / "out")


def test_a_measured_contention_is_taken_out_and_put_into_the_study(tmp_path: Path) -> None:
    """Of a run in which generating and training overlap, with the contention that a probe would have found."""
    overlapping = config(
        ("strategy", {"name": "areal", "batch": 8, "eta": 2}),
        ("cluster.contention", {"servers": 1.5, "trainer": 1.25}),
        ("run", {"versions": 20, "warm_up_versions": 2}),
    )
    run = recorded(tmp_path / "run", overlapping)
    probed = Probed(*(Mean(value, 0.01, 4) for value in (1.5, 1.25, 0.01, 0.3)))
    probed.write(tmp_path / "out" / "contention.json")
    assert calibrate([tmp_path / "run"], tmp_path / "out") == 0
    study = tomllib.loads((tmp_path / "out" / "predicted.toml").read_text())
    assert study["cluster"]["contention"] == {"servers": 1.5, "trainer": 1.25}
    found = fitted([run], probed)
    # A span that is half inside counts as inside or outside, so some noise is left.
    assert found.train.at(tokens=3000.0) == pytest.approx(0.12 + 3000 * 5e-5, rel=0.02)
    iteration_s = 4e-3 + 64 * 1e-4 + 3000 * 2e-6
    assert found.decode.line.at(running=64.0, context=3000.0) == pytest.approx(iteration_s, rel=0.02)
    assert fitted([run], None).decode.line.at(running=64.0, context=3000.0) > 1.05 * iteration_s


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: run.tables.pop("iterations"), "no iterations here"),
        (lambda run: run.config.update(strategy="areal"), r"has no \[strategy\] with a name"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_line(tmp_path: Path, change: Any, says: str) -> None:
    run = recorded(tmp_path / "run", config(("run", {"versions": 3})))
    names = ("events", "metrics", "rollouts", "iterations")
    changed = Run(dict(run.config), run.summary, {name: getattr(run, name) for name in names})
    change(changed)
    changed.save(tmp_path / "changed")
    with pytest.raises(StudyError, match=says) as error:
        calibrate([tmp_path / "changed"], tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_probe_of_a_simulated_run_and_of_clients_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "run", config(("run", {"versions": 3})))
    with pytest.raises(StudyError, match=r"a probe needs the \[task\] and the \[processes\] of a real run"):
        calibrate([tmp_path / "run"], tmp_path / "out", probe=True)


# -- fits ----------------------------------------------------------------------------------------------------------


@given(st.floats(1e-4, 1e-1), st.floats(0, 1e-3), st.floats(0, 1e-5), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_a_line_without_noise_is_found(one: float, running: float, context: float, seed: int) -> None:
    draws = np.random.default_rng(seed)
    b, tokens = draws.integers(1, 65, 200).astype(float), draws.integers(1, 9000, 200).astype(float)
    found = line(one + running * b + context * tokens, running=b, context=tokens)
    assert found.at(running=32.0, context=4000.0) == pytest.approx(one + running * 32 + context * 4000, rel=1e-6)
    assert found.mean == pytest.approx(float((one + running * b + context * tokens).mean()))


def test_no_cost_is_negative_and_the_mean_is_kept() -> None:
    b = np.arange(1.0, 50.0)
    found = line(1.0 - 0.01 * b, running=b)
    assert found["running"] == 0
    assert found["one"] == pytest.approx(float((1.0 - 0.01 * b).mean()))


def test_a_standard_error_shrinks_with_the_root_of_the_number() -> None:
    draws = np.random.default_rng(0)

    def error(n: int) -> float:
        x = draws.uniform(0, 1, n)
        return line(1 + 2 * x + draws.normal(0, 0.1, n), x=x).standard_errors["x"]

    assert error(400) / error(40_000) == pytest.approx(10, rel=0.2)


def test_knots_stand_where_a_line_is_bad_and_only_there() -> None:
    b = np.repeat(np.arange(1.0, 9.0), 30)
    none = np.zeros(0)
    stairs = np.where(b <= 4, 0.01, 0.03)
    found = decode(stairs, b, b * 0, none, none)
    assert found.off > 0.05
    assert dict(found.knots) == pytest.approx({k: 0.01 if k <= 4 else 0.03 for k in range(1, 9)})
    assert decode(0.01 + 0.001 * b, b, b * 0, none, none).knots == ()


def test_calls_of_one_size_are_told_apart_by_what_an_iteration_has_of_its_own() -> None:
    iteration = line(np.linspace(0.012, 0.02, 9), running=np.arange(1.0, 10.0))
    found = prefill(np.full(20, 0.1), np.full(20, 500.0), iteration)
    assert found.at(tokens=500.0) == pytest.approx(0.1)
    assert found["one"] == pytest.approx(iteration["one"])
    told = prefill(0.02 + 1e-4 * np.arange(100.0, 120.0), np.arange(100.0, 120.0), iteration)
    assert (told["one"], told["tokens"]) == pytest.approx((0.02, 1e-4))


def test_a_call_is_no_quicker_than_an_iteration_of_nothing() -> None:
    """Calls of nearly one size, a few smaller by chance quick: least squares would have all of it by the token."""
    iteration = line(np.linspace(0.003, 0.007, 9), running=np.arange(1.0, 10.0))
    tokens = np.array([64.0] * 14 + [60.0] * 2 + [56.0])
    assert line(1e-4 * tokens, tokens=tokens)["one"] == pytest.approx(0, abs=1e-12)
    noisy = 1e-4 * tokens * np.linspace(0.95, 1.05, 17)
    found = prefill(noisy, tokens, iteration)
    assert found["one"] >= iteration["one"]
    assert found.at(tokens=64.0) == pytest.approx(0.0064, rel=0.02)
    assert found.at(tokens=900.0) < 0.06


def test_steps_in_a_window_are_timed_whole() -> None:
    """Steps of 2 s in a window of 7 s: three of them end in time."""
    now = [0.0]

    def step() -> None:
        now[0] += 2.0

    assert timed(step, 0.0, 7.0, lambda: now[0]) == 2.0
    now[0] = 0.0
    assert timed(step, 0.0, 1.0, lambda: now[0]) == 2.0  # of one that is longer than the window, that one


def test_what_a_probe_found_is_read_again(tmp_path: Path) -> None:
    probed = Probed(*(Mean(value, None, 1) for value in (1.5, 1.25, 0.01, 0.3)))
    probed.write(tmp_path / "c.json")
    assert Probed.read(tmp_path / "c.json") == probed
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(StudyError, match="no result of a probe"):
        Probed.read(tmp_path / "c.json")


def test_config_is_left_as_it_was() -> None:
    assert config(("run.versions", 3))["run"]["versions"] == 3
    assert CONFIG["run"]["versions"] != 3
    assert simulated(config(("run", {"versions": 2}))).summary["versions"] == 2
