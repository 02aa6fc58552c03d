"""What a study leaves behind: run folders after the published contract, and the commands that read them."""

from __future__ import annotations

import itertools
import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.torch import load_file

from fedasync.studies.study import SeedsUntil, load

from .running import LEARNING, STRATEGIES, TIMING, Command, changed, contents, runs, summary

S = Path("results/s")
SIMS = Path(__file__).parents[2] / "sims"

EVENTS = {
    "time_s": pl.Float64,
    "kind": pl.String,
    "lease": pl.Int64,
    "worker": pl.Int64,
    "base_version": pl.Int64,
    "version": pl.Int64,
    "staleness": pl.Int64,
    "reason": pl.String,
}
METRICS = {"time_s": pl.Float64, "version": pl.Int64, "name": pl.String, "value": pl.Float64}
SUMMARY = {
    "run_id": str,
    "study": str,
    "seed": int,
    "labels": dict,
    "strategy": str,
    "timing_only": bool,
    "time_s": float,
    "versions": int,
    "admitted": int,
    "consumed": int,
    "ledger": dict,
    "verdicts": list,
    "staleness": dict,
    "utilisation": dict,
    "targets": list,
    "final": dict,
    "best": dict,
}
ENDS = ["rejected", "failed", "cancelled"]
KINDS = {"admitted", "delivered", *ENDS, "consumed", "ignored", "committed", "published"}


@pytest.fixture
def learnt(fedasync: Command, study: Path) -> dict[str, Path]:
    """A run folder for each strategy, over-selection and all, with a target."""
    study.write_text(
        changed(
            LEARNING,
            ("figures = []", 'figures = ["metric_over_time", "closed_forms"]'),
            ('kind = "quadratic"', 'kind = "quadratic"\nstart = -100.0'),
        )
        + STRATEGIES
        + "[targets]\nw = -99\nloss = 1e9\n"
    )
    assert fedasync("sim", "s.toml").status == 0
    return {summary(run)["strategy"]: run for run in runs(S).values()}


def test_a_run_folder_is_as_published(learnt: dict[str, Path]) -> None:
    assert set(learnt) == {"fedavg", "fedprox", "fedasync", "fedbuff", "fedfa"}
    for strategy, run in learnt.items():
        assert {path.name for path in run.iterdir()} == {
            "config.json",
            "events.parquet",
            "metrics.parquet",
            "model.safetensors",
            "summary.json",
            "trace.json",
        }
        _check_events(pl.read_parquet(run / "events.parquet"))
        found = summary(run)
        for key, kind in SUMMARY.items():
            assert isinstance(found[key], kind), key
        assert found["run_id"] == run.name
        assert (found["study"], found["seed"], found["strategy"]) == ("s", 0, strategy)
        assert found["timing_only"] is False
        _check_summary(found, pl.read_parquet(run / "events.parquet"))
        _check_metrics(pl.read_parquet(run / "metrics.parquet"), found)
        _check_trace(json.loads((run / "trace.json").read_text()))
        config = json.loads((run / "config.json").read_text())
        assert config["strategy"]["name"] == strategy
        assert {"run", "population", "workload", "strategy", "targets", "seed", "versions"} == set(config)
        assert {"fedasync", "numpy", "torch"} <= set(config["versions"])
        (weights,) = load_file(run / "model.safetensors").values()
        assert float(weights.mean()) == found["final"]["w"]


def _check_events(events: pl.DataFrame) -> None:
    assert dict(events.schema) == EVENTS
    assert set(events["kind"]) <= KINDS
    assert events["time_s"].is_sorted()
    of_server = pl.col("kind").is_in(["committed", "published"])
    assert events.filter(of_server)["lease"].null_count() == events.filter(of_server).height
    assert events.filter(~of_server)["lease"].null_count() == 0
    first = events.filter(~of_server).group_by("lease", maintain_order=True).first()
    assert set(first["kind"]) == {"admitted"}
    ends = events.filter(pl.col("kind").is_in(ENDS))
    assert ends["reason"].null_count() == 0


