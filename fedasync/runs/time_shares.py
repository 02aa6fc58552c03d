"""What trainer and servers spend their time on: one vocabulary for simulated and real runs on prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

TRAINER = {
    "training": ("train_s", "lost_s"),
    "syncing": ("sync_s",),
    "switching": ("switch_s",),
    "saving": ("save_s",),
    "evaluating": ("evaluate_s", "measure_s"),
    "waiting": ("wait_s",),
    "down": ("down_s",),
}
"""What the trainer is at, always one of these, and the metrics of a step that say how long (docs/log.md)."""

SERVERS = ("decoding", "prefilling", "paused", "down", "idle")
"""What a server is at, always one of these.

decoding: an answer runs on it, which has begun, and neither ended nor gone to a tool; a round of the server between two
decoding steps is part of it. prefilling: it computes prompts, or a KV cache anew. paused: it stands still, until it has
new weights, or while its GPUs train. down: it is not there. idle: nothing runs on it.
"""

Shares = dict[str, dict[str, float | None]]


def measured_s(metrics: pl.DataFrame, warm_up_versions: int = 0) -> tuple[float, float] | None:
    """What is measured, in seconds: from the last commit of the warm-up (or time 0) to the last commit of the run.

    ``metrics`` are those of steps. None where no version came after the warm-up.
    """
    import polars as pl

    commits = metrics.filter(pl.col("name") == "step_s")
    late = commits.filter(pl.col("version") > warm_up_versions)
    if late.is_empty():
        return None
    to_s = float(late["time_s"].to_numpy().max())
    return to_s - float(late["value"].sum()), to_s


def time_shares(
    metrics: pl.DataFrame, servers_s: Mapping[str, float], servers: int, warm_up_versions: int = 0
) -> Shares:
    """``trainer``: shares of its time, by `TRAINER`; ``servers``: shares of servers × time, by `SERVERS`.

    Both are of `measured_s`, and add up to 1. ``servers_s`` are seconds of all servers together in that time, without
    ``idle``, which is the rest. All are None where nothing is measured, or took no time.
    """
    import polars as pl

    span = measured_s(metrics, warm_up_versions)
    if span is None or span[1] <= span[0] or not servers:
        return {"trainer": dict.fromkeys(TRAINER), "servers": dict.fromkeys(SERVERS)}
    whole_s = span[1] - span[0]
    late = metrics.filter(pl.col("version") > warm_up_versions)
    spent = {name: float(value) for name, value in late.group_by("name").agg(pl.col("value").sum()).iter_rows()}
    trainer: dict[str, float | None] = {
        what: sum(spent.get(name, 0.0) for name in names) / whole_s for what, names in TRAINER.items()
    }
    at_work = {what: servers_s.get(what, 0.0) / (whole_s * servers) for what in SERVERS[:-1]}
    return {"trainer": trainer, "servers": {**at_work, "idle": max(0.0, 1.0 - sum(at_work.values()))}}
