"""What a federated run came to: its summary and its metrics, told by the log, whatever clock it ran under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.core import Sliding, Strategy
from fedasync.federated.driver import Driver
from fedasync.federated.evaluation import Evaluations
from fedasync.runs.measures import last_and_best
from fedasync.runs.privacy import spent
from fedasync.runs.record import Record
from fedasync.runs.summary import told_by_the_log

if TYPE_CHECKING:
    import polars as pl


class BrokenLawError(AssertionError):
    """A run's log contradicts a law that holds for every run: a fault of the runtime, never of its input."""


def summarise(
    driver: Driver,
    record: Record,
    evaluations: Evaluations,
    *,
    end_s: float,
    server_busy_s: float,
    targets: Mapping[str, float],
    seed: int,
    name: str | None,
    study: str,
    labels: Mapping[str, str],
    timing_only: bool,
) -> tuple[dict[str, Any], pl.DataFrame]:
    """A run's summary (docs/log.md) and its table of metrics. ``record`` is complete.

    Raises BrokenLawError when the log breaks a law of every run.
    """
    coordinator = driver.coordinator
    strategy, ledger = coordinator.strategy, coordinator.ledger.as_dict()
    metrics = metric_table(evaluations)
    last, best = last_and_best(metrics)
    told = told_by_the_log(
        record.chunks(),
        ledger,
        metrics,
        end_s=end_s,
        slots=strategy.admission.most_in_flight,
        max_staleness=strategy.max_staleness,
        server_busy_s=server_busy_s,
        target=targets,
    )
    summary: dict[str, Any] = {
        "run_id": name or f"{strategy.name}-seed{seed}",
        "study": study,
        "seed": seed,
        "labels": dict(labels),
        "strategy": strategy.name,
        "timing_only": timing_only,
        "time_s": end_s,
        "ended": driver.ended,
        "versions": coordinator.version,
        "publications": coordinator.publications,
        "checks": coordinator.checks,
        "admitted": coordinator.ledger.admitted,
        "consumed": coordinator.ledger.consumed,
        "ledger": ledger,
        **told,
        "final": last,
        "best": best,
        "unfit": [asdict(unfit) for unfit in driver.unfit],
        "unfit_total": driver.unfit_total,
    }
    if (privacy := _privacy(strategy, record)) is not None:
        summary["privacy"] = privacy
    if broken := [f"{v['name']}: {v['detail']}" for v in summary["verdicts"] if not v["holds"]]:
        raise BrokenLawError(f"the run breaks its own laws: {'; '.join(broken)}")
    return summary, metrics


def metric_table(evaluations: Evaluations) -> pl.DataFrame:
    """The evaluations as a table: time_s, version, name, value."""
    import polars as pl

    return pl.DataFrame(
        {
            "time_s": np.array(evaluations.time_s, np.float64),
            "version": np.array(evaluations.version, np.int64),
            "name": pl.Series(evaluations.name, dtype=pl.String),
            "value": np.array(evaluations.value, np.float64),
        }
    )


def _privacy(strategy: Strategy, record: Record) -> dict[str, Any] | None:
    """What was asked for and what was used, for the accountant; None for a run without noise."""
    privacy = getattr(strategy.update, "privacy", None)
    if privacy is None or not privacy.noise_multiplier:
        return None
    window = strategy.buffer.size if isinstance(strategy.buffer, Sliding) else None
    return {**asdict(privacy), "clip_norm": strategy.clip_norm, **asdict(spent(record.chunks(), window))}
