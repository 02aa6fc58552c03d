"""Every row of the strategy table with knobs for small worlds of eight clients."""

from __future__ import annotations

from typing import Any

from fedasync.core import Strategy
from fedasync.strategies import STRATEGIES

CLIENTS = 8

KNOBS: dict[str, dict[str, Any]] = {
    **{name: {"cohort": 4} for name in ("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad")},
    "scaffold": {"cohort": 4},
    "fednova": {"cohort": 4},
    "fedasync": {"concurrency": 4},
    "fedbuff": {"concurrency": 4, "buffer_size": 3},
    "fedfa": {"concurrency": 4, "window": 3},
    "sliding_delta": {"concurrency": 4, "window": 3, "server_learning_rate": 0.2},
    "delta_step": {"concurrency": 4, "window": 4},
    "fadas": {"concurrency": 4, "buffer_size": 3},
    "fedstaleweight": {"concurrency": 4, "buffer_size": 3},
    "ringmaster": {"concurrency": 4, "delay_threshold": 3, "server_learning_rate": 0.3},
    "rennala": {"concurrency": 4, "buffer_size": 2},
    "dc_asgd": {"concurrency": 4, "server_learning_rate": 0.3, "compensation": 0.001},
    "ca2fl": {"concurrency": 4, "buffer_size": 3},
    "mifa": {"concurrency": 4, "buffer_size": 3},
    "area": {"concurrency": 4, "buffer_size": 2},
    "fedat": {"tiers": 2, "cohort": 2},
    "safa": {"concurrency": 8, "quota": 3},
    "fedfix": {"concurrency": 4, "interval_s": 1.0},
    "fedcompass": {"concurrency": 4, "least_steps": 2, "most_steps": 6},
}


def row(name: str, **knobs: Any) -> Strategy:
    """A row of the table, with some of its knobs set otherwise."""
    return STRATEGIES[name](**{**KNOBS[name], **knobs})
