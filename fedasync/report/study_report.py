"""Everything a study's folder shows of its runs: tables and figures."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedasync.report.arrangement import Runs, arrange
from fedasync.report.claims import claims_table
from fedasync.report.cluster import is_cluster
from fedasync.report.cluster_figures import length_bias, shares, staleness_kinds
from fedasync.report.cluster_timeline import cluster_timeline
from fedasync.report.figures import metric_over_time, staleness, utilisation
from fedasync.report.final_by_axis import FINAL_LEGEND, final_by_axis, final_table, readable_final
from fedasync.report.learning_curves import learning_curves
from fedasync.report.published import beside, order_text, published_table, readable_published
from fedasync.report.ranking import ranking_table, readable_ranking
from fedasync.report.ranking_figure import ranking
from fedasync.report.rollouts_table import ROLLOUTS_LEGEND, readable_rollouts, rollouts_table
from fedasync.report.spec import Report
from fedasync.report.speedup import speedup, speedup_by_axis
from fedasync.report.style import seeds_text, styled
from fedasync.report.table import markdown, readable_table, summary_table, write_table
from fedasync.report.throughput_figure import throughput_by_axis
from fedasync.report.timeline import timeline
from fedasync.report.wording import LEGEND, RANKING_LEGEND
from fedasync.runs.run import write

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure


def write_report(
    runs: Runs,
    report: Report,
    folder: Path,
    command: str,
    title: str,
    ceilings: Mapping[str, float] | None = None,
    extra_tables: Mapping[str, pl.DataFrame] | None = None,
    note: str = "",
    calibration: str = "",
) -> list[Path]:
    """Write table.csv, table.md and figures/NAME.png and .svg into ``folder``; return their paths in that order.

    ``command`` repeats the study and stands in every figure. ``ceilings`` (label of the x axis → bound) go to
    ``speedup_by_axis``, which is drawn once more for each other baseline that a claim names; the table ``claims``
    says where published figures are reached; ``ranking`` is a table too, and is drawn once more by time where there
    is a target; ``final_by_axis`` is the table ``final`` too. Where all runs are a cluster's, the table ``rollouts`` is
    written, and ``shares`` stands in for ``utilisation``. ``report.published`` makes the table ``published``, below
    which ``calibration`` says what was fitted. ``extra_tables`` are written as NAME.csv and NAME.md; ``note`` stands
    below the table.
    The same runs give the same bytes. Raises ValueError, before anything is written, for names that do not exist.
    """
    shown = arrange(runs, report)
    shown.metric()
    table = summary_table(runs, report)
    by_axis = partial(speedup_by_axis, ceilings=ceilings, references=_references(report, report.baseline))
    draw: dict[str, Callable[..., Figure]] = {
        "metric_over_time": metric_over_time,
        "speedup": speedup,
        "staleness": staleness,
        "utilisation": utilisation,
        "timeline": timeline,
        "speedup_by_axis": by_axis,
        "ranking": ranking,
        "throughput_by_axis": throughput_by_axis,
        "shares": shares,
        "length_bias": length_bias,
        "staleness_kinds": staleness_kinds,
        "cluster_timeline": cluster_timeline,
        "learning_curves": learning_curves,
        "final_by_axis": final_by_axis,
    }
    of_a_cluster = all(is_cluster(run) for run in shown.runs)
    asked = ["shares" if name == "utilisation" and of_a_cluster else name for name in report.figures]
    drawn: dict[str, Figure] = {name: draw[name](runs, report, command=command) for name in asked if name in draw}
    if "ranking" in report.figures and shown.target() is not None:
        drawn["ranking_by_time"] = ranking(runs, report, by="time", command=command)
    for base in dict.fromkeys(claim.over for claim in report.claims if claim.over != report.baseline):
        name = f"speedup_by_axis_over_{re.sub(r'[^a-z0-9]+', '_', base.lower()).strip('_')}"
        lines = _references(report, base)
        drawn[name] = speedup_by_axis(runs, replace(report, baseline=base), references=lines, command=command)

    written = write_table(table, folder, "table", _page(runs, report, title, command, shown.seeds, note))
    tables = {**(extra_tables or {})}
    if report.claims:
        tables["claims"] = claims_table(runs, report, ceilings)
    for name, extra in tables.items():
        written += write_table(extra, folder, name)
    if "ranking" in report.figures:
        page = f"# {title}: ranking\n\n{markdown(readable_ranking(runs, report))}\n{RANKING_LEGEND}\n\n`{command}`\n"
        written += write_table(ranking_table(runs, report), folder, "ranking", page)
    if "final_by_axis" in report.figures:
        page = f"# {title}: in the end\n\n{markdown(readable_final(runs, report))}\n{FINAL_LEGEND}\n\n`{command}`\n"
        written += write_table(final_table(runs, report), folder, "final", page)
    if of_a_cluster:
        page = f"# {title}: rollouts\n\n{markdown(readable_rollouts(runs, report))}\n{ROLLOUTS_LEGEND}\n\n`{command}`\n"
        written += write_table(rollouts_table(runs, report), folder, "rollouts", page)
    if report.published:
        page = _published_page(runs, report, title, command, calibration)
        written += write_table(published_table(runs, report), folder, "published", page)
    for name, figure in drawn.items():
        written += save(figure, folder / "figures", name)
    return written


def _references(report: Report, base: str | None) -> list[tuple[float, str]]:
    return [(claim.times, f"{claim.series}: {claim.source}") for claim in report.claims if claim.over == base]


@styled
def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg, byte for byte the same each time; return the two paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix in ("png", "svg"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
        path = folder / f"{name}.{suffix}"
        write(path, buffer.getvalue())
        paths.append(path)
    return paths


def _page(runs: Runs, report: Report, title: str, command: str, seeds: Sequence[int], note: str) -> str:
    meaning = f"Means over seeds; ±: 95 % t-intervals of a mean by itself. {LEGEND} " if len(seeds) > 1 else ""
    return (
        f"# {title}\n\n{markdown(readable_table(runs, report))}\n"
        f"{seeds_text(seeds)} {meaning}Staleness in versions, of consumed contributions, pooled over seeds; "
        "useful and wasted as shares of slots × time; ≥ and ≤: the run's end bounds the time of a missed target."
        + "\n\n".join(["", *filter(None, [note]), f"`{command}`\n"])
    )


def _published_page(runs: Runs, report: Report, title: str, command: str, calibration: str) -> str:
    shown = arrange(runs, report)
    parts = [f"# {title}: predicted beside published", markdown(readable_published(runs, report)).rstrip("\n")]
    if report.x_axis is not None:
        found = beside(shown.runs, report.published)
        ordered = [one for one in found if report.x_axis in one.point.labels and one.point.over is None]
        parts += [order_text(ordered)] if len(ordered) > 1 else []
    parts += filter(None, [calibration, seeds_text(shown.seeds), f"`{command}`"])
    return "\n\n".join(parts) + "\n"
