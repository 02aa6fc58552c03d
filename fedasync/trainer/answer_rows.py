"""Rows of the table of rollouts, as a real run writes them."""

from __future__ import annotations

from math import nan
from struct import Struct

import numpy as np

from fedasync.core import Lease
from fedasync.rl.engine import Finished
from fedasync.runs.rollouts import TYPES

ROW = np.dtype([(name, {"Int32": "<i4", "Int64": "<i8", "Float64": "<f8"}[kind]) for name, kind in TYPES.items()])
"""A packed row; the columns are those of rollouts.parquet."""
_PACKED = Struct("<" + "".join({"Int32": "i", "Int64": "q", "Float64": "d"}[kind] for kind in TYPES.values()))

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
    base = lease.base_version
    prompt_tokens = 0 if finished is None else finished.prompt_tokens
    tokens, turns, first, last, mean, segments = 0, 1, base, base, float(base), 1
    if trajectory is not None and len(versions := trajectory.versions[trajectory.generated]):
        tokens, turns, prompt_tokens = len(versions), trajectory.turns, trajectory.prompt_tokens
        first, last = int(versions.min()), int(versions.max())
        mean = float(first)
        if first != last:  # mostly not, and there is a row for every answer
            mean, segments = float(versions.mean(dtype=np.float64)), trajectory.segments
    about = (lease.id, lease.worker, index, prompt_tokens, tokens, 0, turns, start_s, end_s, worker)
    return _PACKED.pack(*about, base, first, last, mean, segments)
