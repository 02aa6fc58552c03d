"""A log's leases as arrays: what became of each, at which version, and how much had been committed and published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core.log import (
    ADMITTED,
    CANCELLED,
    COMMITTED,
    CONSUMED,
    DELIVERED,
    FAILED,
    KINDS,
    NONE,
    PUBLISHED,
    REJECTED,
)
from fedasync.runs.record import Record
from fedasync.runs.rows import Rows, chunks_of

if TYPE_CHECKING:
    import polars as pl

LOST = (REJECTED, FAILED, CANCELLED)
"""Kinds that end a lease without use."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Leases:
    """A log by lease: every array is ``[leases]``, indexed by the lease's number, unless said otherwise.

    worker: client, or prompt on a cluster.
    base_version, admitted_s: where and when it started.
    made, publications: versions committed, and publications, before its admission.
    place: the kind of its last row: ``ADMITTED`` in flight, ``DELIVERED`` buffered, ``CONSUMED``, or one of `LOST`.
    reason: index into ``reasons`` of why it was lost; -1 where there is none.
    delivered_s, delivered_version: NaN and -1 where it never was delivered.
    used_version: version that the step started from which consumed it; -1 where none did.
    used_s: when that step was committed (NaN).
    used_publications: publications before that; -1.
    commits_s: times of the commits ``[versions]``.
    published_s, published_version: times and versions ``[publications]``.
    """

    worker: Ints
    base_version: Ints
    admitted_s: Floats
    made: Ints
    publications: Ints
    place: NDArray[np.int8]
    reason: Ints
    delivered_s: Floats
    delivered_version: Ints
    used_version: Ints
    used_s: Floats
    used_publications: Ints
    commits_s: Floats
    published_s: Floats
    published_version: Ints
    reasons: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.worker)

    @property
    def consumed(self) -> NDArray[np.bool_]:
        return np.equal(self.place, CONSUMED)

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Ended without use."""
        return np.isin(self.place, LOST)

    def why_lost(self, lease: int) -> str:
        """Why a lease was lost, in the log's words; its kind where the log gives no reason."""
        code = int(self.reason[lease])
        return self.reasons[code] if code != NONE else KINDS[int(self.place[lease])]


def lease_arrays(log: Record | pl.DataFrame | pl.LazyFrame) -> Leases:
    """The leases of a log: a runtime's record, or the table of docs/log.md.

    Raises ValueError for a log whose leases are not numbered from 0 in the order of their admission, or one with a row
    of a lease that was not admitted before.
    """
    if isinstance(log, Record):
        return _read(log.chunks(), log.reasons, None)
    import polars as pl

    lost = [KINDS[kind] for kind in LOST]
    found = log.lazy().filter(pl.col("kind").is_in(lost) & pl.col("reason").is_not_null())
    told = found.select("lease", pl.col("reason").cast(pl.String)).collect()
    reasons = told["reason"].unique(maintain_order=True).to_list()
    codes = told["reason"].replace_strict(reasons, range(len(reasons)), return_dtype=pl.Int64).to_numpy()
    return _read(chunks_of(log), reasons, (told["lease"].to_numpy(), codes))


def _read(chunks: Iterable[Rows], reasons: Sequence[str], told: tuple[Ints, Ints] | None) -> Leases:
    parts: dict[int, list[dict[str, NDArray[Any]]]] = {kind: [] for kind in range(len(KINDS))}
    commits = publications = 0
    for rows in chunks:
        kind = rows["kind"]
        made = commits + np.cumsum(kind == COMMITTED)
        shown = publications + np.cumsum(kind == PUBLISHED)
        for which, part in parts.items():
            at = np.flatnonzero(kind == which)
            if len(at):
                part.append(
                    {
                        "made": made[at],
                        "shown": shown[at],
                        **{name: rows[name][at] for name in ("lease", "worker", "base_version", "version", "reason")},
                        "time_s": rows["time_s"][at],
                    }
                )
        commits, publications = int(made[-1]), int(shown[-1])

    def column(kind: int, name: str) -> NDArray[Any]:
        dtype = np.float64 if name == "time_s" else np.int64
        return np.concatenate([part[name].astype(dtype) for part in parts[kind]] or [np.zeros(0, dtype)])

    given = column(ADMITTED, "lease")
    count = len(given)
    if not np.array_equal(given, np.arange(count)):
        raise ValueError("a log's leases are not numbered 0, 1, 2, … in the order of their admission")
    place = np.full(count, ADMITTED, np.int8)

    def spread(kind: int, name: str, missing: float) -> NDArray[Any]:
        values, lease = column(kind, name), column(kind, "lease")
        if len(lease) and not 0 <= int(lease.min()) <= int(lease.max()) < count:
            raise ValueError(f"a log has a row {KINDS[kind]!r} of a lease that was never admitted")
        out = np.full(count, missing, values.dtype)
        out[lease] = values
        return out

    reason = np.full(count, NONE, np.int64)
    delivered_version = spread(DELIVERED, "version", NONE)  # spread also checks the numbers that follow
    used_version = spread(CONSUMED, "version", NONE)
    place[column(DELIVERED, "lease")] = DELIVERED
    place[column(CONSUMED, "lease")] = CONSUMED
    for ended in LOST:
        spread(ended, "lease", NONE)
        lease = column(ended, "lease")
        place[lease] = ended
        if told is None:
            reason[lease] = column(ended, "reason")
    if told is not None:
        reason[told[0]] = told[1]
    return Leases(
        worker=column(ADMITTED, "worker"),
        base_version=column(ADMITTED, "base_version"),
        admitted_s=column(ADMITTED, "time_s"),
        made=column(ADMITTED, "made"),
        publications=column(ADMITTED, "shown"),
        place=place,
        reason=reason,
        delivered_s=spread(DELIVERED, "time_s", np.nan),
        delivered_version=delivered_version,
        used_version=used_version,
        used_s=spread(CONSUMED, "time_s", np.nan),
        used_publications=spread(CONSUMED, "shown", NONE),
        commits_s=column(COMMITTED, "time_s"),
        published_s=column(PUBLISHED, "time_s"),
        published_version=column(PUBLISHED, "version"),
        reasons=tuple(reasons),
    )
