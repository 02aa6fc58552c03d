"""What a run with noise has spent: who took part in how many releases, from its log, and the ε that this comes to.

Every version is a release of one Gaussian mechanism: a sum of contributions of norm ≤ C, each weighted by s(τ) ≤ 1,
with noise z·C. Who has k contributions in it can move the sum by k·C, so that the release is (k/z)-GDP for this client,
and all releases together, each of which may depend on those before, are (√Σk²/z)-GDP (Dong, Roth and Su 2022, section
3): one Gaussian mechanism with noise z/√Σk². What is protected is all that a client ever brings, against zeros in its
place. Nothing is gained by sampling: who arrives when is no random choice of the server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from fedasync.core.log import CONSUMED
from fedasync.runs.rows import Rows

MOST = 500.0
"""ε beyond which the library does not look; it is told as infinite."""


class MissingAccountantError(ImportError):
    """The library that computes ε is not installed; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Participation:
    """What counts of a client: how many of its contributions were used, and Σk² over the releases."""

    client: int
    contributions: int
    squares: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Releases, clients that took part, and the participation of the one that took part most, and of the median one.

    Of an even number the median is the upper of the two middle ones.
    """

    releases: int
    clients: int
    worst: Participation | None
    median: Participation | None


def spent(chunks: Iterable[Rows], window: int | None = None) -> Spent:
    """What the rows ``consumed`` of a log say; with a sliding ``window`` a contribution is in up to so many releases.

    ``chunks`` are the log's rows, in order (`Record.chunks`, or `chunks_of` a table).
    """
    versions, workers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for rows in chunks:
        consumed = rows[rows["kind"] == CONSUMED]
        versions.append(consumed["version"].astype(np.int64))
        workers.append(consumed["worker"].astype(np.int64))
    version, worker = np.concatenate(versions), np.concatenate(workers)
    if not len(version):
        return Spent(0, 0, None, None)
    clients, place, contributions = np.unique(worker, return_inverse=True, return_counts=True)
    squares = _squares(version, place) if window is None else _squares_in_a_window(version, place, window)
    order = np.lexsort((-clients, squares))
    found = [
        Participation(int(clients[i]), int(contributions[i]), int(squares[i]))
        for i in (order[-1], order[len(order) // 2])
    ]
    return Spent(len(np.unique(version)), len(clients), *found)


def epsilon(squares: float, noise_multiplier: float, delta: float) -> float:
    """ε at ``delta`` for a client with Σk² = ``squares``: exact for Gaussians, infinite without noise or beyond `MOST`.

    Raises MissingAccountantError without opacus.
    """
    if not squares:
        return 0.0
    if not noise_multiplier:
        return inf
    try:
        from opacus.accountants.analysis.gdp import delta_eps_mu, eps_from_mu
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(("opacus", "torch")):
            raise
        raise MissingAccountantError("ε needs opacus: pip install 'fedasync[privacy]' would do") from None
    mu = sqrt(squares) / noise_multiplier
    if not isfinite(mu) or delta_eps_mu(eps=MOST, mu=mu) > delta:
        return inf
    if delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    return float(eps_from_mu(mu=mu, delta=delta))


def _squares(version: NDArray[np.int64], place: NDArray[np.intp]) -> NDArray[np.int64]:
    """Σk² of every client where each contribution is in the one release that it enters."""
    pairs, counts = np.unique(np.stack([place, version]), axis=1, return_counts=True)
    return _sums(pairs[0], counts**2, int(place.max()) + 1)


def _squares_in_a_window(version: NDArray[np.int64], place: NDArray[np.intp], window: int) -> NDArray[np.int64]:
    """Σk² of every client where a release holds the last ``window`` contributions.

    k² counts the pairs of a client's contributions in one release, so the sum counts for each pair the releases that
    hold both: one with e contributions entered holds the a-th and the b-th, a ≤ b, when b < e ≤ a + window.
    """
    count = len(version)
    entered = np.append(np.flatnonzero(np.diff(version)) + 1, count)  # at each release
    up_to = np.searchsorted(entered, np.arange(count + window + 1), side="right")
    totals = np.zeros(int(place.max()) + 1, np.int64)
    for apart in range(min(window, count)):
        first = np.flatnonzero(place[: count - apart] == place[apart:])
        both = up_to[first + window] - up_to[first + apart]
        totals += _sums(place[first], both if apart == 0 else 2 * both, len(totals))
    return totals


def _sums(place: NDArray[np.intp], values: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    totals = np.zeros(length, np.int64)
    np.add.at(totals, place, values)
    return totals
