"""Which runs of a study advance side by side, and that it changes no byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.studies.execute import MOST_TOGETHER, Job, groups
from fedasync.studies.study import RunPlan

from .running import LEARNING, STRATEGIES, Command, changed, contents, runs

S = Path("results/s")
DIGITS = changed(LEARNING, ('"quadratic"', '"digits"\nhidden = 4\nlocal = { epochs = 1, batch_size = 64 }'))


@given(kinds=st.lists(st.sampled_from([None, "digits", "quadratic"]), max_size=60))
def test_every_job_is_in_one_group_with_its_like(kinds: list[str | None]) -> None:
    all_jobs = [
        Job(RunPlan({}, i, {"seed": i} | ({"workload": {"kind": kind}} if kind else {})), "s", "s.toml", Path(str(i)))
        for i, kind in enumerate(kinds)
    ]
    found = groups(all_jobs)
    assert sorted((job for group in found for job in group), key=lambda job: job.plan.seed) == all_jobs
    for group in found:
        assert 1 <= len(group) <= MOST_TOGETHER
        assert len({repr(job.plan.config.get("workload")) for job in group}) == 1
        assert len(group) == 1 or "workload" in group[0].plan.config
        assert [job.plan.seed for job in group] == sorted(job.plan.seed for job in group)
    if len(all_jobs) >= 2 and all(kinds):
        assert len(found) >= 2  # two processes have something to do


def test_runs_made_again_in_other_company_have_the_same_bytes(fedasync: Command, study: Path) -> None:
    study.write_text(changed(DIGITS, ("seeds = 1", "seeds = 2")) + STRATEGIES)
    assert fedasync("sim", "s.toml").status == 0
    before = contents(S)
    lost: list[Callable[[int], bool]] = [lambda i: i % 2 == 0, lambda i: i % 3 == 0, lambda i: i < 7]
    for gone in lost:
        for i, folder in enumerate(runs(S).values()):
            if gone(i):
                shutil.rmtree(folder)
        assert fedasync("sim", "s.toml", "--jobs", "2").status == 0
        assert contents(S) == before


def test_a_second_study_elsewhere_is_written_there(
    fedasync: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one session, where the processes of the first are used again."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        Path("s.toml").write_text(changed(LEARNING, ("seeds = 1", "seeds = 2")))
        assert fedasync("sim", "s.toml", "--jobs", "2").status == 0
        assert len(runs(tmp_path / name / S)) == 2
