"""Rows of the table of rollouts, as a real run writes them."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np

from fedasync.core import Lease
from fedasync.rl.engine import Finished
from fedasync.runs.rollouts import TYPES

ROW = np.dtype([(name, {"Int32": "<i4", "Int64": "<i8", "Float64": "<f8"}[kind]) for name, kind in TYPES.items()])
"""A packed row; the columns are those of rollouts.parquet."""

ITERATION = np.dtype(
    [
        ("server", "<i4"),
        ("at_s", "<f8"),
        ("running", "<i4"),
        ("context_tokens", "<i8"),
        ("seconds", "<f8"),
        ("prefill_tokens", "<i8"),
        ("prefill_s", "<f8"),
    ]
)
"""A packed row of the table of iterations: what a decoding step of a worker took."""


def answer_row(
    lease: Lease, index: int, worker: int, finished: Finished | None, start_s: float, end_s: float = nan
) -> bytes:
    """One answer's row; ``finished`` None, or without a trajectory: it never came."""
    trajectory = None if finished is None else finished.trajectory
    row: dict[str, Any] = {
        "lease": lease.id,
        "prompt": lease.worker,
        "answer": index,
        "prompt_tokens": 0 if finished is None else finished.prompt_tokens,
        "generated_tokens": 0,
        "lost_tokens": 0,
        "turns": 1,
        "start_s": start_s,
        "end_s": end_s,
        "server": worker,
        "base_version": lease.base_version,
        "first_version": lease.base_version,
        "last_version": lease.base_version,
        "mean_version": float(lease.base_version),
        "segments": 1,
    }
    if trajectory is not None and trajectory.generated.any():
        versions = trajectory.versions[trajectory.generated]
        row |= {
            "prompt_tokens": trajectory.prompt_tokens,
            "generated_tokens": trajectory.generated_tokens,
            "turns": trajectory.turns,
            "first_version": int(versions.min()),
            "last_version": int(versions.max()),
            "mean_version": float(versions.mean(dtype=np.float64)),
            "segments": trajectory.segments,
        }
    return np.array([tuple(row[name] for name in ROW.names or ())], ROW).tobytes()
