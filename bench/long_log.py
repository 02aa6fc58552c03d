"""A long log audited, saved and published: CPU-seconds and the most memory, stage by stage.

    python bench/long_log.py --completions 10000000 --in-flight 100000 --out long_log.json

The log is that of FedBuff, K = 10, on exponential durations, made by sorting instead of simulating, in a process of
its own; ten million completions are 32 million rows, 1.3 GB of them in a file while they are looked at.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from fedasync.core.log import ADMITTED, COMMITTED, CONSUMED, DELIVERED, PUBLISHED
from fedasync.runs.record import Record
from fedasync.runs.rows import ROW, Rows
from fedasync.runs.run import Run
from fedasync.runs.summary import told_by_the_log
from fedasync.studies.publish import publish
from fedasync.studies.store import keep

K = 10
MEAN_S = 100.0
WRITTEN = 4096 * ROW.itemsize
"""Bytes that an event log hands over at a time."""


def write_log(path: Path, completions: int, slots: int) -> None:
    """Packed rows of ``completions`` (a multiple of K) in ``slots`` slots; each slot's next lease follows at once."""
    rng = np.random.default_rng(0)
    each = int(completions / slots + 6 * (completions / slots) ** 0.5) + 6  # what the fastest slot may need
    ends = np.cumsum(rng.exponential(MEAN_S, (slots, each)), axis=1).ravel()
    order = np.argsort(ends)[:completions]
    rank = np.zeros(slots * each, np.int64)
    rank[order] = np.arange(completions)
    # Leases are numbered as they are given out: first one a slot, then one for each that ends, in its place.
    lease = np.where(order % each == 0, order // each, slots + rank[order - 1])
    base = np.append(np.zeros(slots, np.int32), np.arange(1, completions + 1, dtype=np.int32) // K)
    with path.open("wb") as file:
        first = np.full(slots, -1, ROW)
        for name, value in (("time_s", 0), ("kind", ADMITTED), ("lease", np.arange(slots)), ("version", 0)):
            first[name] = value
        first["base_version"], first["worker"] = 0, first["lease"]
        file.write(first.tobytes())
        for at in range(0, completions, 20_000 * K):
            here = slice(at, min(at + 20_000 * K, completions))
            file.write(_steps(ends[order[here]], lease[here], base, slots + at, at // K).tobytes())


def _steps(ends: np.ndarray, lease: np.ndarray, base: np.ndarray, given: int, version: int) -> Rows:
    """The rows of some steps: K leases end, each is followed at once, the last one after the step."""
    rows = np.full((len(lease) // K, 3 * K + 2), -1, ROW)
    times, old = ends.reshape(-1, K), lease.reshape(-1, K)
    new = given + np.arange(len(lease)).reshape(-1, K)
    now = version + np.arange(len(rows))[:, None]
    delivered = [*range(0, 2 * K - 2, 2), 2 * K - 2]
    admitted = [*range(1, 2 * K - 2, 2), 3 * K + 1]
    consumed = [*range(2 * K - 1, 3 * K - 1)]
    for columns, kind, number, when in (
        (delivered, DELIVERED, old, times),
        (admitted, ADMITTED, new, times),
        (consumed, CONSUMED, old, times[:, -1:]),
    ):
        rows["time_s"][:, columns] = when
        rows["kind"][:, columns] = kind
        rows["lease"][:, columns] = rows["worker"][:, columns] = number
        rows["base_version"][:, columns] = base[number]
        rows["version"][:, columns] = base[number] if kind == ADMITTED else now
        if kind != ADMITTED:
            rows["staleness"][:, columns] = now - base[number]
    for column, kind in ((3 * K - 1, COMMITTED), (3 * K, PUBLISHED)):
        rows["time_s"][:, column] = times[:, -1]
        rows["kind"][:, column] = kind
        rows["version"][:, column] = now[:, 0] + 1
    return rows.ravel()


def measured(log: Path, slots: int, folder: Path) -> list[dict[str, Any]]:
    """Stages with their CPU-seconds and the most memory until their end (MB, of the whole process)."""
    stages: list[dict[str, Any]] = []

    def stage(name: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = call()
        used = time.process_time() - start
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        stages.append({"stage": name, "cpu_s": round(used, 2), "peak_mb": round(most)})
        return found

    record, metrics = Record(), pl.DataFrame(schema={"name": pl.String, "value": pl.Float64, "time_s": pl.Float64})
    stage("start", lambda: None)
    stage("write", lambda: _fill(record, log))
    completions = (len(record) - slots) // (3 * K + 2) * K
    end_s = float(np.fromfile(log, ROW, offset=(len(record) - 1) * ROW.itemsize)["time_s"][0])
    lost: dict[str, Any] = {"rejected": {}, "failed": {}, "cancelled": {}}
    ledger = {"admitted": slots + completions, "in_flight": slots, "buffered": 0, "consumed": completions, **lost}
    told = stage("audit", lambda: told_by_the_log(record.chunks(), ledger, metrics, end_s=end_s, slots=slots))
    assert all(verdict["holds"] for verdict in told["verdicts"]), told["verdicts"]
    counts = {"versions": completions // K, "admitted": slots + completions, "consumed": completions}
    about = {"run_id": "long", "seed": 0, "labels": {}, "strategy": "fedbuff", "timing_only": True, "time_s": end_s}
    summary = {**about, **counts, "ledger": ledger, **told, "final": {}, "best": {}, "closed_forms": []}
    run = Run({"strategy": {"name": "fedbuff"}}, summary, {"metrics": metrics}, record=record)
    stage("save", lambda: run.save(folder / "runs" / "saved"))
    stage("save and trace", lambda: keep(run, folder / "runs" / "long"))
    description = {"runs": ["long"], "report": {}, "command": "", "title": ""}
    stage("publish", lambda: publish(folder, description))
    return stages


def _fill(record: Record, log: Path) -> None:
    with log.open("rb") as file:
        while packed := file.read(WRITTEN):
            record.write(packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        whole = options.completions // K * K
        making = get_context("spawn").Process(target=write_log, args=(log, whole, options.in_flight))
        making.start()
        making.join()
        stages = measured(log, options.in_flight, Path(folder) / "study")
    table = Table("stage", "CPU-s", "µs a completion", "peak RSS (MB)")
    for one in stages:
        table.add_row(one["stage"], f"{one['cpu_s']:.2f}", f"{one['cpu_s'] / whole * 1e6:.2f}", f"{one['peak_mb']}")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.out:
        options.out.write_text(json.dumps({"completions": whole, "stages": stages}, indent=1) + "\n")


if __name__ == "__main__":
    main()
