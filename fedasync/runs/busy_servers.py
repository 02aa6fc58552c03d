"""How much of their time rollout servers had an answer to generate, by the table of rollouts."""

from __future__ import annotations

import numpy as np

from fedasync.runs.rollouts import columns_of
from fedasync.runs.run import Run


def idle_share(run: Run, servers: int, from_s: float, to_s: float) -> float | None:
    """The share of servers × time in which a server had no answer that was begun and not ended.

    An answer without an end is taken to go on until ``to_s``. None where there is no table, or no time.
    """
    rollouts = run.rollouts
    if rollouts is None or to_s <= from_s or not servers:
        return None
    columns = columns_of(rollouts, "server", "start_s", "end_s")
    ends_s = np.where(np.isnan(columns["end_s"]), to_s, columns["end_s"])
    begun = np.isfinite(columns["start_s"]) & (columns["server"] >= 0)
    busy_s = 0.0
    for server in range(servers):
        mine = begun & (columns["server"] == server)
        start_s, end_s = (np.clip(times_s[mine], from_s, to_s) for times_s in (columns["start_s"], ends_s))
        order = np.argsort(start_s, kind="stable")
        start_s, end_s = start_s[order], end_s[order]
        over_s = np.concatenate([[from_s], np.maximum.accumulate(end_s)])[:-1] if len(end_s) else end_s
        busy_s += float(np.maximum(end_s - np.maximum(start_s, over_s), 0.0).sum())
    return max(0.0, 1.0 - busy_s / (servers * (to_s - from_s)))
