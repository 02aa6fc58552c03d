"""Published speed-ups beside what a study measured: where they are reached, and where not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedasync.report.arrangement import Runs, arrange, spoken
from fedasync.report.measures import speedup_at
from fedasync.report.paired import Speedup
from fedasync.report.spec import Claim, Report
from fedasync.report.wording import ratio_range, times

if TYPE_CHECKING:
    import polars as pl


def claims_table(runs: Runs, report: Report, ceilings: Mapping[str, float] | None = None) -> pl.DataFrame:
    """A row a claim and facet: what was published, what was measured, the ceiling there, and whether it is reached.

    The ceiling is the bound on a speed-up over waiting for everybody, so it stands only beside claims over the
    report's baseline.
    """
    import polars as pl

    shown = arrange(runs, report)
    aim = shown.target()
    rows = []
    for claim in report.claims:
        for facet in shown.facets:
            found = speedup_at(shown, claim.series, facet, claim.over, aim)
            place = dict(zip(shown.facet_axes, facet, strict=True))
            bound = (ceilings or {}).get(place.get(report.x_axis or "", "")) if claim.over == report.baseline else None
            rows.append(
                {
                    "published": f"{claim.series} {times(claim.times)} {claim.over} ({claim.source})",
                    **{spoken(axis): label for axis, label in place.items()},
                    "measured": "–" if found.ratio is None else f"{found.bound} {times(found.ratio)}".lstrip("= "),
                    "95 % interval": ratio_range(found).strip() or "–",
                    "ceiling": "–" if bound is None else times(bound),
                    "verdict": "; ".join(filter(None, [_verdict(claim, found), found.note()])),
                }
            )
    return pl.DataFrame(rows)


def _verdict(claim: Claim, found: Speedup) -> str:
    """Where seeds missed the target, the ratio is a bound: it decides what lies on its side of the claim, no more."""
    if found.ratio is None:
        return "no pair of seeds to compare"
    reached = found.ratio >= claim.times
    if (found.bound == "≥" and not reached) or (found.bound == "≤" and reached):
        return f"not decided: the ratio is a bound ({found.bound})"
    if reached and found.missed:
        return "reached, but not in every seed"
    if reached:
        return "reached" if found.low is None or found.low >= claim.times else "reached, within noise"
    if found.high is not None and found.high >= claim.times:
        return "not reached, within noise"
    return "not reached"
