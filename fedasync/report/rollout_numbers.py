"""What runs on prompts are compared by, real ones and simulated ones alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedasync.report.cluster import share_of_time, throughput
from fedasync.runs.run import Run

STEP, RATE, TRAINER, SERVERS, STALENESS = (
    "step time",
    "answer tokens a second",
    "trainer idle",
    "servers idle",
    "mean staleness",
)
UNITS = {STEP: "s", RATE: "1/s", TRAINER: "share", SERVERS: "share", STALENESS: "versions"}


def workers_of(processes: Mapping[str, Any]) -> int:
    """Rollout workers that a ``[processes]`` table asks for, those of other machines among them."""
    return int(processes.get("workers", 1)) + int(processes.get("remote_workers", 0))


def servers_of(run: Run) -> int:
    """Rollout workers of a real run, or servers of a simulated one."""
    config = run.config
    if "processes" in config:
        return workers_of(config["processes"])
    cluster = config.get("cluster") or {}
    return int(cluster.get("generation_gpus", 1)) // int(cluster.get("tensor_parallel", 1))


def numbers(run: Run) -> dict[str, float | None]:
    """By name, after the run's warm-up; None where it measured nothing.

    ``trainer idle`` is the share of its time that the trainer waited, ``servers idle`` that of servers × time in which
    nothing ran on a server: the summary's ``shares`` (`fedasync.runs.time_shares`).
    """
    return {
        STEP: throughput(run, "step_s"),
        RATE: throughput(run, "generated_tokens_per_second"),
        TRAINER: share_of_time(run, "trainer", "waiting"),
        SERVERS: share_of_time(run, "servers", "idle"),
        STALENESS: run.summary["staleness"]["mean"],
    }
