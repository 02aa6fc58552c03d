"""Runs made on Ray: the bytes of local processes, one line for what goes wrong, nothing finished lost."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from .running import LEARNING, STRATEGIES, Command, changed, contents, runs, summary
from .test_interrupts import OWN_STRATEGY, at_work, ended, wait_until
from .test_user_code import SOUND_AND_ILL

pytest.importorskip("ray")
S = Path("results/s")


def test_ray_writes_the_bytes_of_local_processes(fedasync: Command, study: Path, tmp_path: Path) -> None:
    study.write_text(changed(LEARNING, ("seeds = 1", "seeds = 2")) + STRATEGIES)
    for name, words in (("local", ["--jobs", "1"]), ("ray", ["--backend", "ray", "--jobs", "2"])):
        end = fedasync("sim", str(study), *words, "--out", str(tmp_path / name))
        assert (end.status, end.err) == (0, "")
    assert len(runs(tmp_path / "ray")) == 10
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_run_that_fails_on_ray_is_told_and_its_traceback_brought_home(fedasync: Command, study: Path) -> None:
    study.write_text(LEARNING + SOUND_AND_ILL % "Quits")
    end = fedasync("sim", "s.toml", "--backend", "ray", "--jobs", "1")
    assert end.status == 1
    log = Path(end.complaint.split("(traceback: ")[1].rstrip(")"))
    assert log.parent == S / "runs"
    assert "Traceback" in log.read_text()
    (sound,) = runs(S).values()
    assert summary(sound)["consumed"] == 40


def test_a_lost_worker_ends_the_study_and_not_its_finished_runs(fedasync: Command, study: Path) -> None:
    """Ray tries lost work once more, so every worker that comes up is killed until the study gives up."""
    study.write_text(changed(OWN_STRATEGY, ("seeds = 1", "seeds = 6")))
    with at_work("sim", "s.toml", "--backend", "ray", "--jobs", "1") as process:
        Path("slow").write_text(str(process.pid))
        wait_until(lambda: runs(S), process)
        while process.poll() is None:
            for worker in making(process.pid):
                os.kill(worker, signal.SIGKILL)
        end = ended(process)
    assert end.status == 1
    assert "a Ray worker was lost" in end.complaint
    assert "runs are finished, and the same command goes on from there" in end.complaint
    finished = {name: contents(run) for name, run in runs(S).items()}
    assert 1 <= len(finished) < 6
    Path("slow").unlink()
    assert fedasync("sim", "s.toml").status == 0
    assert len(runs(S)) == 6
    assert {name: contents(run) for name, run in runs(S).items() if name in finished} == finished


def test_no_cluster_at_the_address_is_one_line(fedasync: Command, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study.write_text(LEARNING)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    end = fedasync("sim", "s.toml", "--backend", "ray")
    assert end.status == 1
    assert "no Ray cluster at RAY_ADDRESS = 127.0.0.1:9" in end.complaint


def making(session: int) -> list[int]:
    """Ray's workers of a process group that are at work on runs."""
    listed = subprocess.run(["ps", "-eo", "pid,sid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, sid, args in rows if int(sid) == session and args.startswith("ray::_made")]
