"""The times that a run on prompts recorded, taken apart: what a step is made of, and what lies between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.runs.lease_arrays import Leases, lease_arrays
from fedasync.runs.rollouts import columns_of
from fedasync.runs.run import Run

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Timings:
    """Of one run, after its warm-up (but for answers). Arrays of one prefix have one length.

    step_*: by committed step: seconds of training, tokens of the batch, share of it beside which somebody generated.
    sync_s: writing the weights; latency_s: from what a step needs being there (and the trainer free) to its beginning.
    evaluate_s: evaluations. load_s: by publication and server: from the weights being there to the first iteration.
    reward_s: by group, from its last token to its delivery.
    decode_*, prefill_*: by iteration; overlapped: it ran beside training. loop_*: pauses between two iterations.
    tokens, prompt_tokens, version: by answer of any whole group, in the order of leases; ``lease``: whose.
    """

    step_s: Floats
    step_tokens: Floats
    step_overlap: Floats
    sync_s: Floats
    latency_s: Floats
    evaluate_s: Floats
    load_s: Floats
    reward_s: Floats
    decode_s: Floats
    decode_running: Floats
    decode_context: Floats
    decode_overlapped: Bools
    prefill_s: Floats
    prefill_tokens: Floats
    prefill_overlapped: Bools
    loop_s: Floats
    loop_running: Floats
    lease: NDArray[np.int64]
    tokens: Floats
    prompt_tokens: Floats
    version: Floats


def timings(run: Run, warm_up: int) -> Timings:
    """Raises ValueError for tables that do not hold what is needed, and for a run without steps after its warm-up."""
    leases = lease_arrays(run.events)
    commits = leases.commits_s
    if len(commits) <= warm_up:
        raise ValueError(f"{len(commits)} versions were made, and the first {warm_up} are left out as warm-up")
    by_name = _metrics(run, len(commits))
    train_s, sync_s = by_name["train_s"], by_name["sync_s"]
    began_s = commits - train_s
    free_s = np.concatenate([[0.0], commits[:-1]]) + sync_s
    evaluated = np.concatenate([[0.0], by_name["evaluate_s"]])[: len(commits)] > 0  # before this step, or after it
    settled = ~(evaluated | np.concatenate([[False], evaluated[:-1]]))
    late = np.arange(len(commits)) >= warm_up
    delivered = np.full(len(commits), -np.inf)
    used = leases.used_version >= 0
    np.maximum.at(delivered, leases.used_version[used], leases.delivered_s[used])
    latency = began_s - np.maximum(free_s, delivered)
    from_s = float(commits[warm_up - 1]) if warm_up else 0.0
    if run.rollouts is None:
        raise ValueError("no rollouts here")
    answers = columns_of(
        run.rollouts,
        *("lease", "server", "start_s", "end_s", "generated_tokens", "prompt_tokens"),
    )
    published_s = _published_s(leases, sync_s)
    parts = _Iterations.of(run, leases, answers, published_s, from_s)
    training = np.stack([began_s, commits], axis=1)
    after = parts.at_s - parts.seconds - parts.prefill_s >= from_s
    overlapped = _overlap(parts.at_s - parts.seconds, parts.at_s, training) > 0.5 * parts.seconds
    prefilled = after & (parts.prefill_tokens > 0)
    whole = np.isfinite(answers["end_s"]) & ~np.isnan(leases.delivered_s[answers["lease"]])
    whole = np.flatnonzero(whole)[np.argsort(answers["lease"][whole], kind="stable")]
    lease = answers["lease"][whole].astype(np.int64)
    return Timings(
        step_s=train_s[late],
        step_tokens=_step_tokens(leases, answers, len(commits))[late],
        step_overlap=parts.busy_share(training)[late],
        sync_s=sync_s[late & (np.arange(len(commits)) > 0)],
        latency_s=np.maximum(latency[late & settled & np.isfinite(latency)], 0.0),
        evaluate_s=by_name["evaluate_s"][by_name["evaluate_s"] > 0],
        load_s=parts.load_s(published_s[published_s >= from_s]),
        reward_s=_reward_s(leases, answers, warm_up),
        decode_s=parts.seconds[after],
        decode_running=parts.running[after],
        decode_context=parts.context[after],
        decode_overlapped=overlapped[after],
        prefill_s=parts.prefill_s[prefilled],
        prefill_tokens=parts.prefill_tokens[prefilled],
        prefill_overlapped=overlapped[prefilled],
        loop_s=parts.gap_s[after & parts.goes_on],
        loop_running=parts.running[after & parts.goes_on],
        lease=lease,
        tokens=answers["generated_tokens"][whole].astype(np.float64),
        prompt_tokens=answers["prompt_tokens"][whole].astype(np.float64),
        version=leases.base_version[lease].astype(np.float64),
    )


def _metrics(run: Run, versions: int) -> dict[str, Floats]:
    """By committed version; what a version has no value of is 0."""
    import polars as pl

    found = {}
    for name in ("train_s", "sync_s", "evaluate_s"):
        rows = run.metrics.filter((pl.col("name") == name) & (pl.col("version") <= versions))
        if rows.is_empty() and name == "train_s":
            raise ValueError("its metrics have no 'train_s'")
        values = np.zeros(versions)
        values[rows["version"].to_numpy() - 1] = rows["value"].to_numpy()
        found[name] = values
    return found


def _step_tokens(leases: Leases, answers: Mapping[str, NDArray[Any]], steps: int) -> Floats:
    """Tokens of each step's answers, with their prompts."""
    used = leases.used_version[answers["lease"]]
    trained = (used >= 0) & np.isfinite(answers["end_s"])
    tokens = answers["generated_tokens"] + answers["prompt_tokens"]
    found: Floats = np.bincount(used[trained], tokens[trained], steps).astype(np.float64)[:steps]
    return found


