"""A run's verdict on itself: laws that hold for every strategy and every runtime, recounted from the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.core.log import ADMITTED, CONSUMED, DELIVERED, KINDS
from fedasync.runs.audit import Audit
from fedasync.runs.measures import ENDS

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Verdict:
    """One law, whether it holds, and the numbers behind that."""

    name: str
    holds: bool
    detail: str


def judge(audit: Audit, ledger: dict[str, Any], most_in_flight: int, max_staleness: int | None = None) -> list[Verdict]:
    """Judge a log against its ledger and its strategy's bounds."""
    return [
        _conservation(audit, ledger),
        Verdict("time goes forward", audit.steps_back == 0, f"{audit.rows} events, {audit.steps_back} steps back"),
        _staleness(audit, max_staleness),
        Verdict(
            "versions follow the commits",
            audit.wrong_versions == 0,
            f"{audit.wrong_versions} of {audit.rows} rows with another version",
        ),
        Verdict(
            "in flight within the cap",
            audit.most_in_flight <= most_in_flight,
            f"at most {audit.most_in_flight} of {most_in_flight}",
        ),
        _little(audit),
    ]


def _conservation(audit: Audit, ledger: dict[str, Any]) -> Verdict:
    """Every lease has one outcome, the log and the ledger agree on how many have which, and none is used twice."""
    booked = {
        "in flight": (ADMITTED, ledger["in_flight"]),
        "buffered": (DELIVERED, ledger["buffered"]),
        "consumed": (CONSUMED, ledger["consumed"]),
        **{name: (KINDS.index(name), sum(ledger[name].values())) for name in ENDS},
    }
    odd = audit.unlawful + audit.misplaced
    holds = (
        odd == 0
        and audit.admitted == ledger["admitted"] == sum(count for _, count in booked.values())
        and all(audit.count(kind) == count for kind, count in booked.values())
    )
    parts = " + ".join(f"{count} {outcome}" for outcome, (_, count) in booked.items() if count)
    words = f"; {odd} rows of leases with more than one outcome, none admitted, or numbered out of order" if odd else ""
    return Verdict("conservation of work", holds, f"{ledger['admitted']} admitted = {parts or 0}{words}")


def _staleness(audit: Audit, bound: int | None) -> Verdict:
    over = 0 if bound is None else int(audit.histogram[bound + 1 :].sum())
    wrong = audit.wrong_staleness
    limit = "" if bound is None else f", {over} beyond the bound of {bound}"
    return Verdict("staleness is an integer ≥ 0", wrong == over == 0, f"{audit.applied} applied, {wrong} wrong{limit}")


def _little(audit: Audit) -> Verdict:
    """Mean number in flight = leases a second × mean time in flight; the one counted by rows, the other by leases."""
    area, work_s, end_s = audit.area, audit.work_s, audit.end_s
    per_s = audit.admitted / end_s if end_s > 0 else 0.0
    detail = (
        f"{area / end_s if end_s > 0 else 0:.6g} in flight on average = "
        f"{per_s:.6g} leases a second × {work_s / max(1, audit.admitted):.6g} s"
    )
    return Verdict("Little's law", abs(area - work_s) <= 1e-9 * max(1.0, work_s), detail)


# Passing: from here on, what simulate.py asks of a whole table until it takes it from `told_by_the_log`.


def verdicts(
    events: pl.DataFrame,
    leases: pl.DataFrame,
    ledger: dict[str, Any],
    end_s: float,
    most_in_flight: int,
    max_staleness: int | None = None,
) -> list[Verdict]:
    """Judge a log of ``end_s`` seconds against its ledger and its strategy's bounds."""
    return [
        _table_conservation(events, leases, ledger),
        _time(events),
        _table_staleness(events, max_staleness),
        _versions(events),
        *_in_flight(events, leases, end_s, most_in_flight),
    ]


