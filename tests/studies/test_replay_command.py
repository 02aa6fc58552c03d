"""``fedasync replay``: what a deployment and a simulation left is made again, and what was changed is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fedasync.aggregation.model import Model
from fedasync.core import Coordinator
from fedasync.federated.arrays import Arrays
from fedasync.federated.journal import Journal
from fedasync.runs.rows import frame
from fedasync.runs.run import Run
from fedasync.simulation import simulate
from fedasync.studies.build import build_federated, build_strategy, build_workload
from fedasync.studies.errors import StudyError
from fedasync.studies.replay_command import replay_run

CONFIG: dict[str, Any] = {
    "strategy": {"name": "fedbuff", "concurrency": 3, "buffer_size": 2},
    "workload": {"kind": "quadratic", "clients": 4, "dimensions": 3},
    "run": {"versions": 5},
    "deployment": {"task_timeout_s": 2.0},
    "seed": 4,
}


def deploy(folder: Path, *, end: bool = True) -> Run:
    """What a deployment leaves: its journal, and, if it came to its end, the tables of a run."""
    from dataclasses import replace

    strategy = replace(build_strategy(CONFIG, "here"), lease_timeout_s=2.0)
    make = build_workload(CONFIG, "here")
    assert make is not None
    workload = make()
    arrays, journal, now = Arrays(strategy, workload, 4), Journal(folder), 0.0
    coordinator = Coordinator(strategy, journal.log)
    waiting: list[Any] = []
    while coordinator.version < 5:
        for worker in range(4):
            if coordinator.admits and (lease := coordinator.request(worker, now)):
                arrays.lease(lease)
                waiting.append(lease)
        lease, now = waiting.pop(0), now + 0.5
        if lease.id % 5 == 3:
            now += 2.0
            journal.rung(now)
            for event in coordinator.on_timer(now):
                waiting = [each for each in waiting if each != event.lease]  # type: ignore[union-attr]
                arrays.forget(event.lease.id)  # type: ignore[union-attr]
        else:
            found = workload.train(arrays.task(lease, 0))
            journal.keep_contribution(lease.id, found)
            assert arrays.receive(lease.id, found) is None
            coordinator.deliver(lease.id, now)
        if coordinator.step is not None:
            arrays.apply(coordinator.step)
            journal.version(coordinator.version + 1, arrays.server.model)
            coordinator.commit(now)
            arrays.publish()
        journal.sync()
    record = journal.record()
    journal.close()
    run = Run(CONFIG, {"ended": "versions"}, {"metrics": pl.DataFrame()}, arrays.server.model, record=record)
    if end:
        run.save(folder)
    else:
        (folder / "config.json").write_text(json.dumps(CONFIG))
    return run


def test_a_deployment_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(tmp_path)
    assert replay_run(tmp_path) == 0
    out = capsys.readouterr().out
    assert "strategy fedbuff: " in out
    assert "5 versions" in out
    assert "rows: the core does every one again\n" in out
    assert "versions: 5 of 5 have the bits that were noted" in out
    assert "model: version 5 is model.safetensors, bit for bit" in out


def test_so_is_one_that_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(tmp_path, end=False)
    path = tmp_path / "events.bin"
    os.truncate(path, path.stat().st_size - 60)
    assert replay_run(tmp_path) == 0
    assert "(the run did not end)" in capsys.readouterr().out


def difference(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert replay_run(folder) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_missing_and_a_damaged_contribution_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(tmp_path)
    path = tmp_path / "contributions" / "2.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 4]) + content[-2:])
    line = difference(tmp_path, capsys)
    assert ": recorded delivered (lease 2, worker 2, base version 0" in line
    assert "2.safetensors: damaged: its checksum is not that of what it holds" in line
    path.unlink()
    assert "the contribution of lease 2 is missing" in difference(tmp_path, capsys)


def test_another_model_and_another_version_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deploy(tmp_path)
    assert run.model is not None
    values = run.model.values.clone()
    values[0] = torch.nextafter(values[0], torch.tensor(9.0, dtype=values.dtype))
    (tmp_path / "model.safetensors").write_bytes(Model(values, run.model.layout).to_bytes())
    assert "model.safetensors: other bits than version 5 has" in difference(tmp_path, capsys)
    path = tmp_path / "versions.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps({"version": 2, "sha256": "0"}), *lines[2:]]) + "\n")
    line = difference(tmp_path, capsys)
    assert "version 2 has other bits than were noted" in line
    assert "row " in line


def test_a_changed_row_is_told_in_the_journal_and_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = deploy(tmp_path)
    table = run.events.with_columns(version=pl.when(pl.int_range(pl.len()) == 7).then(9).otherwise(pl.col("version")))
    table.write_parquet(tmp_path / "events.parquet")
    line = difference(tmp_path, capsys)
    assert ": row 7: events.parquet has " in line
    assert "version 9, " in line.partition("; the journal has ")[0]
    (tmp_path / "events.bin").unlink()
    assert "row 7: recorded " in difference(tmp_path, capsys)


SIMULATED: dict[str, Any] = {
    "strategy": {"name": "fedat", "tiers": 2, "cohort": 2},
    "workload": {"kind": "quadratic", "clients": 6},
    "population": {
        "duration_s": {"kind": "exponential", "mean": 1.0},
        "slowness": {"kind": "uniform", "low": 1, "high": 3},
    },
    "run": {"updates": 30},
    "seed": 2,
}


def test_a_simulated_run_is_compared_by_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = build_federated(SIMULATED, "here")
    assert parts.workload is not None
    run = simulate(parts.strategy, parts.population, parts.workload(), parts.settings, seed=2, config=SIMULATED)
    run.save(tmp_path)
    ends = run.events["kind"].to_list().index("admitted", run.events["kind"].to_list().index("published", 60))
    assert replay_run(tmp_path) == 0
    out = capsys.readouterr().out
    assert "rows: the core does every one again\n" in out
    assert "versions: not made again, since no contributions were kept" in out
    for lost, words in ((1, "recorded no more; the core did published"), (0, "summary.json has ledger")):
        run.events.head(ends - lost).write_parquet(tmp_path / "events.parquet")
        assert words in difference(tmp_path, capsys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config.json": None}, "no run here"),
        ({"config.json": "{"}, r"config\.json: not readable"),
        ({"events.bin": None, "events.parquet": None}, "no log here"),
        ({"reasons.json": "["}, r"reasons\.json: not readable"),
        ({"config.json": json.dumps({**CONFIG, "deployment": {"record": "tail"}})}, "record = 'all' would do"),
        ({"config.json": json.dumps({**CONFIG, "strategy": {"name": "none"}})}, "strategy.name: unknown name 'none'"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    deploy(tmp_path)
    for name, content in change.items():
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(StudyError, match=words) as told:
        replay_run(tmp_path)
    assert "\n" not in str(told.value)


def test_the_table_of_a_record_is_that_of_its_journal(tmp_path: Path) -> None:
    run = deploy(tmp_path)
    assert run.record is not None
    assert pl.concat([frame(rows, run.record.reasons) for rows in run.record.chunks()]).equals(run.events)
