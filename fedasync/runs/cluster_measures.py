"""What the summary of a cluster's run takes from its tables: throughput, staleness, length bias, prompts, waste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core.log import ADMITTED, CONSUMED, DELIVERED
from fedasync.runs.lease_arrays import Leases, lease_arrays
from fedasync.runs.length_bias import length_bias
from fedasync.runs.prompt_accounts import PromptAccounts, rollout_verdict
from fedasync.runs.record import Record
from fedasync.runs.rollouts import columns_of
from fedasync.runs.staleness_kinds import BOUNDS, older_tokens, staleness_table, trained_answers, trained_rows
from fedasync.runs.step_times import PARTS

if TYPE_CHECKING:
    import polars as pl

BEGUN_AGAIN = "begun again"
"""Why tokens were lost of an answer that was generated anew from its prompt."""
LEFT_OUT = "left out of its group"
"""Why an answer of a trained group was not trained: the group was delivered without it."""
STEP_PARTS = ("train_s", *PARTS.values())
"""Metrics of a step whose means stand beside the step's time."""


def told_by_rollouts(
    events: Record | pl.DataFrame | pl.LazyFrame,
    rollouts: pl.DataFrame | pl.LazyFrame,
    metrics: pl.DataFrame,
    *,
    end_s: float,
    warm_up_versions: int = 0,
    prompts: int | None = None,
    epochs: int | None = None,
) -> dict[str, Any]:
    """The summary's ``rollouts`` of a run that ended at ``end_s``: numbers and texts only.

    ``throughput`` (`throughput`), ``staleness`` (`staleness_table`), ``older_tokens`` (`older_tokens`),
    ``length_bias`` (`length_bias`), ``conservation``, ``starvation`` and ``reissues`` (`PromptAccounts`), ``waste``
    (`waste`), ``verdicts``. Throughput and staleness leave out the first ``warm_up_versions`` steps; all else is of the
    whole run. ``prompts`` is the size of the data set, ``epochs`` how often it is gone through; None is without end.

    Raises ValueError for tables without the columns of docs/log.md.
    """
    leases = lease_arrays(events)
    accounts = PromptAccounts.of(leases)
    names = ("lease", "prompt", "base_version", "first_version", "last_version", "start_s", "end_s")
    verdicts = [
        accounts.verdict(prompts, epochs),
        rollout_verdict(leases, columns_of(rollouts, *names), end_s),
    ]
    if not verdicts[1].holds:  # what follows looks leases up by the table's numbers
        return {"verdicts": [asdict(verdict) for verdict in verdicts]}
    columns = columns_of(rollouts, "lease", "generated_tokens", "lost_tokens", "end_s")
    lease, tokens, ends = columns["lease"], columns["generated_tokens"], columns["end_s"]
    trained = trained_answers(leases, rollouts, from_version=warm_up_versions)
    bounds = older_tokens(trained, BOUNDS)
    return {
        "warm_up_versions": warm_up_versions,
        "throughput": throughput(leases, metrics, int(trained.tokens.sum()), warm_up_versions),
        "staleness": staleness_table(trained),
        "older_tokens": [
            {"versions": bound, "share_at_least": least, "share_at_most": most}
            for bound, (least, most) in zip(BOUNDS, bounds, strict=True)
        ],
        "length_bias": length_bias(leases, lease, tokens, ends),
        "conservation": accounts.conservation(prompts),
        "starvation": accounts.starvation(end_s),
        "reissues": accounts.reissues(),
        "waste": waste(leases, lease, tokens, ends, int(columns["lost_tokens"].sum())),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def throughput(
    leases: Leases, metrics: pl.DataFrame, generated_tokens: int, warm_up_versions: int = 0
) -> dict[str, Any]:
    """What was trained a second, from the commit of version ``warm_up_versions`` (0: the start) to the last commit.

    ``versions``, ``from_s``, ``to_s``; ``tokens`` and ``tokens_per_second`` are effective throughput as the trainer
    counts it (the metric ``tokens``: prompts, answers, what tools said), ``generated_tokens`` and
    ``generated_tokens_per_second`` are of answers alone; ``groups_per_second``; ``step_s`` with ``mean``, ``p50`` and
    ``p95``; means of `STEP_PARTS`. None where there is no step to measure, or no such metric.
    """
    import polars as pl

    commits_s = leases.commits_s
    steps = len(commits_s) - warm_up_versions
    if steps < 1:
        return {"versions": 0, "tokens_per_second": None, "generated_tokens_per_second": None, "step_s": None}
    from_s = float(commits_s[warm_up_versions - 1]) if warm_up_versions else 0.0
    to_s = float(commits_s[-1])
    step_s = np.diff(commits_s[warm_up_versions:], prepend=from_s)
    measured = metrics.filter(pl.col("version") > warm_up_versions)
    by_name = {name: measured.filter(pl.col("name") == name)["value"] for name in ("tokens", *STEP_PARTS)}
    tokens = float(by_name["tokens"].sum()) if len(by_name["tokens"]) else None
    groups = int(np.count_nonzero(leases.used_version >= warm_up_versions))

    def per_second(count: float | None) -> float | None:
        return None if count is None or to_s <= from_s else count / (to_s - from_s)

    return {
        "versions": steps,
        "from_s": from_s,
        "to_s": to_s,
        "tokens": tokens,
        "tokens_per_second": per_second(tokens),
        "generated_tokens": generated_tokens,
        "generated_tokens_per_second": per_second(generated_tokens),
        "groups_per_second": per_second(groups),
        "step_s": {
            "mean": float(step_s.mean()),
            **{f"p{share}": float(np.quantile(step_s, share / 100, method="inverted_cdf")) for share in (50, 95)},
        },
        **{name: float(by_name[name].to_numpy().mean()) if len(by_name[name]) else None for name in STEP_PARTS},
    }


def waste(
    leases: Leases, lease: NDArray[Any], tokens: NDArray[Any], end_s: NDArray[np.float64], lost_tokens: int = 0
) -> dict[str, Any]:
    """Generated tokens: ``trained_tokens``, ``on_the_way_tokens`` (groups that had no end yet), ``wasted_tokens``.

    ``wasted_share`` is of all that was generated; ``by_reason`` says why the tokens were wasted, in the log's words;
    ``lost_tokens`` are of answers that were begun again, beside those of the table.
    """
    total = int(tokens.sum()) + lost_tokens
    trained = trained_rows(leases, lease, end_s)
    used = int(tokens[trained].sum())
    place = leases.place[lease]
    on_the_way = int(tokens[(place == ADMITTED) | (place == DELIVERED)].sum())
    by_lease = np.bincount(lease, np.where(trained, 0, tokens), len(leases)).astype(np.int64)
    by_reason: dict[str, int] = {}
    for each in np.flatnonzero(leases.lost & (by_lease > 0)):
        why = leases.why_lost(int(each))
        by_reason[why] = by_reason.get(why, 0) + int(by_lease[each])
    if left := int(by_lease[leases.place == CONSUMED].sum()):
        by_reason[LEFT_OUT] = left
    if lost_tokens:
        by_reason[BEGUN_AGAIN] = lost_tokens
    wasted = sum(by_reason.values())
    return {
        "generated_tokens": total,
        "trained_tokens": used,
        "on_the_way_tokens": on_the_way,
        "wasted_tokens": wasted,
        "wasted_share": wasted / total if total else 0.0,
        "by_reason": dict(sorted(by_reason.items())),
    }


def shares_text(shares: Mapping[str, float | None]) -> dict[str, str]:
    """Shares of time that are known and not 0, as text for people."""
    return {what: f"{share:.1%}" for what, share in shares.items() if share}