def _table_conservation(events: pl.DataFrame, leases: pl.DataFrame, ledger: dict[str, Any]) -> Verdict:
    """Every lease has one outcome, the log and the ledger agree on how many have which, and none is used twice."""
    import polars as pl

    kind = pl.col("kind")
    twice = (
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
    counted = dict(leases["outcome"].value_counts(sort=True).iter_rows())
    booked = {
        "in flight": ledger["in_flight"],
        "buffered": ledger["buffered"],
        "consumed": ledger["consumed"],
        **{kind: sum(ledger[kind].values()) for kind in ENDS},
    }
    holds = (
        twice == 0
        and len(leases) == ledger["admitted"] == sum(booked.values())
        and all(counted.get(outcome, 0) == count for outcome, count in booked.items())
    )
    parts = " + ".join(f"{count} {outcome}" for outcome, count in booked.items() if count)
    odd = f"; {twice} leases with more than one outcome or none admitted" if twice else ""
    return Verdict("conservation of work", holds, f"{ledger['admitted']} admitted = {parts or 0}{odd}")


def _time(events: pl.DataFrame) -> Verdict:
    times = events["time_s"].to_numpy()
    backward = int((np.diff(times) < 0).sum())
    return Verdict("time goes forward", backward == 0, f"{len(times)} events, {backward} steps back")


def _table_staleness(events: pl.DataFrame, bound: int | None) -> Verdict:
    import polars as pl

    used = events.filter(pl.col("kind") == "consumed").select("staleness", "version", "base_version")
    tau = used["staleness"].fill_null(-1)
    wrong = int(((tau < 0) | (tau != used["version"] - used["base_version"])).sum())
    over = 0 if bound is None else int((tau > bound).sum())
    limit = "" if bound is None else f", {over} beyond the bound of {bound}"
    return Verdict("staleness is an integer ≥ 0", wrong == over == 0, f"{len(tau)} applied, {wrong} wrong{limit}")


def _versions(events: pl.DataFrame) -> Verdict:
    """Bases and versions in the rows are those that the commits and publications before them made."""
    import polars as pl

    kind = pl.col("kind")
    counted = events.with_columns(
        made=(kind == "committed").cum_sum(),
        shown=pl.when(kind == "published").then("version").forward_fill().fill_null(0),
    )
    wrong = counted.filter(
        pl.when(kind == "admitted")
        .then((pl.col("base_version") != pl.col("shown")) | (pl.col("version") != pl.col("shown")))
        .when(kind == "published")
        .then(pl.col("version") > pl.col("made"))
        .otherwise(pl.col("version") != pl.col("made"))
    ).height
    return Verdict("versions follow the commits", wrong == 0, f"{wrong} of {len(events)} rows with another version")


def _in_flight(events: pl.DataFrame, leases: pl.DataFrame, end_s: float, cap: int) -> list[Verdict]:
    """The cap, and Little's law: mean number in flight = leases a second × mean time in flight."""
    import polars as pl

    rows = events.select("time_s", "kind", "lease").with_row_index("row")
    starts = rows.filter(pl.col("kind") == "admitted").with_columns(step=1)
    ends = rows.filter(pl.col("kind").is_in(["delivered", *ENDS])).unique("lease", keep="first").with_columns(step=-1)
    moves = pl.concat([starts, ends]).sort("row")
    number = moves["step"].cum_sum().to_numpy()
    times = np.append(moves["time_s"].to_numpy(), end_s)
    most = int(number.max()) if len(number) else 0
    area = float((number * np.diff(times)).sum()) if len(number) else 0.0
    stays = float((leases["end_s"] - leases["start_s"]).sum())
    close = abs(area - stays) <= 1e-9 * max(1.0, stays)
    per_s = len(leases) / end_s if end_s > 0 else 0.0
    detail = (
        f"{area / end_s if end_s > 0 else 0:.6g} in flight on average = "
        f"{per_s:.6g} leases a second × {stays / max(1, len(leases)):.6g} s"
    )
    return [
        Verdict("in flight within the cap", most <= cap, f"at most {most} of {cap}"),
        Verdict("Little's law", close, detail),
    ]
