"""Runs as a simulation would leave them, made by a plain heap loop: valid logs without a simulator."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from fedasync.runs.run import Run

SCHEMA = {
    "time_s": pl.Float64,
    "kind": pl.String,
    "lease": pl.Int64,
    "worker": pl.Int64,
    "base_version": pl.Int64,
    "version": pl.Int64,
    "staleness": pl.Int64,
    "reason": pl.String,
}
METRICS = {"time_s": pl.Float64, "version": pl.Int64, "name": pl.String, "value": pl.Float64}


@dataclass
class Log:
    """Rows of events.parquet as they happen, and the counters of the ledger."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    base: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    ended: dict[int, tuple[str, float]] = field(default_factory=dict)
    reasons: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in ("rejected", "failed", "cancelled")}
    )
    version: int = 0

    def admit(self, now: float, lease: int, worker: int) -> None:
        self.base[lease] = (worker, self.version, now)
        self.rows.append((now, "admitted", lease, worker, self.version, self.version, None, None))

    def end(self, now: float, kind: str, lease: int, reason: str | None = None) -> None:
        worker, base, _ = self.base[lease]
        staleness = self.version - base if kind in ("delivered", "consumed", "rejected") else None
        self.rows.append((now, kind, lease, worker, base, self.version, staleness, reason))
        self.ended[lease] = (kind, self.ended.get(lease, ("", now))[1])
        if reason is not None:
            self.reasons[kind][reason] += 1

    def step(self, now: float, leases: list[int]) -> None:
        for lease in leases:
            self.end(now, "consumed", lease)
        self.version += 1
        for kind in ("committed", "published"):
            self.rows.append((now, kind, None, None, None, self.version, None, None))


