"""What the rollout workers of a real run spent their time on, by its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedasync.runs.lease_arrays import Leases
from fedasync.runs.rollouts import columns_of
from fedasync.runs.server_rounds import ANSWERS, Rounds, by_version, written_s

if TYPE_CHECKING:
    import polars as pl

Floats = NDArray[np.float64]


def servers_s(
    leases: Leases, metrics: pl.DataFrame, rollouts: pl.DataFrame, iterations: pl.DataFrame, from_s: float, to_s: float
) -> dict[str, float]:
    """Seconds of all servers between two moments: ``decoding``, ``prefilling``, ``paused``, as `SERVERS` says.

    A server is at work from the beginning of an answer to its end, or of a decoding step to its end: answers that
    never ended are known by those alone. It pauses as `Rounds.pauses` says, whether answers wait for it or not, and
    what it prefills the iterations tell. Without iterations all of its work is decoding. How long a worker was down no
    table tells: it is idle then.
    """
    answers = columns_of(rollouts, *ANSWERS)
    rounds = Rounds.of(iterations, leases, answers)
    pauses = rounds.pauses(written_s(leases, by_version(metrics, "sync_s", len(leases.commits_s))))
    ended = np.isfinite(answers["end_s"])
    spent = dict.fromkeys(("decoding", "prefilling", "paused"), 0.0)
    for server in np.unique(np.concatenate([answers["server"][ended], rounds.server])):
        mine, own, stood = ended & (answers["server"] == server), rounds.server == server, pauses.server == server
        begin_s, at_s = rounds.begin_s[own], rounds.at_s[own]
        work = np.concatenate(
            [np.stack([answers["start_s"][mine], answers["end_s"][mine]], 1), np.stack([begin_s, at_s], 1)]
        )
        still = np.stack([(pauses.until_s - pauses.seconds)[stood], pauses.until_s[stood]], 1)
        prefills = np.stack([begin_s, begin_s + rounds.prefill_s[own]], 1)
        paused_s, prefill_s = (covered_s(spans, from_s, to_s) for spans in (still, prefills))
        whole_s = covered_s(np.concatenate([work, still]), from_s, to_s)
        spent["paused"] += paused_s
        spent["prefilling"] += prefill_s
        spent["decoding"] += max(0.0, whole_s - paused_s - prefill_s)
    return spent


def covered_s(spans: Floats, from_s: float, to_s: float) -> float:
    """Seconds between two moments that lie in any of ``spans`` [n, 2], which may overlap."""
    start_s, end_s = np.clip(spans[np.argsort(spans[:, 0], kind="stable")], from_s, to_s).T
    over_s = np.concatenate([[from_s], np.maximum.accumulate(end_s)])[: len(end_s)]
    return float(np.maximum(end_s - np.maximum(start_s, over_s), 0.0).sum())
