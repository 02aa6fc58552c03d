"""Workloads and strategies of a user's own, named by dotted path: sound ones run, ill ones are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

from .own_code import CLIENT
from .running import LEARNING, Command, changed, runs, summary

SOUND_AND_ILL = """
[[axis]]
name = "state"
key = "workload.kind"
values = ["quadratic", "own_code.%s"]
labels = ["sound", "ill"]
"""


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("RaisesInTrain", r"client 3, lease \d+, version \d+: train raised KeyError: 'pixel'"),
        ("RaisesInEvaluate", r"version 0: evaluate raised KeyError: 'no test data'"),
        ("RaisesInInitialModel", r".*KeyError: 'no weights'"),
        ("RaisesInClientSamples", r".*KeyError: 'no clients'"),
        ("RaisesWhenMade", r"KeyError: 'no such data set'"),
        ("Quits", r"client \d+, lease \d+, version \d+: train raised SystemExit: I quit"),
    ],
)
def test_a_workload_that_raises_ends_its_run_and_no_other(
    fedasync: Command, study: Path, workload: str, said: str
) -> None:
    study.write_text(LEARNING + SOUND_AND_ILL % workload)
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    line = re.fullmatch(rf"fedasync: run (ill_seed0_\w+): {said} \(traceback: (.+)\)", end.complaint)
    assert line is not None, end.complaint
    log = Path(line[2])
    assert log == Path(f"results/s/runs/{line[1]}.error.log")
    assert "Traceback (most recent call last)" in log.read_text()
    assert "own_code.py" in log.read_text()
    assert [run.split("_")[0] for run in runs(Path("results/s"))] == ["sound"]
    assert {path.name.split("_")[0] for path in Path("results/s/runs").iterdir()} == {"sound", "ill"}
    assert pl.read_csv("results/s/table.csv")["state"].to_list() == ["sound"]


def test_a_workload_that_quits_when_it_is_made_ends_its_run_in_one_line(fedasync: Command, study: Path) -> None:
    study.write_text(changed(LEARNING, ('kind = "quadratic"\nclients = 8', 'kind = "quitter.quit_at_once"')))
    Path("quitter.py").write_text("import sys\n\n\ndef quit_at_once():\n    sys.exit(3)\n")
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    assert re.fullmatch(r"fedasync: run seed0_\w+: the workload raised SystemExit: 3 \(traceback: .+\)", end.complaint)


def test_a_run_that_works_after_all_takes_its_old_traceback_away(fedasync: Command, study: Path) -> None:
    study.write_text(changed(LEARNING, ('kind = "quadratic"', 'kind = "faulty.Faulty"')))
    fault = "import os\nfrom fedasync.workloads import Quadratic\nclass Faulty(Quadratic):\n"
    Path("faulty.py").write_text(
        f"{fault}    def evaluate(self, model):\n        os.stat('data')\n        return super().evaluate(model)\n"
    )
    assert fedasync("sim", "s.toml").status == 1
    assert len(list(Path("results/s/runs").glob("*.error.log"))) == 1
    Path("data").write_text("")
    assert fedasync("sim", "s.toml").status == 0
    assert not list(Path("results/s/runs").glob("*.error.log"))
    assert len(runs(Path("results/s"))) == 1


def test_of_many_failures_five_are_told_one_by_one(fedasync: Command, study: Path) -> None:
    study.write_text(changed(LEARNING, ('kind = "quadratic"', 'kind = "own_code.RaisesInTrain"')))
    end = fedasync("sim", "s.toml", "--seeds", "8")
    assert (end.status, len(end.err.splitlines())) == (1, 6)
    assert end.err.splitlines()[-1] == "fedasync: and 3 more runs with errors or warnings"
    assert len(list(Path("results/s/runs").glob("*.error.log"))) == 8
    assert not Path("results/s/table.csv").exists()


@pytest.mark.parametrize(
    ("workload", "reason", "detail"),
    [
        ("SendsNaN", "not finite", "1 of 1 values are NaN or infinite"),
        ("SendsAnotherShape", "wrong shape", "shape [5], the model has [1]"),
        ("SendsAnotherType", "wrong dtype", "dtype torch.float16, the model has torch.float64"),
        ("SendsAnArray", "wrong type", "values of ndarray, the model has Tensor"),
        ("SendsNothing", "no contribution", "got NoneType; a Contribution would do"),
    ],
)
def test_an_unfit_contribution_is_rejected_by_name_and_the_run_goes_on(
    fedasync: Command, study: Path, workload: str, reason: str, detail: str
) -> None:
    study.write_text(changed(LEARNING, ('kind = "quadratic"', f'kind = "own_code.{workload}"')))
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    ((name, run),) = runs(Path("results/s")).items()
    found = summary(run)
    rejected = pl.read_parquet(run / "events.parquet").filter(pl.col("kind") == "rejected")
    assert set(rejected["reason"]) == {reason}
    assert set(rejected["worker"]) == {CLIENT}
    assert found["ledger"]["rejected"] == {reason: len(rejected)}
    assert found["unfit_total"] == len(rejected)
    assert found["consumed"] == 40
    first = found["unfit"][0]
    assert first["lease"] == rejected["lease"][0]
    assert end.complaint == (
        f"fedasync: run {name}: {len(rejected)} contributions were not fit for use; the first, of client 3, "
        f"lease {first['lease']}, at {first['time_s']:g} s: {reason}, {detail}"
    )
    shown = fedasync("show", str(run)).out
    assert f"rejected: {reason}" in shown
    assert f"contributions not fit for use: {len(rejected)}" in shown


def test_a_run_in_which_nothing_is_accepted_ends(fedasync: Command, study: Path) -> None:
    study.write_text(changed(LEARNING, ('kind = "quadratic"', 'kind = "own_code.AllSendNaN"')))
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    assert re.search(r"run seed0_\w+: the last \d+ leases brought nothing .*not finite", end.complaint)
    assert not runs(Path("results/s"))


def test_a_metric_that_diverges_is_kept(fedasync: Command, study: Path) -> None:
    study.write_text(
        changed(LEARNING, ('kind = "quadratic"', 'kind = "own_code.Diverges"\ncontraction = 1.0\ndrift = 1.0'))
        + "[targets]\nloss = 1e3\n"
    )
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, "")
    (run,) = runs(Path("results/s")).values()
    losses = pl.read_parquet(run / "metrics.parquet").filter(pl.col("name") == "loss")["value"]
    assert losses.is_nan().any()
    found = json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)
    assert found["final"]["loss"] is None
    assert found["final"]["w"] > 1
    assert found["targets"] == [{"metric": "loss", "value": 1e3, "reached_s": None, "reached_updates": None}]
    assert fedasync("show", str(run)).status == 0


def test_five_failures_in_two_processes(fedasync: Command, study: Path, folder: Path) -> None:
    ill = ["RaisesInTrain", "RaisesInEvaluate", "RaisesInInitialModel", "RaisesInClientSamples", "SendsNaN"]
    kinds = [f"own_code.{name}" for name in [*ill, "Steps"]]
    study.write_text(f'{LEARNING}\n[[axis]]\nname = "state"\nkey = "workload.kind"\nvalues = {kinds}\n')
    end = fedasync("sim", "s.toml", "--jobs", "2", "--out", str(folder / "out"))
    assert end.status == 1
    assert "Traceback" not in end.err
    assert sorted(line.split("_")[0] for line in end.err.splitlines()) == sorted(
        f"fedasync: run own-code.{name.lower()}" for name in ill
    )
    assert sorted(run.split("_")[0] for run in runs(folder / "out")) == ["own-code.sendsnan", "own-code.steps"]
    assert len(list(folder.glob("out/runs/*.error.log"))) == 4


def test_a_strategy_and_a_workload_of_ones_own(fedasync: Command, study: Path) -> None:
    study.write_text(
        changed(
            LEARNING,
            ('kind = "quadratic"\nclients = 8', 'kind = "own_code.Steps"\nclients = 8\nsize = 2.0'),
            (
                'name = "fedbuff"\nconcurrency = 4\nbuffer_size = 2',
                'name = "own_code.median"\nconcurrency = 4\nbuffer_size = 3',
            ),
            ("updates = 40", "updates = 39"),
        )
    )
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, "")
    (run,) = runs(Path("results/s")).values()
    found = summary(run)
    assert (found["strategy"], found["versions"], found["consumed"]) == ("median", 13, 39)
    assert found["final"] == {"w": 26.0}
    assert all(verdict["holds"] for verdict in found["verdicts"])
    assert json.loads((run / "config.json").read_text())["strategy"] == {
        "name": "own_code.median",
        "concurrency": 4,
        "buffer_size": 3,
    }


def test_a_run_that_made_no_version_says_so_and_ends_with_status_1(fedasync: Command, study: Path) -> None:
    """A K beyond what its time can bring is no clean finish."""
    study.write_text(changed(LEARNING, ("updates = 40", "time_s = 50"), ("buffer_size = 2", "buffer_size = 1000000")))
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    assert "no version was made in 50 s" in end.err
    assert "a smaller buffer or more time would do" in end.err


def test_a_run_without_a_version_says_what_would_help(fedasync: Command, study: Path) -> None:
    late = changed(LEARNING, ("updates = 40", "time_s = 50"))
    fedbuff = 'name = "fedbuff"\nconcurrency = 4\nbuffer_size = 2'
    study.write_text(changed(late, (fedbuff, 'name = "fedfix"\nconcurrency = 4\ninterval_s = 60.0')))
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    assert end.complaint.endswith("; an interval_s shorter than 60 or more time would do")
    nobody = f'availability = {{ kind = "intervals", intervals = {[[[60, 70]]] * 8} }}\n\n[strategy]'
    study.write_text(changed(late, ("[strategy]", nobody)))
    end = fedasync("sim", "s.toml")
    assert end.status == 1
    assert end.complaint.endswith(": no version was made in 50 s: nobody was ever online")
