"""Comparing runs on prompts: a run agrees with itself, and known changes are found with their sign."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedasync.report.rollout_numbers import RATE, SERVERS, STALENESS, STEP, TRAINER
from fedasync.runs.run import Run
from fedasync.studies.compare import compare
from fedasync.studies.errors import StudyError

from .deployed import recorded as deployed
from .rollout_runs import config, simulated

SMALL = config(("run", {"versions": 10, "warm_up_versions": 2}), ("strategy", {"name": "areal", "batch": 8, "eta": 1}))


def compared(room: Path, real: list[Run], sim: list[Run]) -> dict[str, Any]:
    folders: dict[str, list[Path]] = {"real": [], "sim": []}
    for side, runs in (("real", real), ("sim", sim)):
        for place, run in enumerate(runs):
            run.save(room / f"{side}{place}")
            folders[side].append(room / f"{side}{place}")
    assert compare(folders["real"], folders["sim"], room / "out") == 0
    told: dict[str, Any] = json.loads((room / "out" / "compare.json").read_text())
    return told


def test_a_run_agrees_with_itself(tmp_path: Path) -> None:
    told = compared(tmp_path, [simulated(SMALL)], [simulated(SMALL)])
    assert [row["name"] for row in told["numbers"]] == [STEP, RATE, TRAINER, SERVERS, STALENESS]
    assert {row["error"] for row in told["numbers"]} <= {0, None}
    assert all(row["difference"] == 0 for row in told["numbers"])
    assert told["staleness"] == {"total_variation": 0, "wasserstein": 0}
    assert told["notes"] == []


def test_a_slower_trainer_is_told_with_its_sign(tmp_path: Path) -> None:
    synchronous = {**SMALL, "strategy": {"name": "synchronous_rl", "batch": 8}}
    slow = {**synchronous, "cluster": {**SMALL["cluster"], "trainer": {"step_s": 2.0}}}
    fast = {**synchronous, "cluster": {**SMALL["cluster"], "trainer": {"step_s": 1.0}}}
    told = compared(tmp_path, [simulated(fast)], [simulated(slow)])
    (row,) = [row for row in told["numbers"] if row["name"] == STEP]
    assert row["difference"] == pytest.approx(1.0)
    assert row["error"] == pytest.approx(1.0 / row["real"]["mean"])
    (rate,) = [row for row in told["numbers"] if row["name"] == RATE]
    assert rate["error"] == pytest.approx(1 / (1 + row["error"]) - 1)


def test_means_and_spreads_are_over_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = compared(tmp_path, [simulated(SMALL, seed) for seed in (0, 1)], [simulated(SMALL, 0)])
    row = told["numbers"][0]
    assert row["real"]["spread"] > 0
    assert row["predicted"]["spread"] is None
    assert "staleness: total variation" in capsys.readouterr().out


def test_other_bounds_are_named_and_their_histograms_lie_apart(tmp_path: Path) -> None:
    other = {**SMALL, "strategy": {**SMALL["strategy"], "eta": 4}}
    told = compared(tmp_path, [simulated(SMALL)], [simulated(other)])
    assert told["notes"] == ["strategy.eta differs: 1 in the run, 4 in the prediction"]
    assert told["staleness"]["wasserstein"] > 1


def test_runs_of_two_kinds_and_of_two_strategies_are_refused(tmp_path: Path) -> None:
    simulated(SMALL).save(tmp_path / "prompts")
    simulated({**SMALL, "strategy": {"name": "synchronous_rl", "batch": 8}}).save(tmp_path / "synchronous")
    deployed(tmp_path / "clients")
    for other, says in (("clients", "runs of one kind would do"), ("synchronous", "runs of one strategy would do")):
        with pytest.raises(StudyError, match=says) as error:
            compare([tmp_path / "prompts"], [tmp_path / other], tmp_path / "out")
        assert "\n" not in str(error.value)


def test_a_simulation_named_first_changes_places_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = simulated(SMALL), simulated(SMALL, seed=1)
    fast.summary["runtime"] = "processes"
    fast.save(tmp_path / "real")
    slow.save(tmp_path / "sim")
    said = []
    for place, (one, other) in enumerate((("real", "sim"), ("sim", "real"))):
        compare([tmp_path / one], [tmp_path / other], tmp_path / f"out{place}")
        said.append(capsys.readouterr().out)
    swapped = f"{tmp_path / 'real'} was measured and {tmp_path / 'sim'} simulated: they change places"
    assert [swapped in each for each in said] == [False, True]
    assert f"`fedasync compare {tmp_path / 'real'} {tmp_path / 'sim'}`" in said[1]
    files = [(tmp_path / f"out{place}" / "compare.json").read_bytes() for place in (0, 1)]
    assert files[0] == files[1]


def test_two_simulations_and_two_real_runs_keep_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for runtime in (None, "processes"):
        for place in ("a", "b"):
            run = simulated(SMALL)
            run.summary["runtime"] = runtime
            run.save(tmp_path / f"{place}{runtime}")
        compare([tmp_path / f"a{runtime}"], [tmp_path / f"b{runtime}"], tmp_path / "out")
        assert "change places" not in capsys.readouterr().out
        told = json.loads((tmp_path / "out" / "compare.json").read_text())
        assert told["real"] == [str(tmp_path / f"a{runtime}")]
