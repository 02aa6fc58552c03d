"""Simulated runs on prompts in the folders of real ones: with a table of iterations that tells of their servers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np

from fedasync.runs.iterations import TYPES, iterations_frame
from fedasync.runs.run import Run
from fedasync.simulation.cluster import simulate_cluster
from fedasync.simulation.cluster.decoding import ServerCost
from fedasync.studies.build import build_cluster

SPEED = {
    "kind": "measured",
    "overhead_s": 4e-3,
    "per_sequence_s": 1e-4,
    "context_s": 2e-6,
    "prefill_call_s": 3e-3,
    "prefill_token_s": 5e-5,
    "max_running": 64,
}
CONFIG: dict[str, Any] = {
    "strategy": {"name": "synchronous_rl", "batch": 8},
    "run": {"versions": 60, "warm_up_versions": 4},
    "cluster": {
        "generation_gpus": 1,
        "training_gpus": 1,
        "decoding": SPEED,
        "trainer": {"seconds_per_token": 5e-5, "fixed_s": 0.12, "latency_s": 3e-3},
        "weights": {"order": "each", "publish_s": 0.012, "load_s": 0.02, "transfer": False},
        "reward": {"latency_s": {"kind": "constant", "value": 2e-3}},
    },
    "prompts": {
        "answers": 8,
        "prompt_tokens": {"kind": "constant", "value": 12.0},
        "answer_tokens": {"kind": "two_level_lognormal", "median": 40.0, "prompt_sigma": 0.4, "answer_sigma": 0.3},
        "most_tokens": 120,
    },
}


def config(*changes: tuple[str, Any]) -> dict[str, Any]:
    """`CONFIG` with other values at dotted keys."""
    found = copy.deepcopy(CONFIG)
    for key, value in changes:
        table = found
        *path, last = key.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return found


def simulated(of: dict[str, Any], seed: int = 0) -> Run:
    of = {**of, "seed": seed}
    parts = build_cluster(of, "test")
    return simulate_cluster(parts.strategy, parts.cluster, parts.prompts, parts.settings, seed=seed, config=of)


def recorded(folder: Path, of: dict[str, Any] = CONFIG, seed: int = 0) -> Run:
    """A run in its folder, with the iterations that its servers made."""
    run = simulated(of, seed)
    cluster = build_cluster({**of, "seed": seed}, "test").cluster
    rows = iterations(run, cluster.server_cost, cluster.contention.servers)
    run.tables = {**run.tables, "iterations": iterations_frame(rows)}
    run.save(folder)
    return Run.load(folder)


def iterations(run: Run, cost: ServerCost, times: float = 1.0) -> dict[str, Any]:
    """What a server of that cost does with the answers that began on it when the run says so, token by token.

    Iterations that begin while the trainer trains take so many ``times`` as long.
    """
    assert run.rollouts is not None
    steps = run.metrics.filter(run.metrics["name"] == "train_s").sort("version")
    ends = steps["time_s"].to_numpy()
    begins = ends - steps["value"].to_numpy()
    rows: list[tuple[float, ...]] = []
    for number in sorted(set(run.rollouts["server"].to_list()) - {-1}):
        here = (run.rollouts["server"] == number) & (run.rollouts["generated_tokens"] > 0)
        mine = run.rollouts.filter(here).sort("start_s")  # those too that the end of the run cut off
        waiting = list(
            zip(
                mine["start_s"].to_list(),
                mine["prompt_tokens"].to_list(),
                mine["generated_tokens"].to_list(),
                strict=True,
            )
        )[::-1]
        running: list[list[int]] = []
        """Resident tokens, and tokens to go, of each."""
        now = 0.0
        while waiting or running:
            if not running:
                now = max(now, waiting[-1][0])
            begun = []
            while waiting and waiting[-1][0] <= now + 1e-12:
                _, prompt, tokens = waiting.pop()
                begun.append([prompt, tokens])
            prefilled = sum(prompt for prompt, _ in begun)
            prefill_s = cost.prefill_call_s + cost.prefill_s(prefilled) if begun else 0.0
            running += begun
            context = sum(resident for resident, _ in running)
            at = int(np.searchsorted(ends, now, side="right"))
            slow = times if at < len(ends) and begins[at] <= now else 1.0
            prefill_s, seconds = slow * prefill_s, slow * cost.iteration_s(len(running), context)
            now += prefill_s + seconds
            rows.append((number, now, len(running), context, seconds, prefilled, prefill_s))
            running = [[resident + 1, left - 1] for resident, left in running if left > 1]
    return {name: np.array(column) for name, column in zip(TYPES, zip(*rows, strict=True), strict=True)}
