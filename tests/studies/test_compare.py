"""Comparing a run with its prediction: nothing differs from itself, and two small logs are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.report.agreement import order_agreement, total_variation, wasserstein
from fedasync.runs.run import Run
from fedasync.studies.compare import compare
from fedasync.studies.errors import StudyError

from .deployed import CONFIG, simulated

COLUMNS = ("time_s", "kind", "lease", "worker", "base_version", "version", "staleness", "reason")
Lease = tuple[int, float, float]
"""Client, start and arrival (s)."""

REAL: list[Lease] = [(0, 0.0, 1.0), (1, 0.0, 2.0), (0, 1.0, 3.0), (2, 0.0, 4.0)]
SIM: list[Lease] = [(1, 0.0, 1.0), (0, 0.0, 2.0), (0, 2.0, 3.0), (2, 0.0, 5.0)]
"""Client 1 is first where it was second: of 6 pairs of deliveries one changes places."""

histograms = st.dictionaries(st.integers(0, 6), st.integers(1, 9), min_size=1)


def events(leases: list[Lease]) -> pl.DataFrame:
    rows: list[tuple[Any, ...]] = []
    for number, (client, start_s, end_s) in enumerate(leases):
        rows.append((start_s, "admitted", number, client, 0, 0, None, None))
        rows.append((end_s, "delivered", number, client, 0, 0, 0, None))
    kinds = ["admitted", "delivered"]
    rows.sort(key=lambda row: (row[0], -kinds.index(row[1])))
    return pl.DataFrame(rows, schema=list(COLUMNS), orient="row", infer_schema_length=None)


def run(leases: list[Lease], time_s: float, histogram: dict[str, int], reached_s: float | None, final: float) -> Run:
    summary = {
        "run_id": "by hand",
        "strategy": "fedbuff",
        "seed": 0,
        "labels": {},
        "time_s": time_s,
        "ended": "updates",
        "versions": 2,
        "consumed": 4,
        "ledger": {"admitted": 4},
        "staleness": {"mean": 0.5, "histogram": histogram},
        "targets": [{"metric": "accuracy", "value": 0.5, "reached_s": reached_s, "reached_updates": None}],
        "final": {"accuracy": final},
    }
    metrics = pl.DataFrame(schema={"time_s": pl.Float64, "version": pl.Int64, "name": pl.String, "value": pl.Float64})
    return Run({"strategy": {"name": "fedbuff"}}, summary, {"events": events(leases), "metrics": metrics})


def compared(tmp_path: Path, real: list[Run], sim: list[Run]) -> dict[str, Any]:
    folders: dict[str, list[Path]] = {"real": [], "sim": []}
    for name, runs in (("real", real), ("sim", sim)):
        for place, one in enumerate(runs):
            one.save(tmp_path / f"{name}{place}")
            folders[name].append(tmp_path / f"{name}{place}")
    assert compare(folders["real"], folders["sim"], tmp_path / "out") == 0
    told: dict[str, Any] = json.loads((tmp_path / "out" / "compare.json").read_text())
    return told


def number(told: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in told["numbers"] if one["name"] == name]
    return dict(found)


def test_two_logs_worked_out_by_hand(tmp_path: Path) -> None:
    real = run(REAL, 8.0, {"0": 2, "1": 2}, 4.0, 0.8)
    sim = run(SIM, 10.0, {"0": 3, "2": 1}, 5.0, 0.6)
    told = compared(tmp_path, [real], [sim])
    assert told["order"]["tau"] == pytest.approx((5 - 1) / 6)
    assert told["order"]["same_order"] == pytest.approx(5 / 6)
    assert told["order"]["neighbours_same_order"] == pytest.approx(2 / 3)
    assert (told["order"]["matched"], told["order"]["deliveries"]) == (4, [4, 4])
    assert told["staleness"] == pytest.approx({"total_variation": 0.5, "wasserstein": 0.5})
    expected = {
        "updates a second": (0.5, 0.4),
        "versions a second": (0.25, 0.2),
        "time to accuracy ≥ 0.5": (4.0, 5.0),
        "final accuracy": (0.8, 0.6),
        "lease of client 0": (1.5, 1.5),
        "lease of client 1": (2.0, 1.0),
        "lease of client 2": (4.0, 5.0),
    }
    for name, (one, other) in expected.items():
        found = number(told, name)
        assert (found["real"], found["predicted"]) == pytest.approx((one, other)), name
        assert found["error"] == pytest.approx(other / one - 1, abs=1e-12), name


def test_a_run_agrees_with_itself(tmp_path: Path) -> None:
    one = simulated(CONFIG)
    told = compared(tmp_path, [one], [one])
    assert told["order"]["tau"] == told["order"]["same_order"] == told["order"]["neighbours_same_order"] == 1
    assert told["staleness"] == {"total_variation": 0, "wasserstein": 0}
    assert {found["error"] for found in told["numbers"]} == {0}
    assert told["notes"] == ["1 pair of runs, matched by seed"]


@given(histograms, histograms, histograms)
@settings(max_examples=60)
def test_distances_of_histograms_are_distances(a: dict[int, int], b: dict[int, int], c: dict[int, int]) -> None:
    for distance in (total_variation, wasserstein):
        assert distance(a, a) == 0
        assert distance(a, b) == pytest.approx(distance(b, a))
        assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9
    assert total_variation(a, b) <= 1
    assert total_variation(a, {value: 3 * count for value, count in a.items()}) == pytest.approx(0)
    assert wasserstein(a, {value + 2: count for value, count in a.items()}) == pytest.approx(2)


def test_a_reversed_order_has_tau_minus_one() -> None:
    forward = [(client, 0.0, 1.0 + client) for client in range(5)]
    backward = [(client, 0.0, 9.0 - client) for client in range(5)]
    found = order_agreement(events(forward), events(backward))
    assert found is not None
    assert (found.tau, found.same_order, found.neighbours) == pytest.approx((-1, 0, 0))


def test_seeds_give_spreads_and_are_matched(tmp_path: Path) -> None:
    real = [simulated(CONFIG, seed) for seed in (0, 1, 2)]
    told = compared(tmp_path, real, [simulated(CONFIG, seed) for seed in (1, 2, 5)])
    assert told["order"]["pairs_of_runs"] == 2
    assert told["order"]["tau"] == 1
    assert told["order_among_real_runs"]["pairs_of_runs"] == 3
    assert "2 pairs of runs, matched by seed; no run of the other kind has the seed of" in told["notes"][0]
    rates = [one.summary["consumed"] / one.summary["time_s"] for one in real]
    found = number(told, "updates a second")
    assert found["real"] == pytest.approx(sum(rates) / 3)
    assert found["real_spread"] == pytest.approx(pl.Series(rates).std())


def test_what_cannot_be_compared_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = run(REAL, 8.0, {"0": 4}, None, 0.8)
    sim = run([(7, 0.0, 1.0)], 8.0, {"0": 4}, 5.0, 0.6)
    del sim.summary["final"]["accuracy"]
    told = compared(tmp_path, [real], [sim])
    assert told["order"] is None
    assert number(told, "time to accuracy ≥ 0.5")["why_not"] == "cannot be compared: no real run reached it"
    assert number(told, "final accuracy")["why_not"] == "cannot be compared: no predicted run has it"
    assert number(told, "lease of client 7")["error"] is None
    assert "order of deliveries: cannot be compared, fewer than two deliveries match" in capsys.readouterr().out


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    other = {**CONFIG, "strategy": {**CONFIG["strategy"], "buffer_size": 2}}
    told = compared(tmp_path, [simulated(CONFIG)], [simulated(other)])
    assert told["notes"][1] == "strategy.buffer_size differs: 3 in the run, 2 in the prediction"


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    small = {**CONFIG, "run": {"updates": 12}}
    simulated(small).save(tmp_path / "real")
    simulated({**small, "strategy": {"name": "fedasync", "concurrency": 4}}).save(tmp_path / "other")
    simulated({**small, "run": {"time_s": 0.5}}).save(tmp_path / "empty")
    for folder, says in (
        (tmp_path / "nothing", "no finished run here"),
        (tmp_path / "other", "runs of one strategy would do"),
        (tmp_path / "empty", "an empty run: no contribution was applied in 0.5 s"),
    ):
        with pytest.raises(StudyError, match=says) as error:
            compare([tmp_path / "real"], [folder], tmp_path / "out")
        assert "\n" not in str(error.value)
        assert str(folder) in str(error.value)
