"""The measures and laws of a log once more, as queries over the whole table: slow, plain, and of other make."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from fedasync.runs.measures import ENDS, lease_table


def staleness(events: pl.DataFrame) -> dict[str, Any]:
    tau = events.filter(pl.col("kind") == "consumed")["staleness"].to_numpy().astype(np.int64)
    if not len(tau):
        return {"mean": None, "p50": None, "p90": None, "max": None, "histogram": {}}
    values, counts = np.unique(tau, return_counts=True)
    return {
        "mean": float(tau.mean()),
        "p50": int(np.quantile(tau, 0.5, method="inverted_cdf")),
        "p90": int(np.quantile(tau, 0.9, method="inverted_cdf")),
        "max": int(tau.max()),
        "histogram": {str(value): int(count) for value, count in zip(values, counts, strict=True)},
    }


def work_s(events: pl.DataFrame, end_s: float) -> tuple[float, float]:
    """Seconds of all leases, and of those that came to nothing."""
    work = lease_table(events, end_s).select(
        pl.col("outcome").is_in(list(ENDS)).alias("lost"), (pl.col("end_s") - pl.col("start_s")).alias("s")
    )
    return float(work["s"].sum()), float(work.filter("lost")["s"].sum())


def applied_by(events: pl.DataFrame, moment: float) -> int:
    return events.filter((pl.col("kind") == "consumed") & (pl.col("time_s") <= moment)).height


def last_version_s(events: pl.DataFrame) -> float | None:
    times = events.filter(pl.col("kind") == "committed")["time_s"]
    return float(times[-1]) if len(times) else None


def outcomes(events: pl.DataFrame, end_s: float) -> dict[str, int]:
    return dict(lease_table(events, end_s)["outcome"].value_counts(sort=True).iter_rows())


def odd_leases(events: pl.DataFrame) -> int:
    """Leases with more than one outcome, or used though never delivered, or never admitted."""
    kind = pl.col("kind")
    return (
        events.filter(pl.col("lease").is_not_null() & (kind != "ignored"))
        .group_by("lease")
        .agg(
            admitted=(kind == "admitted").sum(),
            delivered=(kind == "delivered").sum(),
            consumed=(kind == "consumed").sum(),
            ended=kind.is_in(["consumed", *ENDS]).sum(),
        )
        .filter((pl.col("admitted") != 1) | (pl.col("ended") > 1) | (pl.col("consumed") > pl.col("delivered")))
        .height
    )


def steps_back(events: pl.DataFrame) -> int:
    return int((np.diff(events["time_s"].to_numpy()) < 0).sum())


def wrong_staleness(events: pl.DataFrame) -> int:
    used = events.filter(pl.col("kind") == "consumed").select("staleness", "version", "base_version")
    tau = used["staleness"].fill_null(-1)
    return int(((tau < 0) | (tau != used["version"] - used["base_version"])).sum())


def wrong_versions(events: pl.DataFrame) -> int:
    """Rows whose base or version is not what the commits and publications before them made."""
    kind = pl.col("kind")
    counted = events.with_columns(
        made=(kind == "committed").cum_sum(),
        shown=pl.when(kind == "published").then("version").forward_fill().fill_null(0),
    )
    return counted.filter(
        pl.when(kind == "admitted")
        .then((pl.col("base_version") != pl.col("shown")) | (pl.col("version") != pl.col("shown")))
        .when(kind == "published")
        .then(pl.col("version") > pl.col("made"))
        .otherwise(pl.col("version") != pl.col("made"))
    ).height


def in_flight(events: pl.DataFrame, end_s: float) -> tuple[int, float]:
    """The most at a time, and number × time."""
    rows = events.select("time_s", "kind", "lease").with_row_index("row")
    starts = rows.filter(pl.col("kind") == "admitted").with_columns(step=1)
    ends = rows.filter(pl.col("kind").is_in(["delivered", *ENDS])).unique("lease", keep="first").with_columns(step=-1)
    moves = pl.concat([starts, ends]).sort("row")
    number = moves["step"].cum_sum().to_numpy()
    times = np.append(moves["time_s"].to_numpy(), end_s)
    return (int(number.max()), float((number * np.diff(times)).sum())) if len(number) else (0, 0.0)


def broken(events: pl.DataFrame, ledger: dict[str, Any], end_s: float, cap: int) -> set[str]:
    """The laws that do not hold, by name."""
    counted = outcomes(events, end_s)
    booked = {
        "in flight": ledger["in_flight"],
        **{kind: ledger[kind] for kind in ("buffered", "consumed")},
        **{kind: sum(ledger[kind].values()) for kind in ENDS},
    }
    admitted = events.filter(pl.col("kind") == "admitted").height
    conserved = (
        odd_leases(events) == 0
        and admitted == ledger["admitted"] == sum(booked.values())
        and all(counted.get(outcome, 0) == count for outcome, count in booked.items())
    )
    most, area = in_flight(events, end_s)
    total_s, _ = work_s(events, end_s)
    holds = {
        "conservation of work": conserved,
        "time goes forward": steps_back(events) == 0,
        "staleness is an integer ≥ 0": wrong_staleness(events) == 0,
        "versions follow the commits": wrong_versions(events) == 0,
        "in flight within the cap": most <= cap,
        "Little's law": abs(area - total_s) <= 1e-9 * max(1.0, total_s),
    }
    return {name for name, held in holds.items() if not held}