def _published_s(leases: Leases, sync_s: Floats) -> Floats:
    """When weights of versions ≥ 1 were where servers find them."""
    made = leases.published_version >= 1
    version = leases.published_version[made]
    known = version < len(sync_s)  # the next step tells how long they took
    return (leases.published_s[made][known] + sync_s[version[known]]).astype(np.float64)


def _reward_s(leases: Leases, answers: Mapping[str, NDArray[Any]], warm_up: int) -> Floats:
    last = np.full(len(leases), -np.inf)
    ended = np.isfinite(answers["end_s"])
    np.maximum.at(last, answers["lease"][ended], answers["end_s"][ended])
    seconds = leases.delivered_s - last
    found: Floats = np.maximum(seconds[np.isfinite(seconds) & (leases.base_version >= warm_up)], 0.0)
    return found


def _overlap(start_s: Floats, end_s: Floats, spans: Floats) -> Floats:
    """Seconds of each interval that lie in ``spans`` [n, 2], which do not overlap and are in order."""
    edges = spans.reshape(-1)
    inside = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0))])

    def until(at_s: Floats) -> Floats:
        found: Floats = np.interp(at_s, edges, inside)
        return found

    return until(end_s) - until(start_s)


@dataclass(frozen=True)
class _Iterations:
    """Decoding steps by server and time, with the pause before each, and whether answers went on through it."""

    server: NDArray[np.int64]
    at_s: Floats
    running: Floats
    context: Floats
    seconds: Floats
    prefill_tokens: Floats
    prefill_s: Floats
    gap_s: Floats
    since_s: Floats
    """From when on the next iteration could have begun: the end of the one before, or the first request."""
    goes_on: Bools
    """Answers went on through the pause before, and no weights came in it."""

    @classmethod
    def of(
        cls,
        run: Run,
        leases: Leases,
        answers: Mapping[str, NDArray[Any]],
        published_s: Floats,
        from_s: float,
    ) -> _Iterations:
        table = run.iterations
        if table is None or table.is_empty():
            raise ValueError("no iterations here, so nothing says how long decoding took")
        table = table.sort("server", "at_s")
        at_s, server = table["at_s"].to_numpy(), table["server"].to_numpy().astype(np.int64)
        seconds, prefill_s = table["seconds"].to_numpy(), table["prefill_s"].to_numpy()
        begin_s = at_s - seconds - prefill_s
        gap_s, since_s = np.full(len(at_s), np.nan), np.full(len(at_s), np.inf)
        goes_on = np.zeros(len(at_s), np.bool_)
        for each in np.unique(server):
            rows = np.flatnonzero(server == each)
            before = np.concatenate([[-np.inf], at_s[rows][:-1]])
            mine = (answers["server"] == each) & np.isfinite(answers["end_s"])
            starts, ends = np.sort(answers["start_s"][mine]), np.sort(answers["end_s"][mine])
            begun = np.searchsorted(starts, before, side="right")
            over = np.searchsorted(ends, begin_s[rows] - 1e-12, side="left")
            gap_s[rows] = begin_s[rows] - before
            goes_on[rows] = (begun - over > 0) & (gap_s[rows] >= 0)
            order = np.argsort(answers["start_s"][mine], kind="stable")
            asked = np.concatenate([leases.admitted_s[answers["lease"][mine]][order], [np.inf]])
            # Where nobody went on: whose request came first of those that began now.
            since_s[rows] = np.where(goes_on[rows], before, np.maximum(before, asked[np.minimum(begun, len(order))]))
            for at in np.searchsorted(begin_s[rows], published_s):  # weights come in this pause, or in the next
                goes_on[rows[max(0, at - 1) : at + 2]] &= False
        return cls(
            server,
            at_s,
            table["running"].to_numpy().astype(np.float64),
            table["context_tokens"].to_numpy().astype(np.float64),
            seconds,
            table["prefill_tokens"].to_numpy().astype(np.float64),
            prefill_s,
            gap_s,
            since_s,
            goes_on & np.isfinite(gap_s),
        )

    def load_s(self, published_s: Floats) -> Floats:
        """Seconds that servers stood still for new weights: the longer of the two pauses after them."""
        usual_s = float(self.gap_s[self.goes_on].mean()) if self.goes_on.any() else 0.0
        found = []
        for each in np.unique(self.server):
            rows = np.flatnonzero(self.server == each)
            begin_s = self.at_s[rows] - self.seconds[rows] - self.prefill_s[rows]
            firsts = np.searchsorted(begin_s, published_s)
            nexts = np.append(firsts[1:], len(rows))
            for weights_s, first, following in zip(published_s, firsts, nexts, strict=True):
                if first == following:
                    continue  # nothing was generated under them
                pauses = [
                    begin_s[i] - max(weights_s, self.since_s[rows[i]]) for i in range(first, min(first + 2, following))
                ]
                found.append(max(0.0, max(pauses) - (usual_s if self.since_s[rows[first]] < weights_s else 0.0)))
        return np.array(found, np.float64)

    def busy_share(self, spans: Floats) -> Floats:
        """The share of each of ``spans`` in which some server was at an iteration (their pauses count as such)."""
        spent = np.zeros(len(spans))
        for each in np.unique(self.server):
            rows = self.server == each
            start_s = (self.at_s - self.seconds - self.prefill_s)[rows]
            edges = np.stack([start_s, np.maximum(self.at_s[rows], start_s)], axis=1).reshape(-1)
            edges = np.maximum.accumulate(edges)
            spent = np.maximum(spent, _overlap(spans[:, 0], spans[:, 1], edges.reshape(-1, 2)))
        whole = np.maximum(spans[:, 1] - spans[:, 0], 1e-12)
        return np.clip(spent / whole, 0.0, 1.0)
