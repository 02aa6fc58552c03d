"""Runs that end at their target, published claims with verdicts, and closed forms beside measurement."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import fedasync as package

from .running import LEARNING, Command, changed, runs, summary

S = Path("results/s")

# Every client returns w + 1 after 10 s exactly: the model's speed is known.
STEADY = changed(
    LEARNING,
    ('kind = "quadratic"\nclients = 8', 'kind = "quadratic"\nclients = 8\ncontraction = 1.0\ndrift = 1.0'),
    ('{ kind = "exponential", mean = 10.0 }', '{ kind = "constant", value = 10.0 }'),
    ("updates = 40\nevaluate_every_s = 20", "time_s = 1000\nevaluate_every_s = 4"),
)


def test_a_run_ends_at_its_target(fedasync: Command, study: Path) -> None:
    text = changed(STEADY, ('name = "fedbuff"\nconcurrency = 4\nbuffer_size = 2', 'name = "fedavg"\ncohort = 4'))
    study.write_text(text + "[targets]\nw = 4.5\n")
    assert fedasync("sim", "s.toml").status == 0
    assert fedasync("sim", "s.toml", "--set", "run.stop_at_target=true").status == 0
    whole, stopped = sorted(map(summary, runs(S).values()), key=lambda found: -found["time_s"])
    assert (whole["ended"], whole["time_s"], whole["versions"]) == ("time", 1000.0, 100)
    # Round 5 ends at 50 s; the next evaluation is at 52 s.
    target = {"metric": "w", "value": 4.5, "reached_s": 52.0, "reached_updates": 20}
    assert (stopped["ended"], stopped["time_s"], stopped["versions"]) == ("target", 52.0, 5)
    assert whole["targets"] == stopped["targets"] == [target]
    assert stopped["final"]["w"] == 5.0


def test_all_targets_must_be_reached(fedasync: Command, study: Path) -> None:
    study.write_text(STEADY + "[targets]\nw = 4.5\nloss = 50.0\n")
    assert fedasync("sim", "s.toml", "--set", "run.stop_at_target=true").status == 0
    (found,) = map(summary, runs(S).values())
    assert found["ended"] == "target"
    assert found["time_s"] == max(target["reached_s"] for target in found["targets"])
    assert found["targets"][0]["reached_s"] < found["targets"][1]["reached_s"]


def test_a_target_that_no_metric_can_reach_is_named(fedasync: Command, study: Path) -> None:
    study.write_text(STEADY + "[targets]\naccuracy = 0.9\n")
    end = fedasync("sim", "s.toml", "--set", "run.stop_at_target=true")
    assert end.status == 1
    assert "target 'accuracy': the workload has no such metric; it has ['distance', 'loss', 'w']" in end.complaint


def test_to_stop_at_a_target_that_is_never_looked_at_is_refused(fedasync: Command, study: Path) -> None:
    study.write_text(STEADY)
    end = fedasync("sim", "s.toml", "--set", "run.stop_at_target=true")
    assert end.status in (1, 2)
    assert "stop_at_target needs a target, a workload, and evaluate_every_s" in end.complaint
    assert not runs(S)


def test_published_claims_stand_beside_what_was_measured(fedasync: Command, study: Path) -> None:
    """FedAvg moves by 1 in 10 s; FedBuff with K = 1 by 4: four times as fast, to the grid."""
    study.write_text(
        changed(
            STEADY,
            ("seeds = 1", "seeds = 2"),
            (
                "figures = []",
                """
figures = ["speedup_by_axis"]
baseline = "FedAvg"
x_axis = "tail"
claims = [
  { series = "FedBuff", over = "FedAvg", times = 2.0, source = "modest" },
  { series = "FedBuff", over = "FedAvg", times = 6.0, source = "bold" },
]
""",
            ),
        )
        + """
[targets]
w = 100.0

[[axis]]
name = "strategy"
points = [
  { label = "FedAvg", strategy = { name = "fedavg", cohort = 4 } },
  { label = "FedBuff", strategy = { name = "fedbuff", concurrency = 4, buffer_size = 1, staleness.kind = "constant" } },
]

[[axis]]
name = "tail"
key = "population.duration_s.value"
values = [5.0, 10.0]
"""
    )
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, "")
    claims = pl.read_csv(S / "claims.csv")
    assert claims["published"].to_list() == ["FedBuff 2.00× FedAvg (modest)"] * 2 + ["FedBuff 6.00× FedAvg (bold)"] * 2
    assert claims["tail"].cast(pl.Float64).to_list() == [5.0, 10.0] * 2
    assert [verdict.split(";")[0] for verdict in claims["verdict"]] == ["reached"] * 2 + ["not reached"] * 2
    measured = claims["measured"].str.strip_suffix("×").cast(pl.Float64)
    assert measured.to_numpy() == pytest.approx(4.0, abs=0.2)
    assert claims["ceiling"].str.strip_suffix("×").cast(pl.Float64).to_list() == [1.0] * 4
    assert "claims" in end.out
    assert "6.00×" in end.out


WITHIN = {
    "mean staleness": 0.05,
    "contributions per second": 0.14,
    "drift per contribution": 0.12,
    "round time (s)": 0.35,
}
"""Four standard errors, relative, of 500 s and two seeds; staleness starts at 0, which costs it (n − 1)/(2N)."""


def test_the_oracle_agrees_with_its_closed_forms(fedasync: Command, study: Path) -> None:
    shipped = (Path(package.__file__).parent.parent / "sims" / "quadratic_oracle.toml").read_text()
    figures = '"metric_over_time", "staleness", "utilisation", '
    study.write_text(changed(shipped, (figures, "")))
    end = fedasync("sim", "s.toml", "--set", "run.time_s=500", "--seeds", "2")
    assert (end.status, end.err) == (0, "")
    forms = pl.read_csv(S / "closed_forms.csv")
    assert set(forms["name"]) == set(WITHIN)
    assert len(forms) == 3 * (2 + 2 + 3 + 3 + 2 + 3)
    assert set(forms["seeds"]) == {2}
    for name, bound in WITHIN.items():
        assert forms.filter(pl.col("name") == name)["relative_error"].abs().max() < bound, name
    exact = forms.filter((pl.col("name") == "drift per contribution") & pl.col("strategy").is_in(["FedAvg", "FedBuff"]))
    assert exact["measured"].to_numpy() == pytest.approx(exact["predicted"].to_numpy(), rel=1e-9)
