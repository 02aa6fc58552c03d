"""The summary of a run on prompts, simulated or real: what its log, its answers and its steps tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedasync.core import Coordinator
from fedasync.runs.cluster_measures import told_by_rollouts
from fedasync.runs.measures import last_and_best
from fedasync.runs.record import Record
from fedasync.runs.summary import told_by_the_log

if TYPE_CHECKING:
    import polars as pl

MOST_INCIDENTS = 100
"""Incidents that a summary tells one by one; all are counted."""


def rollout_summary(
    coordinator: Coordinator,
    record: Record,
    rollouts: pl.DataFrame,
    metrics: pl.DataFrame,
    *,
    end_s: float,
    ended: str,
    training_s: float,
    warm_up_versions: int,
    prompts: int | None,
    epochs: int | None,
    target: Mapping[str, float],
    incidents: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Whatever of a summary does not depend on who made the run; ``broken`` lists the laws that it breaks, in words.

    ``training_s`` is the time in steps, ``prompts`` the size of the data set, which is gone through ``epochs`` times.
    """
    strategy = coordinator.strategy
    ledger = coordinator.ledger.as_dict()
    last, best = last_and_best(metrics)
    told = told_by_the_log(
        record.chunks(),
        ledger,
        metrics,
        end_s=end_s,
        slots=strategy.admission.most_in_flight,
        max_staleness=strategy.max_staleness,
        server_busy_s=training_s,
        target=target,
    )
    by_answers = told_by_rollouts(
        record,
        rollouts,
        metrics,
        end_s=end_s,
        warm_up_versions=warm_up_versions,
        prompts=prompts,
        epochs=epochs,
    )
    verdicts = [*told.pop("verdicts"), *by_answers.pop("verdicts")]
    return {
        "strategy": strategy.name,
        "time_s": end_s,
        "ended": ended,
        "versions": coordinator.version,
        "admitted": coordinator.ledger.admitted,
        "consumed": coordinator.ledger.consumed,
        "ledger": ledger,
        "verdicts": verdicts,
        **told,
        "final": last,
        "best": best,
        "publications": coordinator.publications,
        "checks": coordinator.checks,
        "rollouts": by_answers,
        "incidents": list(_told(incidents)),
        "incidents_total": len(incidents),
        "unfit": [],
        "unfit_total": 0,
        "not_batched": None,
        "closed_forms": [],
    }


def broken_laws(summary: Mapping[str, Any]) -> list[str]:
    """The laws that a run breaks, and how."""
    return [f"{verdict['name']}: {verdict['detail']}" for verdict in summary["verdicts"] if not verdict["holds"]]


def _told(incidents: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The first, and the last, which may say why nothing was measured."""
    return incidents if len(incidents) <= MOST_INCIDENTS else [*incidents[: MOST_INCIDENTS - 1], incidents[-1]]