def _check_summary(found: dict[str, Any], events: pl.DataFrame) -> None:
    count = dict(events["kind"].value_counts().iter_rows())
    ledger = found["ledger"]
    assert ledger["admitted"] == found["admitted"] == count["admitted"]
    assert ledger["consumed"] == found["consumed"] == count["consumed"]
    assert found["versions"] == count["committed"]
    assert ledger["admitted"] == ledger["in_flight"] + ledger["buffered"] + ledger["consumed"] + sum(
        sum(ledger[kind].values()) for kind in ENDS
    )
    assert all(set(verdict) == {"name", "holds", "detail"} and verdict["holds"] for verdict in found["verdicts"])
    tau = events.filter(pl.col("kind") == "consumed")["staleness"].to_numpy()
    assert found["staleness"]["mean"] == pytest.approx(tau.mean())
    assert found["staleness"]["max"] == tau.max()
    assert found["staleness"]["p90"] == np.quantile(tau, 0.9, method="inverted_cdf")
    assert sum(found["staleness"]["histogram"].values()) == found["consumed"]
    shares = found["utilisation"]
    assert set(shares) == {"useful", "wasted", "waiting", "server"}
    assert shares["useful"] + shares["wasted"] + shares["waiting"] == pytest.approx(1)
    assert [(t["metric"], t["value"], t["reached_s"] is None) for t in found["targets"]] == [
        ("w", -99.0, False),
        ("loss", 1e9, True),
    ]
    assert found["targets"][0]["reached_s"] > 0


def _check_metrics(metrics: pl.DataFrame, found: dict[str, Any]) -> None:
    assert dict(metrics.schema) == METRICS
    grid = metrics["time_s"].unique().sort().to_list()
    assert grid[:-1] == [20.0 * i for i in range(len(grid) - 1)]
    assert grid[-1] == found["time_s"]
    last = metrics.filter(pl.col("time_s") == grid[-1])
    assert dict(zip(last["name"], last["value"], strict=True)) == found["final"]
    assert found["best"]["w"] == metrics.filter(pl.col("name") == "w")["value"].max()


def _check_trace(trace: Any) -> None:
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert events
    assert all({"ph", "pid"} <= set(event) for event in events)
    assert any(event["ph"] == "X" and event["dur"] >= 0 for event in events)


