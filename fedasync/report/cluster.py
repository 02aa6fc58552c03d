"""What a report reads of a cluster's runs: their summaries' ``rollouts`` and ``shares``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fedasync.report.arrangement import Arrangement, Cell
from fedasync.report.statistics import Interval, mean_interval
from fedasync.runs.run import Run


def is_cluster(run: Run) -> bool:
    """Whether the run generated rollouts."""
    return "rollouts" in run.summary


def need_rollouts(shown: Arrangement, figure: str) -> None:
    """Raise ValueError where a run has no rollouts, so that the figure would show nothing of it."""
    for run in shown.runs:
        if not is_cluster(run):
            raise ValueError(
                f"report.figures: {figure!r} needs runs of a cluster; {run.summary['run_id']!r} has no rollouts; "
                "'utilisation' and 'staleness' go with all runs"
            )


def throughput(run: Run, name: str) -> float | None:
    """A number of the summary's throughput; ``step_s`` is the mean."""
    found = run.summary["rollouts"]["throughput"].get(name)
    if isinstance(found, dict):
        found = found["mean"]
    return None if found is None else float(found)


def tokens_per_second(run: Run) -> float | None:
    """Effective throughput; of answers alone where the run has no metric of its trainer's tokens."""
    found = throughput(run, "tokens_per_second")
    return throughput(run, "generated_tokens_per_second") if found is None else found


def share_of_time(run: Run, who: str, what: str) -> float | None:
    """Of the trainer's time, or of servers × time; None where the run ended in its warm-up."""
    found = run.summary["shares"][who].get(what, 0.0)
    return None if found is None else float(found)


def staleness(run: Run, kind: str) -> dict[str, Any] | None:
    """The row of one definition of staleness; None where nothing was trained."""
    return next((row for row in run.summary["rollouts"]["staleness"] if row["kind"] == kind), None)


def length_ratio(run: Run) -> float | None:
    """Mean trained over mean generated length."""
    found = run.summary["rollouts"]["length_bias"]["ratio"]
    return None if found is None else float(found)


def over_seeds(cell: Cell, read: Callable[[Run], float | None]) -> Interval | None:
    """Mean and interval of a number of each run; None where none has it."""
    return interval(read(run) for run in cell.values())


def interval(values: Iterable[float | None]) -> Interval | None:
    """Mean and interval of those that are there; None where none is."""
    known = [value for value in values if value is not None]
    return mean_interval(known) if known else None
