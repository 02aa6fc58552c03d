"""How far one run agrees with another of the same clients: order of deliveries, staleness, lease times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedasync.runs.measures import lease_table

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    from fedasync.runs.run import Run

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OrderAgreement:
    """Deliveries of two logs, matched by (client, its n-th delivery).

    ``tau`` is Kendall's τ over the ``matched`` ones, and ``same_order`` the share of their pairs that come in the same
    order in both, (1 + τ)/2. Pairs far apart hardly ever change places, so both are near 1 in a long run;
    ``neighbours`` is the share among those that follow each other in the first log and come from two clients (0.5 by
    chance; None without such). ``first`` and ``second`` count all deliveries of each log.
    """

    tau: float
    neighbours: float | None
    matched: int
    first: int
    second: int

    @property
    def same_order(self) -> float:
        return (1 + self.tau) / 2


def order_agreement(first: pl.DataFrame, second: pl.DataFrame) -> OrderAgreement | None:
    """Of two tables of events; None where fewer than two deliveries match.

    Deliveries of one instant come in the order of their rows.
    """
    from scipy.stats import kendalltau

    one, other = _deliveries(first), _deliveries(second)
    both = one.join(other, on=["worker", "nth"], suffix="_other").sort("place")
    if both.height < 2:
        return None
    places = both["place_other"].to_numpy().astype(np.int64)
    tau = float(kendalltau(np.arange(both.height), places).statistic)
    after = (np.diff(places) > 0)[np.diff(both["worker"].to_numpy()) != 0]
    neighbours = float(after.mean()) if len(after) else None
    return OrderAgreement(tau, neighbours, both.height, one.height, other.height)


def _deliveries(events: pl.DataFrame) -> pl.DataFrame:
    """worker, nth, place: a row a delivery."""
    import polars as pl

    starts = events.filter(pl.col("kind") == "admitted").select("lease", who="worker")
    delivered = events.filter(pl.col("kind") == "delivered").join(starts, on="lease", how="left", maintain_order="left")
    return (
        delivered.with_columns(worker=pl.col("worker").fill_null(pl.col("who")))
        .with_row_index("place")
        .with_columns(nth=pl.int_range(pl.len()).over("worker"))
        .select("worker", "nth", "place")
    )


def total_variation(first: Mapping[int, int], second: Mapping[int, int]) -> float:
    """Half of Σ|p − q| of two histograms (value → count), 0 … 1. Raises ValueError for an empty one."""
    _, p, q = _shares(first, second)
    return float(np.abs(p - q).sum() / 2)


def wasserstein(first: Mapping[int, int], second: Mapping[int, int]) -> float:
    """How far, on average, mass must move to make one histogram the other (Wasserstein-1), in units of the values.

    Raises ValueError for an empty one.
    """
    values, p, q = _shares(first, second)
    return float(np.abs(np.cumsum(p - q))[:-1] @ np.diff(values))


def _shares(first: Mapping[int, int], second: Mapping[int, int]) -> tuple[Floats, Floats, Floats]:
    if not sum(first.values()) or not sum(second.values()):
        raise ValueError("a histogram without a count has no distance to another")
    values = np.array(sorted({*first, *second}), np.float64)
    p, q = (np.array([each.get(int(v), 0) for v in values]) / sum(each.values()) for each in (first, second))
    return values, p, q


def lease_means_s(run: Run) -> dict[int, float]:
    """Mean time (s) from a lease's admission to the arrival of its contribution, by client."""
    import polars as pl

    kinds = ("admitted", "delivered", "consumed", "rejected", "failed", "cancelled")
    events = run.read_events(lambda log: log.filter(pl.col("kind").is_in(kinds)))
    arrived = lease_table(events, float(run.summary["time_s"])).filter(
        pl.col("outcome").is_in(["consumed", "buffered"])
    )
    means = arrived.group_by("worker").agg(mean=(pl.col("end_s") - pl.col("start_s")).mean()).sort("worker")
    return {int(worker): float(mean) for worker, mean in means.iter_rows()}
