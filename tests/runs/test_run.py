"""A run's folder: written whole, read back byte for byte, and never taken for finished when it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from fedasync.aggregation.model import Model
from fedasync.runs import run as run_module
from fedasync.runs.record import Record
from fedasync.runs.rows import CHUNK
from fedasync.runs.run import Run, write_table
from fedasync.simulation.laws import Exponential
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync, fedbuff
from fedasync.workloads import Quadratic

from .logs import Story, record, table

WORLD = Population(duration_s=Exponential(1.0), dropout_probability=0.1)


@pytest.fixture(scope="module")
def learned() -> Run:
    return simulate(
        fedbuff(concurrency=4, buffer_size=2),
        WORLD,
        Quadratic(5, dimensions=3),
        time_s=20.0,
        evaluate_every_s=1.0,
        target={"distance": 1.0},
        labels={"K": "2"},
    )


@pytest.fixture(scope="module")
def timed() -> Run:
    return simulate(fedasync(concurrency=4), replace(WORLD, clients=5), time_s=20.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_folder_holds_the_files_of_the_contract(learned: Run, timed: Run, tmp_path: Path) -> None:
    learned.save(tmp_path / "a" / "learned")
    timed.save(tmp_path / "timed")
    files = {"config.json", "summary.json", "events.parquet", "metrics.parquet"}
    assert set(contents(tmp_path / "a" / "learned")) == files | {"model.safetensors"}
    assert set(contents(tmp_path / "timed")) == files


def test_a_folder_may_be_named_by_text(timed: Run, tmp_path: Path) -> None:
    timed.save(str(tmp_path / "named"))
    assert Run.load(str(tmp_path / "named")).summary == timed.summary


def test_a_timing_only_run_comes_back_byte_for_byte(timed: Run, tmp_path: Path) -> None:
    timed.save(tmp_path / "one")
    again = Run.load(tmp_path / "one")
    again.save(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert (again.config, again.summary) == (json.loads(json.dumps(timed.config)), timed.summary)
    assert again.events.equals(timed.events)
    assert dict(again.metrics.schema) == dict(timed.metrics.schema)
    assert len(again.metrics) == 0


def test_a_learning_run_comes_back_byte_for_byte(learned: Run, tmp_path: Path) -> None:
    learned.save(tmp_path / "one")
    again = Run.load(tmp_path / "one")
    again.save(tmp_path / "two")
    files = contents(tmp_path / "one")
    copies = contents(tmp_path / "two")
    assert {name: copies.get(name) for name in files if name != "model.safetensors"} == {
        name: content for name, content in files.items() if name != "model.safetensors"
    }
    assert again.events.equals(learned.events)
    assert again.metrics.equals(learned.metrics)
    assert (again.labels, again.seed) == ({"K": "2"}, 0)


def test_the_model_of_a_learning_run_lies_in_its_folder_by_name(learned: Run, tmp_path: Path) -> None:
    learned.save(tmp_path)
    assert learned.model is not None
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], learned.model.values)


def test_a_loaded_learning_run_has_its_model(learned: Run, tmp_path: Path) -> None:
    """None stands for a timing-only run."""
    learned.save(tmp_path)
    model = Run.load(tmp_path).model
    assert model is not None
    assert learned.model is not None
    assert torch.equal(model.values, learned.model.values)


def test_a_model_with_integer_state_and_shapes_is_saved_by_name(learned: Run, tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.ones(2, 3), "bn.num_batches_tracked": torch.tensor(7), "b": torch.zeros(())}
    replace(learned, last_model=Model.from_tensors(tensors)).save(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "fc.weight": ((2, 3), torch.float32),
        "bn.num_batches_tracked": ((), torch.int64),
        "b": ((), torch.float32),
    }


def test_the_summary_has_the_keys_of_the_contract(learned: Run) -> None:
    summary = learned.summary
    assert {
        "run_id",
        "study",
        "seed",
        "labels",
        "strategy",
        "timing_only",
        "time_s",
        "versions",
        "admitted",
        "consumed",
        "ledger",
        "verdicts",
        "staleness",
        "utilisation",
        "targets",
        "final",
        "best",
    } <= summary.keys()
    assert summary["timing_only"] is False
    assert summary["time_s"] == 20.0
    assert summary["admitted"] == summary["ledger"]["admitted"]
    assert sum(summary["staleness"]["histogram"].values()) == summary["consumed"]
    assert {verdict["holds"] for verdict in summary["verdicts"]} == {True}
    assert summary["ledger"]["failed"]["dropout"] > 0


def test_metrics_lie_on_the_grid_from_time_0(learned: Run) -> None:
    distance = learned.metrics.filter(pl.col("name") == "distance")
    assert distance["time_s"].to_list() == [float(t) for t in range(21)]
    assert learned.summary["final"]["distance"] == distance["value"][-1]
    assert distance["version"][-1] == learned.summary["versions"]


@pytest.mark.parametrize("missing", ["summary.json", "config.json"])
def test_an_unfinished_folder_is_refused_in_one_line_that_names_what_is_missing(
    timed: Run, tmp_path: Path, missing: str
) -> None:
    timed.save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match="no finished run here") as refused:
        Run.load(tmp_path)
    assert str(refused.value) == f"{tmp_path}: no finished run here ({missing} is missing)"


def test_a_folder_that_does_not_exist_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished run here"):
        Run.load(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe"])
def test_a_summary_that_is_no_json_is_refused_in_one_line(timed: Run, tmp_path: Path, content: bytes) -> None:
    timed.save(tmp_path)
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(ValueError, match="not readable as a run") as refused:
        Run.load(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_the_summary_is_written_last(timed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    whole = run_module._whole

    def noting(path: Path) -> Any:
        order.append(path.name)
        return whole(path)

    monkeypatch.setattr(run_module, "_whole", noting)
    timed.save(tmp_path)
    assert set(order) == {path.name for path in tmp_path.iterdir()}
    assert order[-1] == "summary.json"
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def interrupt(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    whole = run_module._whole

    def failing(path: Path) -> Any:
        if path.name == file:
            raise OSError("No space left on device")
        return whole(path)

    monkeypatch.setattr(run_module, "_whole", failing)


@pytest.mark.parametrize("file", ["config.json", "events.parquet", "metrics.parquet", "summary.json"])
def test_a_save_that_was_interrupted_leaves_no_finished_run(
    timed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    interrupt(monkeypatch, file)
    with pytest.raises(OSError, match="No space left"):
        timed.save(tmp_path)
    with pytest.raises(ValueError, match="no finished run here"):
        Run.load(tmp_path)


@pytest.mark.parametrize("file", ["events.parquet", "summary.json"])
def test_an_interrupted_save_over_an_older_run_leaves_no_mixture_of_the_two(
    timed: Run, learned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """A summary says that the folder is finished: the old one must not vouch for new files."""
    learned.save(tmp_path)
    interrupt(monkeypatch, file)
    with pytest.raises(OSError, match="No space left"):
        timed.save(tmp_path)
    with pytest.raises(ValueError, match="no finished run here"):
        Run.load(tmp_path)


def test_a_timing_only_run_saved_over_a_learning_one_keeps_no_foreign_model(
    timed: Run, learned: Run, tmp_path: Path
) -> None:
    learned.save(tmp_path)
    timed.save(tmp_path)
    assert "model.safetensors" not in contents(tmp_path)


def test_a_run_that_diverged_can_be_saved_and_read(tmp_path: Path) -> None:
    """Instability is a result: a loss that overflowed must not cost the run its folder."""

    class Exploding(Quadratic):
        def evaluate(self, model: Any) -> dict[str, float]:
            return {"loss": float("inf"), "w": float("nan"), "fine": 1.0}

    run = simulate(fedasync(concurrency=2), WORLD, Exploding(3), time_s=5.0, evaluate_every_s=1.0)
    run.save(tmp_path)
    again = Run.load(tmp_path)
    assert again.summary["final"]["fine"] == 1.0
    assert set(again.summary["final"]) == {"loss", "w", "fine"}
    assert "Infinity" not in (tmp_path / "summary.json").read_text()


def test_the_same_log_has_the_same_bytes_from_a_record_a_table_and_a_folder(timed: Run, tmp_path: Path) -> None:
    """In memory or in a file, of one row group or of several."""
    story = [row for i in range(3) for row in Story(i, steps=20_000).rows]
    files = set()
    logs = [{"record": record(story)}, {"record": record(story, memory=1)}, {"tables": {"events": table(story)}}]
    for i, log in enumerate([*logs, {"folder": tmp_path / "0"}]):
        given = {"record": None, "folder": None, "tables": {}, **log}
        tables = {**given["tables"], "metrics": timed.metrics}
        run = Run({}, timed.summary, tables, record=given["record"], folder=given["folder"])
        run.save(tmp_path / f"{i}")
        files.add((tmp_path / f"{i}" / "events.parquet").read_bytes())
        assert run.events.equals(table(story))
    assert len(files) == 1
    again = Run.load(tmp_path / "0")
    again.save(tmp_path / "0")
    assert (tmp_path / "0" / "events.parquet").read_bytes() in files


def test_a_table_is_written_in_row_groups_of_bounded_size_whatever_pieces_it_comes_in(tmp_path: Path) -> None:
    rows = next(record().chunks())
    long, small = Record(), Record()
    count = CHUNK // len(rows) + 1
    long.write(rows.tobytes() * count)
    for _ in range(count):
        small.write(rows.tobytes())
    for name, made in (("long", long), ("small", small)):
        write_table(tmp_path / name, made.scan())
    assert (tmp_path / "long").read_bytes() == (tmp_path / "small").read_bytes()
    by_group = pl.scan_parquet(tmp_path / "long").select(pl.len()).collect().item()
    assert by_group == count * len(rows) > CHUNK


@pytest.mark.parametrize("query", [lambda t: t, lambda t: t.head(7), lambda t: t.filter(pl.col("lease") < 3)])
def test_a_part_of_the_log_is_read_alike_from_table_record_and_folder(query: Any, timed: Run, tmp_path: Path) -> None:
    timed.save(tmp_path)
    expected = query(timed.events)
    for run in (timed, Run.load(tmp_path), Run({}, {}, {"events": timed.events})):
        assert run.read_events(query).equals(expected)
        assert query(run.scan_events()).collect().equals(expected)


def test_a_log_that_cannot_be_read_is_refused_in_one_line(timed: Run, tmp_path: Path) -> None:
    timed.save(tmp_path)
    (tmp_path / "events.parquet").write_bytes(b"PAR1 is not all there is to it")
    with pytest.raises(ValueError, match=r"events\.parquet cannot be read: ") as refused:
        _ = Run.load(tmp_path).events
    assert "\n" not in str(refused.value)
    (tmp_path / "events.parquet").unlink()
    with pytest.raises(ValueError, match=r"events\.parquet cannot be read: "):
        Run.load(tmp_path).read_events(lambda log: log.head(1))


FULL = """
import resource, sys
from pathlib import Path
import polars as pl
from fedasync.runs.run import write, write_table
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
numbers = pl.LazyFrame({"x": range(1_000_000)}).select(pl.col("x").hash())
for written in (lambda: write_table(folder / "a", numbers), lambda: write(folder / "b", b"b" * 1_000_000)):
    try:
        written()
    except OSError as error:
        print(error.strerror, Path(error.filename).name)
"""


def test_no_room_for_a_file_is_an_error_of_the_system_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large a", "File too large b"]
    assert not list(tmp_path.iterdir())


def test_a_run_without_tables_or_folder_says_so(timed: Run) -> None:
    bare = Run({}, timed.summary)
    with pytest.raises(ValueError, match="this run has no table 'events' and no folder to read it from"):
        _ = bare.events
