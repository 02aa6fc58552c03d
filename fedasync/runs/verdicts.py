"""A run's verdict on itself: laws that hold for every strategy and every runtime, recounted from the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedasync.core.log import ADMITTED, CONSUMED, DELIVERED, KINDS
from fedasync.runs.audit import Audit
from fedasync.runs.measures import ENDS


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
