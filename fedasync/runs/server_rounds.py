"""The rounds of rollout servers by the table of iterations: the pause before each, and where new weights came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.runs.lease_arrays import Leases

if TYPE_CHECKING:
    import polars as pl

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ANSWERS = ("lease", "server", "start_s", "end_s")
"""Columns of the table of rollouts that `Rounds.of` asks for."""


def written_s(leases: Leases, sync_s: Floats) -> Floats:
    """When weights of versions ≥ 1 were where servers find them; ``sync_s`` by committed version."""
    made = leases.published_version >= 1
    version = leases.published_version[made]
    known = version < len(sync_s)  # the next step tells how long they took
    return (leases.published_s[made][known] + sync_s[version[known]]).astype(np.float64)


def by_version(metrics: pl.DataFrame, name: str, versions: int) -> Floats:
    """A metric of steps by committed version; what a version has no value of is 0."""
    import polars as pl

    rows = metrics.filter((pl.col("name") == name) & (pl.col("version") <= versions))
    values = np.zeros(versions)
    values[rows["version"].to_numpy() - 1] = rows["value"].to_numpy()
    return values


@dataclass(frozen=True)
class Pauses:
    """Servers that stood still for new weights: which, until when, and for how long. Arrays of one length."""

    server: NDArray[np.int64]
    until_s: Floats
    seconds: Floats


@dataclass(frozen=True)
class Rounds:
    """Decoding steps by server and time, with the pause before each. Arrays of one length."""

    server: NDArray[np.int64]
    at_s: Floats
    running: Floats
    context: Floats
    seconds: Floats
    prefill_tokens: Floats
    prefill_s: Floats
    gap_s: Floats
    """From the end of the step before; not finite of a server's first."""
    since_s: Floats
    """From when on the step could have begun: the end of the one before, or the first request."""
    went_on: Bools
    """Answers went on through the pause before."""

    @property
    def begin_s(self) -> Floats:
        """When each began, with its prefill."""
        return self.at_s - self.seconds - self.prefill_s

    @classmethod
    def of(cls, iterations: pl.DataFrame, leases: Leases, answers: Mapping[str, NDArray[Any]]) -> Rounds:
        """``answers``: `ANSWERS` of the table of rollouts, an unknown end is NaN."""
        table = iterations.sort("server", "at_s")
        at_s, server = table["at_s"].to_numpy(), table["server"].to_numpy().astype(np.int64)
        seconds, prefill_s = table["seconds"].to_numpy(), table["prefill_s"].to_numpy()
        begin_s = at_s - seconds - prefill_s
        gap_s, since_s = np.full(len(at_s), np.nan), np.full(len(at_s), np.inf)
        went_on = np.zeros(len(at_s), np.bool_)
        for each in np.unique(server):
            rows = np.flatnonzero(server == each)
            before = np.concatenate([[-np.inf], at_s[rows][:-1]])
            mine = (answers["server"] == each) & np.isfinite(answers["end_s"])
            starts, ends = np.sort(answers["start_s"][mine]), np.sort(answers["end_s"][mine])
            begun = np.searchsorted(starts, before, side="right")
            over = np.searchsorted(ends, begin_s[rows] - 1e-12, side="left")
            gap_s[rows] = begin_s[rows] - before
            went_on[rows] = (begun - over > 0) & (gap_s[rows] >= 0)
            order = np.argsort(answers["start_s"][mine], kind="stable")
            asked = np.concatenate([leases.admitted_s[answers["lease"][mine]][order], [np.inf]])
            # Where nobody went on: whose request came first of those that began now.
            since_s[rows] = np.where(went_on[rows], before, np.maximum(before, asked[np.minimum(begun, len(order))]))
        return cls(
            server,
            at_s,
            table["running"].to_numpy().astype(np.float64),
            table["context_tokens"].to_numpy().astype(np.float64),
            seconds,
            table["prefill_tokens"].to_numpy().astype(np.float64),
            prefill_s,
            gap_s,
            since_s,
            went_on,
        )

    def undisturbed(self, weights_s: Floats) -> Bools:
        """Answers went on through the pause before, and no weights came in it."""
        found = self.went_on & np.isfinite(self.gap_s)
        begin_s = self.begin_s
        for each in np.unique(self.server):
            rows = np.flatnonzero(self.server == each)
            for at in np.searchsorted(begin_s[rows], weights_s):  # they come in this pause, or in the next
                found[rows[max(0, at - 1) : at + 2]] = False
        return found

    def pauses(self, weights_s: Floats, since_s: float = 0.0) -> Pauses:
        """How long each server stood still for weights that were there at ``weights_s`` (ascending), ``since_s`` on.

        The longer of the two pauses after they were there, from then on, or from the first request; less the pause
        that there is between any two steps.
        """
        usual = self.gap_s[self.undisturbed(weights_s)]
        usual_s = float(usual.mean()) if len(usual) else 0.0
        weights_s, every_begin_s = weights_s[weights_s >= since_s], self.begin_s
        found: list[tuple[int, float, float]] = []
        for each in np.unique(self.server):
            rows = np.flatnonzero(self.server == each)
            begin_s, ready_s = every_begin_s[rows], self.since_s[rows]
            firsts = np.searchsorted(begin_s, weights_s)
            nexts = np.append(firsts[1:], len(rows))
            for there_s, first, following in zip(weights_s, firsts, nexts, strict=True):
                if first == following:
                    continue  # nothing was generated under them
                spans = [(begin_s[i] - max(there_s, ready_s[i]), begin_s[i]) for i in range(first, following)[:2]]
                seconds, until_s = max(spans)
                seconds -= usual_s if ready_s[first] < there_s else 0.0
                found.append((int(each), float(until_s), max(0.0, float(seconds))))
        columns = np.array(found, np.float64).reshape(-1, 3)
        return Pauses(columns[:, 0].astype(np.int64), columns[:, 1], columns[:, 2])
