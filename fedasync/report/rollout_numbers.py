"""What runs on prompts are compared by, real ones and simulated ones alike."""

from __future__ import annotations

from fedasync.report.cluster import throughput
from fedasync.runs.busy_servers import idle_share
from fedasync.runs.run import Run

STEP, RATE, TRAINER, SERVERS, STALENESS = (
    "step time",
    "answer tokens a second",
    "trainer idle",
    "servers idle",
    "mean staleness",
)
UNITS = {STEP: "s", RATE: "1/s", TRAINER: "share", SERVERS: "share", STALENESS: "versions"}


def servers_of(run: Run) -> int:
    """Rollout workers of a real run, or servers of a simulated one."""
    config = run.config
    if "processes" in config:
        return int(config["processes"].get("workers", 1))
    cluster = config.get("cluster") or {}
    return int(cluster.get("generation_gpus", 1)) // int(cluster.get("tensor_parallel", 1))


def numbers(run: Run) -> dict[str, float | None]:
    """By name, after the run's warm-up; None where it measured nothing.

    ``trainer idle``: the share of time in which it waited for a batch. ``servers idle``: the share of servers × time in
    which a server had no answer to generate.
    """
    step_s, wait_s = throughput(run, "step_s"), throughput(run, "wait_s")
    told = run.summary["rollouts"]["throughput"]
    idle = None
    if told.get("to_s") is not None:
        idle = idle_share(run, servers_of(run), float(told["from_s"]), float(told["to_s"]))
    return {
        STEP: step_s,
        RATE: throughput(run, "generated_tokens_per_second"),
        TRAINER: wait_s / step_s if step_s and wait_s is not None else None,
        SERVERS: idle,
        STALENESS: run.summary["staleness"]["mean"],
    }
