"""The table ``rollouts`` of a study of clusters: step time, throughput, staleness by definition, bias, drops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from fedasync.report.arrangement import Arrangement, Cell, Facet, Runs, arrange
from fedasync.report.cluster import (
    interval,
    length_ratio,
    need_rollouts,
    over_seeds,
    share_of_time,
    staleness,
    throughput,
    tokens_per_second,
)
from fedasync.report.spec import Report
from fedasync.report.table import number, plus_minus
from fedasync.runs.run import Run
from fedasync.runs.staleness_kinds import KINDS

if TYPE_CHECKING:
    import polars as pl


def rollouts_table(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """A row a series and facet, means over seeds (of a maximum the largest), numbers only.

    Columns: the axes; ``seeds``; ``step_s``, ``tokens_per_second`` and ``generated_tokens_per_second`` with
    ``…_half_width`` (95 % t-interval), warm-up left out; ``trainer_…`` and ``servers_…``: shares of time; of each
    definition of staleness ``<kind>_mean``, ``<kind>_p99``, ``<kind>_max``, ``<kind>_token_mean``; ``length_ratio``
    (trained over generated), ``length_ratio_at_most`` (with aborted answers), ``aborted_answers``; ``dropped_groups``,
    ``reissued_groups``, ``starved_prompts``, ``starved_longest_s``, ``wasted_token_share``.
    Raises ValueError for runs without rollouts, and for names that do not exist.
    """
    import polars as pl

    shown = arrange(runs, report)
    need_rollouts(shown, "rollouts")
    rows = []
    for labels, cell in _cells(shown):
        told = [run.summary["rollouts"] for run in cell.values()]
        row: dict[str, object] = {**labels, "seeds": len(cell)}
        for name in ("step_s", "tokens_per_second", "generated_tokens_per_second"):
            found = interval(throughput(run, name) for run in cell.values())
            row[name], row[f"{name}_half_width"] = found and found.mean, found and found.half_width
        for who in ("trainer", "servers"):
            for what in next(iter(cell.values())).summary["shares"][who]:
                row[f"{who}_{what}"] = _mean(share_of_time(run, who, what) for run in cell.values())
        for kind in KINDS:
            found_rows = [staleness(run, kind.name) for run in cell.values()]
            there = [each for each in found_rows if each is not None]
            for which in ("mean", "p99", "token_mean"):
                row[f"{kind.name}_{which}"] = _mean(each[which] for each in there)
            row[f"{kind.name}_max"] = _largest(there)
        row["length_ratio"] = _mean(one["length_bias"]["ratio"] for one in told)
        row["length_ratio_at_most"] = _mean(one["length_bias"]["ratio_at_most"] for one in told)
        row["aborted_answers"] = _mean(one["length_bias"]["answers"]["aborted"] for one in told)
        row["dropped_groups"] = _mean(sum(one["conservation"]["groups"]["dropped"].values()) for one in told)
        row["reissued_groups"] = _mean(one["reissues"]["groups"] for one in told)
        row["starved_prompts"] = _mean(one["starvation"]["prompts"] for one in told)
        row["starved_longest_s"] = _mean(one["starvation"]["longest_s"] for one in told)
        row["wasted_token_share"] = _mean(one["waste"]["wasted_share"] for one in told)
        rows.append(row)
    numbers = {name: pl.Float64 for row in rows for name in row if name not in {*_axes(shown), "seeds"}}
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=numbers)


def readable_rollouts(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """`rollouts_table` as text for people, with the definitions of staleness that differ most.

    Raises ValueError as `rollouts_table` does.
    """
    import polars as pl

    shown = arrange(runs, report)
    need_rollouts(shown, "rollouts")
    rows = []
    for labels, cell in _cells(shown):
        told = [run.summary["rollouts"] for run in cell.values()]
        row = dict(labels)
        row["step (s)"] = plus_minus(over_seeds(cell, lambda run: throughput(run, "step_s")))
        row["tokens/s"] = plus_minus(over_seeds(cell, tokens_per_second))
        row["trainer waits"] = _percent(_share(cell, "trainer", "waiting"))
        row["servers idle"] = _percent(_share(cell, "servers", "idle"))
        for name in ("dispatch", "oldest", "newest"):
            found = [each for run in cell.values() if (each := staleness(run, name)) is not None]
            numbers = [*(_mean(each[which] for each in found) for which in ("mean", "p99")), _largest(found)]
            row[f"{name} mean / p99 / max"] = " / ".join(number(one) for one in numbers) if found else "–"
        row["tokens' mean"] = number(_mean(each["token_mean"] for run in cell.values() if (each := _token(run))))
        aborted = any(one["length_bias"]["answers"]["aborted"] for one in told)
        bound = _mean(one["length_bias"]["ratio_at_most"] for one in told)
        ratio = number(over.mean) if (over := over_seeds(cell, length_ratio)) else "–"
        row["trained / generated length"] = f"{ratio} (≤ {number(bound)} with aborted)" if aborted else ratio
        row["dropped groups"] = number(_mean(sum(one["conservation"]["groups"]["dropped"].values()) for one in told))
        row["starved prompts"] = number(_mean(one["starvation"]["prompts"] for one in told))
        row["wasted tokens"] = _percent(_mean(one["waste"]["wasted_share"] for one in told))
        rows.append(row)
    return pl.DataFrame(rows)


ROLLOUTS_LEGEND = (
    "Means over seeds; ±: 95 % t-intervals. Step time and staleness without the warm-up. Staleness in versions, from "
    "dispatch, from the oldest and from the newest token of an answer; tokens' mean weighs by tokens. Lengths: of "
    "answers that ended in groups whose fate is decided. Starved: issued, never trained, and not on the way at the end."
)
"""What must be known to read `readable_rollouts`."""


def _cells(shown: Arrangement) -> Iterator[tuple[dict[str, str], Cell]]:
    for facet in shown.facets:
        for series in shown.series:
            if cell := shown.at(series, facet):
                yield _labels(shown, series, facet), cell


def _labels(shown: Arrangement, series: str, facet: Facet) -> dict[str, str]:
    return dict(zip(_axes(shown), (series, *facet), strict=True))


def _axes(shown: Arrangement) -> list[str]:
    return [shown.report.series, *shown.facet_axes]


def _token(run: Run) -> dict[str, float] | None:
    return staleness(run, "token_mean")


def _share(cell: Cell, who: str, what: str) -> float | None:
    return _mean(share_of_time(run, who, what) for run in cell.values())


def _mean(values: Iterable[float | None]) -> float | None:
    found = interval(values)
    return None if found is None else found.mean


def _largest(rows: Iterable[Mapping[str, float | None]]) -> float | None:
    return max((row["max"] for row in rows if row["max"] is not None), default=None)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