def durations(seed: int, clients: int, tail: float) -> tuple[np.ndarray, np.random.Generator]:
    """Seconds a lease takes each client in the mean (lognormal of sigma ``tail``), and a stream for the rest."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(0.0, tail, clients)), rng


def cohort(
    *,
    seed: int = 0,
    clients: int = 100,
    start: int = 13,
    keep: int = 10,
    tail: float = 0.7,
    end_s: float = 120.0,
    **about: Any,
) -> Run:
    """Synchronous rounds that start ``start`` clients and keep the first ``keep``; the others are cancelled."""
    means, rng = durations(seed, clients, tail)
    log, now, lease = Log(), 0.0, 0
    while now < end_s:
        chosen = rng.choice(clients, start, replace=False)
        due = []
        for worker in chosen.tolist():
            log.admit(now, lease, worker)
            due.append((now + means[worker] * rng.uniform(0.8, 1.2), lease))
            lease += 1
        due.sort()
        if due[keep - 1][0] >= end_s:
            for time, item in due[:keep]:
                if time < end_s:
                    log.end(time, "delivered", item)
            break
        for time, item in due[:keep]:
            log.end(time, "delivered", item)
        now = due[keep - 1][0]
        log.step(now, [item for _, item in due[:keep]])
        for _, item in due[keep:]:
            log.end(now, "cancelled", item, "over-selected")
    return finished(log, seed=seed, slots=start, end_s=end_s, strategy="fedavg", **about)


def asynchronous(
    *,
    seed: int = 0,
    clients: int = 100,
    concurrency: int = 13,
    buffer: int = 10,
    tail: float = 0.7,
    end_s: float = 120.0,
    failing: float = 0.03,
    most_stale: int | None = None,
    strategy: str = "fedbuff",
    **about: Any,
) -> Run:
    """``concurrency`` clients at a time; every ``buffer`` deliveries make a version."""
    means, rng = durations(seed, clients, tail)
    log, lease = Log(), 0
    heap: list[tuple[float, int]] = []
    idle = rng.permutation(clients).tolist()
    waiting: list[int] = []

    def dispatch(now: float) -> None:
        nonlocal lease
        worker = idle.pop(int(rng.integers(len(idle))))
        log.admit(now, lease, worker)
        heapq.heappush(heap, (now + means[worker] * rng.uniform(0.8, 1.2), lease))
        lease += 1

    for _ in range(concurrency):
        dispatch(0.0)
    while heap and heap[0][0] < end_s:
        now, item = heapq.heappop(heap)
        worker, base, _ = log.base[item]
        idle.append(worker)
        if rng.random() < failing:
            log.end(now, "failed", item, "lost")
        elif most_stale is not None and log.version - base > most_stale:
            log.end(now, "rejected", item, "too stale")
        else:
            log.end(now, "delivered", item)
            waiting.append(item)
            if len(waiting) == buffer:
                log.step(now, waiting)
                waiting = []
        dispatch(now)
    return finished(log, seed=seed, slots=concurrency, end_s=end_s, strategy=strategy, **about)


def finished(
    log: Log,
    *,
    seed: int,
    slots: int,
    end_s: float,
    strategy: str,
    labels: dict[str, str] | None = None,
    targets: tuple[float, ...] = (0.8,),
    timing_only: bool = False,
    gain: float = 1.0,
    server: float = 0.02,
) -> Run:
    """Close a log into a run: a learning curve that grows with what was consumed, and its summary."""
    events = pl.DataFrame(log.rows, schema=SCHEMA, orient="row")
    consumed = events.filter(pl.col("kind") == "consumed")
    counts = dict(consumed.group_by("staleness").len().sort("staleness").iter_rows())
    curve = [] if timing_only else accuracy(events, seed, end_s, gain)
    outcomes = Counter(kind for kind, _ in log.ended.values())
    busy = {"useful": 0.0, "wasted": 0.0}
    for lease, (_, _, begun) in log.base.items():
        kind, stopped = log.ended.get(lease, ("in flight", end_s))
        busy["wasted" if kind in log.reasons else "useful"] += (stopped - begun) / (slots * end_s)
    stale = consumed["staleness"].to_numpy()
    summary = {
        "run_id": f"{strategy}-{seed}",
        "study": "synthetic",
        "seed": seed,
        "labels": labels or {},
        "strategy": strategy,
        "timing_only": timing_only,
        "time_s": end_s,
        "versions": log.version,
        "admitted": len(log.base),
        "consumed": outcomes["consumed"],
        "ledger": {
            "admitted": len(log.base),
            "in_flight": len(log.base) - len(log.ended),
            "buffered": outcomes["delivered"],
            "consumed": outcomes["consumed"],
            **{kind: dict(reasons) for kind, reasons in log.reasons.items()},
            "ignored": 0,
        },
        "verdicts": [],
        "staleness": {
            "mean": float(stale.mean()) if stale.size else None,
            "p50": float(np.quantile(stale, 0.5)) if stale.size else None,
            "p90": float(np.quantile(stale, 0.9)) if stale.size else None,
            "max": int(stale.max()) if stale.size else None,
            "histogram": {str(tau): n for tau, n in counts.items()},
        },
        "utilisation": {
            "useful": busy["useful"],
            "wasted": busy["wasted"],
            "waiting": 1 - busy["useful"] - busy["wasted"],
            "server": server,
        },
        "targets": [] if timing_only else [reached(curve, consumed, level) for level in targets],
        "final": {"accuracy": curve[-1][3]} if curve else {},
        "best": {"accuracy": max(row[3] for row in curve)} if curve else {},
    }
    metrics = pl.DataFrame(curve, schema=METRICS, orient="row")
    return Run({}, summary, {"events": events, "metrics": metrics})


def accuracy(events: pl.DataFrame, seed: int, end_s: float, gain: float) -> list[tuple[float, int, str, float]]:
    """Evaluations every end_s / 60: saturating in consumed contributions, each discounted by its staleness."""
    rng = np.random.default_rng(seed + 1000)
    consumed = events.filter(pl.col("kind") == "consumed")
    weight = np.cumsum(1 / np.sqrt(1 + consumed["staleness"].to_numpy()))
    committed = events.filter(pl.col("kind") == "committed")["time_s"].to_numpy()
    rows = []
    for time in np.linspace(0.0, end_s, 61):
        done = int(np.searchsorted(consumed["time_s"].to_numpy(), time, side="right"))
        learnt = gain * float(weight[done - 1]) if done else 0.0
        value = 0.1 + 0.8 * (1 - np.exp(-learnt / 120)) + rng.normal(0, 0.008)
        version = int(np.searchsorted(committed, time, side="right"))
        rows.append((float(time), version, "accuracy", float(np.clip(value, 0, 1))))
    return rows


def reached(
    curve: list[tuple[float, int, str, float]], consumed: pl.DataFrame, level: float
) -> dict[str, float | int | str | None]:
    """The target's entry in the summary: the first evaluation at or above the level."""
    time = next((row[0] for row in curve if row[3] >= level), None)
    updates = None if time is None else consumed.filter(pl.col("time_s") <= time).height
    return {"metric": "accuracy", "value": level, "reached_s": time, "reached_updates": updates}
