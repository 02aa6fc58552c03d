"""A run is made once: the same bytes for any number of processes, and again only when the question changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedasync.studies import store

from .running import LEARNING, STRATEGIES, TIMING, Command, changed, contents, moments, runs

S = Path("results/s")

DIGITS = changed(LEARNING, ('"quadratic"', '"digits"\nhidden = 4\nlocal = { epochs = 1, batch_size = 64 }'))


def test_one_process_and_two_write_the_same_bytes(fedasync: Command, study: Path, tmp_path: Path) -> None:
    study.write_text(DIGITS + STRATEGIES)
    for jobs in ("1", "2"):
        end = fedasync("sim", str(study), "--jobs", jobs, "--out", str(tmp_path / jobs))
        assert (end.status, end.err) == (0, "")
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert len(runs(tmp_path / "1")) == 5
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
    assert {"events.parquet", "metrics.parquet", "model.safetensors", "summary.json", "table.csv"} <= {
        Path(name).name for name in one
    }


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_finished_runs_are_not_made_again(fedasync: Command, study: Path, jobs: str) -> None:
    study.write_text(TIMING + STRATEGIES)
    assert "5 runs, none finished before" in fedasync("sim", "s.toml").out
    before, files = moments(S), contents(S)
    end = fedasync("sim", "s.toml", "--jobs", jobs)
    assert end.status == 0
    assert "5 runs, 5 finished before" in end.out
    assert moments(S) == before
    assert contents(S) == files


def test_what_does_not_concern_the_runs_makes_none_again(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    fedasync("sim", "s.toml")
    before = moments(S)
    study.write_text(changed(TIMING, ('"small"', '"other"'), ("figures = []", 'figures = ["staleness"]')))
    assert "1 finished before" in fedasync("sim", "s.toml").out
    assert moments(S) == before
    assert (S / "figures/staleness.png").is_file()


def test_more_seeds_keep_the_runs_that_are_there(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    fedasync("sim", "s.toml", "--seeds", "2")
    before = moments(S)
    assert "4 runs, 2 finished before" in fedasync("sim", "s.toml", "--seeds", "4").out
    assert len(runs(S)) == 4
    assert before.items() <= moments(S).items()
    assert "2 runs, 2 finished before" in fedasync("sim", "s.toml", "--seeds", "2").out


def test_a_changed_key_makes_new_runs_beside_the_old_ones(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    fedasync("sim", "s.toml")
    before = moments(S)
    for change in ("run.updates=42", "population.duration_s.mean=11", "strategy.buffer_size=3"):
        end = fedasync("sim", "s.toml", "--set", change)
        assert "none finished before" in end.out
    assert len(runs(S)) == 4
    assert before.items() <= moments(S).items()
    assert "1 finished before" in fedasync("sim", "s.toml").out


def test_another_measurement_in_a_file_makes_new_runs(fedasync: Command, study: Path) -> None:
    law = '{ kind = "exponential", mean = 10.0 }'
    study.write_text(changed(TIMING, (law, '{ kind = "empirical", file = "d.csv", column = "s" }')))
    Path("d.csv").write_text("s\n1\n2\n3\n")
    fedasync("sim", "s.toml")
    assert "1 finished before" in fedasync("sim", "s.toml").out
    Path("d.csv").write_text("s\n1\n2\n4\n")
    assert "none finished before" in fedasync("sim", "s.toml").out
    assert len(runs(S)) == 2


def test_another_line_in_a_users_source_makes_new_runs(fedasync: Command, study: Path) -> None:
    workload, strategy = ('kind = "quadratic"', 'kind = "own_code.Steps"'), ('"fedbuff"', '"own_code.median"')
    study.write_text(changed(LEARNING, workload, strategy))
    fedasync("sim", "s.toml")
    assert "1 finished before" in fedasync("sim", "s.toml").out
    Path("own_code.py").write_text(Path("own_code.py").read_text() + "# other\n")
    assert "none finished before" in fedasync("sim", "s.toml").out
    assert len(runs(S)) == 2


def test_half_a_run_is_made_again_and_swept_away(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    fedasync("sim", "s.toml")
    ((name, run),) = runs(S).items()
    whole = contents(run)
    (run / "summary.json").unlink()
    shutil.copytree(run, run.with_name(f".{name}.123.partial"))
    run.with_name(f".{name}.error.log.partial").write_text("half a trace")
    assert "none finished before" in fedasync("sim", "s.toml").out
    assert contents(run) == whole
    assert [path.name for path in (S / "runs").iterdir()] == [name]


def test_a_changed_file_in_a_folder_of_data_is_another_input(tmp_path: Path) -> None:
    """A workload's ``path`` may be a folder: its files' names and contents are part of the question."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(b"one")
    config = {"workload": {"kind": "x", "path": str(tmp_path / "data")}}
    first = store.inputs(config)
    assert store.inputs(config) == first
    (tmp_path / "data" / "a.bin").rename(tmp_path / "data" / "b.bin")
    renamed = store.inputs(config)
    (tmp_path / "data" / "b.bin").write_bytes(b"another")
    assert len({str(found) for found in (first, renamed, store.inputs(config))}) == 3