def test_a_timing_only_run_has_no_model_and_no_metrics(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    assert fedasync("sim", "s.toml").status == 0
    (run,) = runs(S).values()
    assert not (run / "model.safetensors").exists()
    metrics = pl.read_parquet(run / "metrics.parquet")
    assert dict(metrics.schema) == METRICS
    assert metrics.is_empty()
    found = summary(run)
    assert (found["timing_only"], found["final"], found["targets"]) == (True, {}, [])


def test_plot_draws_the_same_bytes_again(fedasync: Command, learnt: dict[str, Path]) -> None:
    before = contents(S)
    for path in [*S.glob("table.*"), *S.glob("closed_forms.*"), *S.glob("figures/*")]:
        path.unlink()
    end = fedasync("plot", "results/s")
    assert (end.status, end.err) == (0, "")
    assert contents(S) == before
    assert {"table.csv", "table.md", "closed_forms.csv", "figures/metric_over_time.svg"} <= set(before)
    assert "results/s: table.csv" in end.out


def test_a_study_is_drawn_from_the_runs_that_are_finished(fedasync: Command, learnt: dict[str, Path]) -> None:
    (learnt["fedfa"] / "summary.json").unlink()
    assert fedasync("plot", "results/s").status == 0
    assert pl.read_csv(S / "table.csv")["strategy"].to_list() == ["FedAvg", "FedProx", "FedAsync", "FedBuff"]


def test_show_prints_what_a_run_says_of_itself(fedasync: Command, learnt: dict[str, Path]) -> None:
    run = learnt["fedbuff"]
    found = summary(run)
    end = fedasync("show", str(run))
    assert (end.status, end.err) == (0, "")
    lines = [" ".join(line.replace("│", " ").split()) for line in end.out.splitlines()]
    assert f"{run.name} strategy = FedBuff" in lines
    assert f"admitted {found['admitted']}" in lines
    assert "consumed 40" in lines
    for title in (
        "conservation ledger",
        "verdicts",
        "staleness of applied contributions",
        "utilisation (share of slots × time)",
        "targets",
        "final metrics",
        "theory beside measurement",
    ):
        assert title in lines
    for verdict in found["verdicts"]:
        assert f"{verdict['name']} yes {verdict['detail']}" in lines
    for tau, count in found["staleness"]["histogram"].items():
        assert f"{tau} {count} {count / 40:.1%}" in lines
    assert any(line.startswith("w ≥ -99 ") and "not reached" not in line for line in lines)
    assert f"loss ≥ 1e+09 not reached (best {found['best']['loss']:.4g})" in lines
    rate = next(form for form in found["closed_forms"] if form["name"] == "contributions per second")
    assert any(line.startswith(f"contributions per second n / E[t] {rate['predicted']:.5g}") for line in lines)
    assert "cancelled: " in fedasync("show", str(learnt["fedprox"])).out


def test_list_names_the_shipped_studies(fedasync: Command) -> None:
    end = fedasync("list")
    assert (end.status, end.err) == (0, "")
    found = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in end.out.splitlines() if "│" in line}
    found.pop("", None)  # a title on two lines
    expected = {}
    for path in SIMS.glob("*.toml"):
        study = load(path)
        plans = list(study.plans())
        rule = study.header.seeds
        fewest = [p for p in plans if p.seed < rule.at_least] if isinstance(rule, SeedsUntil) else plans
        expected[path.stem] = str(len(plans)) if len(fewest) == len(plans) else f"{len(fewest)}–{len(plans)}"
    assert {"heterogeneity", "staleness_sweep"} <= expected.keys()
    assert found == expected
    axes = load(SIMS / "heterogeneity.toml")
    assert int(found["heterogeneity"]) == prod(map(len, axes.axes)) * len(axes.header.seed_list) > 1


def test_studies_of_the_working_directory_come_first_and_a_broken_one_is_listed(fedasync: Command) -> None:
    Path("sims").mkdir()
    Path("sims/mine.toml").write_text(TIMING)
    Path("sims/heterogeneity.toml").write_text(TIMING)
    Path("sims/broken.toml").write_text("[run")
    out = fedasync("list").out
    assert "sims/broken.toml is not TOML" in out
    assert out.count("small") == 2
    assert fedasync("sim", "mine").status == 0
    assert len(runs(Path("results/mine"))) == 1


@pytest.mark.parametrize(
    ("command", "place"),
    [
        *itertools.product(["plot", "show"], ["nowhere", ".", "s.toml", "empty", "half"]),
        ("plot", "text"),
        ("plot", "list"),
    ],
)
def test_a_wrong_folder(fedasync: Command, study: Path, command: str, place: str) -> None:
    study.write_text(TIMING)
    for name, content in {"empty": None, "half": '{"title": "x"', "text": "\xff", "list": "[]"}.items():
        Path(name).mkdir()
        for file in ("study.json", "config.json", "summary.json") if content else ():
            (Path(name) / file).write_text(content or "", encoding="latin-1")
    end = fedasync(command, place)
    assert (end.status, end.out) == (2, "")
    assert end.complaint.startswith(f"fedasync: {place}: ")


def test_a_study_none_of_whose_runs_is_finished(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    fedasync("sim", "s.toml")
    for run in runs(S).values():
        (run / "summary.json").unlink()
    end = fedasync("plot", "results/s")
    assert (end.status, end.complaint) == (
        2,
        "fedasync: results/s: no run has finished, so there is nothing to draw",
    )


def test_a_report_of_a_metric_that_no_run_has(fedasync: Command, study: Path) -> None:
    study.write_text(changed(TIMING, ("figures = []", 'figures = []\nmetric = "accuracy"')))
    end = fedasync("sim", "s.toml")
    assert end.status == 2
    assert end.complaint == (
        "fedasync: results/s: report.metric: no metric 'accuracy' in these runs; there are: 'updates', 'versions'"
    )
    assert len(runs(S)) == 1
