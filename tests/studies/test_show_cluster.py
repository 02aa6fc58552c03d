"""What ``fedasync show`` prints of a cluster's run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedasync.runs.staleness_kinds import KINDS
from fedasync.studies.show import show_run

from ..runs.cluster_logs import Cluster


def test_show_tells_shares_staleness_bias_and_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = Cluster(versions=20, eta=3, most_stale=1, abort=True, short=True, prompts=150).run(warm_up_versions=2)
    run.save(tmp_path)
    show_run(tmp_path)
    out = " ".join(capsys.readouterr().out.split())  # captions are broken into lines
    told = run.summary["rollouts"]
    bias = told["length_bias"]
    for kind in KINDS:
        assert kind.name.replace("_", " ") in out
    for words in (
        "what trainer and servers did with their time",
        "without the first 2 versions",
        f"at most {bias['ratio_at_most']:.4g} with the {bias['answers']['aborted']} aborted",
        "conservation of prompts",
        "dropped: stale",
        f"{told['starvation']['prompts']} prompts;",
        "wasted: left out of its group",
    ):
        assert words in out
    assert "utilisation" not in out


def test_show_of_a_run_that_lost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Cluster(versions=5).run().save(tmp_path)
    show_run(tmp_path)
    out = capsys.readouterr().out
    assert "prompts never trained" not in out
    assert "aborted" not in out
