"""``fedasync compare`` of runs on prompts: step time, throughput, idle shares, staleness."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedasync.report.agreement import total_variation, wasserstein
from fedasync.report.prediction import error_text
from fedasync.report.rollout_numbers import UNITS, numbers
from fedasync.report.statistics import pooled_staleness
from fedasync.runs.run import Run, write
from fedasync.studies.command import console_for_tables
from fedasync.studies.run_folders import name_of, one_strategy

COMPARISON = "compare.json"


@dataclass(frozen=True)
class Side:
    """A number of some runs: its mean, and its standard deviation over them (None of one)."""

    mean: float | None
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Side:
        """Nothing where a run lacks it: a mean over the others would flatter."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return cls(None, None)
        return cls(fmean(known), stdev(known) if len(known) > 1 else None)

    def __str__(self) -> str:
        if self.mean is None:
            return "–"
        return f"{self.mean:.4g}" + ("" if self.spread is None else f" ± {self.spread:.2g}")


def compare_rollouts(real: Sequence[Run], sim: Sequence[Run], out: Path | None) -> int:
    """Print and write (compare.json in ``out``, or the working directory) how far predictions were from runs.

    Returns the exit status 0. Raises StudyError for runs of several strategies.
    """
    strategy = one_strategy([*real, *sim])
    rows = compared(real, sim)
    distance = staleness_distance(real, sim)
    notes = _differences(real[0], sim[0])
    told = {
        "strategy": strategy,
        "real": [name_of(run) for run in real],
        "predicted": [name_of(run) for run in sim],
        "notes": notes,
        "staleness": distance,
        "numbers": rows,
    }
    folder = out or Path()
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / COMPARISON, (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode())
    console = console_for_tables()
    table = Table("", "real", "predicted", "error", title=f"{strategy}: means ± standard deviations over runs")
    for row in rows:
        sides = [str(Side(**row[side])) for side in ("real", "predicted")]
        error = "not compared" if row["error"] is None else error_text(row["error"])
        table.add_row(escape(f"{row['name']} ({row['unit']})"), *sides, error)
    console.print(table)
    said = (
        "staleness: cannot be compared, nothing was trained in one of them"
        if distance is None
        else f"staleness: total variation {distance['total_variation']:.3f}, Wasserstein-1 "
        f"{distance['wasserstein']:.3f} versions"
    )
    for line in [said, *notes, str(folder / COMPARISON)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def compared(real: Sequence[Run], sim: Sequence[Run]) -> list[dict[str, Any]]:
    """name, unit, real, predicted, error (predicted/real − 1), difference."""
    sides = [[numbers(run) for run in runs] for runs in (real, sim)]
    rows = []
    for name, unit in UNITS.items():
        one, other = (Side.of([found[name] for found in side]) for side in sides)
        rows.append(
            {
                "name": name,
                "unit": unit,
                "real": asdict(one),
                "predicted": asdict(other),
                "error": other.mean / one.mean - 1 if one.mean and other.mean is not None else None,
                "difference": other.mean - one.mean if one.mean is not None and other.mean is not None else None,
            }
        )
    return rows


def staleness_distance(real: Sequence[Run], sim: Sequence[Run]) -> dict[str, float] | None:
    """Distances of the pooled histograms; None where nobody trained anything."""
    one, other = (pooled_staleness(run.summary["staleness"]["histogram"] for run in runs) for runs in (real, sim))
    if not one or not other:
        return None
    return {"total_variation": total_variation(one, other), "wasserstein": wasserstein(one, other)}


def _differences(real: Run, sim: Run) -> list[str]:
    """Settings that differ, which the reader should know of: the strategy's, and when a run ends."""
    found = []
    for table, keys in (("strategy", None), ("run", ("versions", "time_s", "updates", "warm_up_versions"))):
        one, other = real.config.get(table), sim.config.get(table)
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            continue
        for key in keys or sorted({*one, *other}):
            if one.get(key) != other.get(key):
                found.append(
                    f"{table}.{key} differs: {one.get(key)!r} in the run, {other.get(key)!r} in the prediction"
                )
    return found
