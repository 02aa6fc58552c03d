"""Ctrl-C, a killed process, a full disk: one line, nothing half-made, and the same command goes on from there.

What comes out in the end is byte for byte what an undisturbed study writes.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from fedasync.studies import errors

from .running import LEARNING, PROGRAM, TIMING, Command, Ended, changed, contents, moments, runs

S = Path("results/s")

SLOW = (
    changed(LEARNING, ('kind = "quadratic"', 'kind = "own_code.Slow"'), ("seeds = 1", "seeds = 2"))
    + """
[[axis]]
name = "strategy"
points = [
  { label = "FedBuff", strategy = { name = "fedbuff", concurrency = 4, buffer_size = 2 } },
  { label = "FedFa", strategy = { name = "fedfa", concurrency = 4, window = 3 } },
]
"""
)

OWN_STRATEGY = changed(TIMING, ('name = "fedbuff"', 'name = "slow_module.mine"'), ("buffer_size = 2", ""))


@contextmanager
def at_work(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The installed command in a process group of its own, as a shell starts it."""
    with subprocess.Popen(
        [PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 90
    while not happened():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end_s
        time.sleep(0.01)


def ended(process: subprocess.Popen[str]) -> Ended:
    """How it ended, and that it left nobody behind."""
    out, err = process.communicate(timeout=60)
    end_s = time.monotonic() + 20
    while left := alive(process.pid):
        assert time.monotonic() < end_s, left
        time.sleep(0.05)
    return Ended(process.returncode, out, err)


def alive(group: int) -> list[str]:
    """Processes of a group that have not ended (an ended one may wait for its parent to notice)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(stat.parent.name)
    return found


def workers() -> list[int]:
    return [int(path.name.removeprefix("at_work_")) for path in Path().glob("at_work_*")]


def goes_on(fedasync: Command, finished: dict[str, int]) -> None:
    """The same command makes what is missing, nothing else, and ends with the bytes of an undisturbed study."""
    assert not [name for name in contents(S) if "partial" in name]
    Path("slow").unlink()
    end = fedasync("sim", "s.toml")
    assert (end.status, end.err) == (0, "")
    assert finished.items() <= moments(S).items()
    disturbed = contents(S)
    assert fedasync("sim", "s.toml", "--out", "undisturbed").status == 0
    undisturbed = contents(Path("undisturbed"))
    assert disturbed == undisturbed
    assert {"events.parquet", "metrics.parquet", "summary.json", "table.csv"} <= {Path(n).name for n in disturbed}


@pytest.mark.parametrize(("jobs", "finished"), [("1", 1), ("2", 0)])
def test_ctrl_c_while_runs_are_made(fedasync: Command, study: Path, jobs: str, finished: int) -> None:
    study.write_text(SLOW)
    Path("slow").touch()
    with at_work("sim", "s.toml", "--jobs", jobs) as process:
        wait_until(lambda: workers() and len(runs(S)) == finished, process)
        os.killpg(process.pid, signal.SIGINT)
        end = ended(process)
    assert end.status == 130
    done = moments(S)
    assert len(runs(S)) == finished
    assert end.complaint == (
        f"fedasync: interrupted; {finished} of 4 runs are finished, and the same command goes on from there"
    )
    goes_on(fedasync, done)
    assert len(runs(S)) == 4
    assert all((run / "model.safetensors").is_file() for run in runs(S).values())


def test_a_killed_worker_ends_the_study_and_not_its_finished_runs(fedasync: Command, study: Path) -> None:
    study.write_text(changed(OWN_STRATEGY, ("seeds = 1", "seeds = 8")))
    with at_work("sim", "s.toml", "--jobs", "2") as process:
        Path("slow").write_text(str(process.pid))
        wait_until(lambda: workers() and runs(S), process)
        os.kill(workers()[0], signal.SIGKILL)
        end = ended(process)
    assert end.status == 1
    assert "a process that made a run was killed" in end.complaint
    done = moments(S)
    assert f"{len(runs(S))} of 8 runs are finished, and the same command goes on from there" in end.complaint
    goes_on(fedasync, done)


@pytest.mark.parametrize("who", ["{}", "children of {}"])
def test_ctrl_c_while_modules_are_imported(folder: Path, study: Path, who: str) -> None:
    study.write_text(OWN_STRATEGY)
    with at_work("sim", "s.toml", "--jobs", "2", "--seeds", "4") as process:
        Path("slow_importers").write_text(who.format(process.pid))
        wait_until(lambda: list(Path().glob("importing_*")), process)
        os.killpg(process.pid, signal.SIGINT)
        end = ended(process)
    assert end.status == 130
    assert end.complaint.startswith("fedasync: interrupted; ")
    assert end.complaint.endswith("the same command goes on from there")
    assert not runs(S)


def test_ctrl_c_inside_pydantic_is_not_lost(fedasync: Command, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised inside its core, the interrupt would be printed and forgotten, or come out as a SchemaError."""
    built = []

    def adapter(target: object) -> TypeAdapter[object]:
        signal.raise_signal(signal.SIGINT)
        built.append(target)
        return TypeAdapter(target)

    study.write_text(TIMING)
    errors._adapter.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("fedasync.studies.errors.TypeAdapter", adapter)
        end = fedasync("sim", "s.toml")
    assert len(built) == 1
    assert (end.status, end.complaint) == (130, "fedasync: interrupted; the same command goes on from there")
    assert fedasync("sim", "s.toml").status == 0


def test_ctrl_c_between_two_outcomes(fedasync: Command, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    study.write_text(TIMING)
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", interrupted)
        for jobs in ("1", "2"):
            end = fedasync("sim", str(study), "--jobs", jobs, "--seeds", "6", "--out", str(study.parent / jobs))
            assert end.status == 130
            assert " of 6 runs are finished, and the same command goes on from there" in end.complaint
    end = fedasync("sim", str(study), "--seeds", "6", "--out", str(study.parent / "1"))
    assert "1 finished before" in end.out
    assert (end.status, end.err) == (0, "")


def test_ctrl_c_while_figures_are_drawn(fedasync: Command, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    study.write_text(TIMING)
    with monkeypatch.context() as patch:
        patch.setattr("fedasync.studies.command.publish", interrupted)
        end = fedasync("sim", "s.toml")
        assert end.status == 130
        assert end.complaint.startswith("fedasync: interrupted; 1 of 1 runs are finished, and the same command")
        end = fedasync("plot", "results/s")
        assert (end.status, end.complaint) == (
            130,
            "fedasync: interrupted; the same command goes on from there",
        )
    assert fedasync("sim", "s.toml").status == 0


@pytest.mark.parametrize("written", [0, 1, 9, 12, 21])
def test_a_full_disk(fedasync: Command, study: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    """Full after a number of files: before the first run, within one, between two, in the table."""
    study.write_text(TIMING)
    sync, left = os.fsync, [written]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        end = fedasync("sim", "s.toml", "--seeds", "4")
    assert end.status == 1
    assert end.complaint.startswith("fedasync: No space left on device")
    finished = runs(S)
    assert len(finished) == max(0, written - 1) // 5
    if written:
        assert f"{len(finished)} of 4 runs are finished, and the same command goes on from there" in end.complaint
    assert not [name for name in contents(S) if name.startswith("runs/") and "partial" in name]
    assert all(len(list(run.iterdir())) == 5 for run in finished.values())
    before = moments(S)
    assert fedasync("sim", "s.toml", "--seeds", "4").status == 0
    assert before.items() <= moments(S).items()
    disturbed = contents(S)
    assert fedasync("sim", "s.toml", "--seeds", "4", "--out", "undisturbed").status == 0
    assert disturbed == contents(Path("undisturbed"))


def test_a_disk_that_takes_no_large_files_with_two_processes(folder: Path, study: Path) -> None:
    study.write_text(changed(TIMING, ("updates = 40", "updates = 4000")))
    command = f"ulimit -f 8; exec {PROGRAM} sim s.toml --jobs 2 --seeds 4"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=90)
    end = Ended(done.returncode, done.stdout, done.stderr)
    assert end.status == 1
    assert end.complaint.startswith("fedasync: File too large: results/s")
    assert "; 0 of 4 runs are finished, and the same command goes on from there" in end.complaint
    assert [name for name in contents(S) if name.startswith("runs/")] == []
