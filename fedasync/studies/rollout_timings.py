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
from fedasync.runs.server_rounds import ANSWERS, Rounds, by_version, written_s

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
    if "train_s" not in run.metrics["name"].to_list():
        raise ValueError("its metrics have no 'train_s'")
    train_s, sync_s, evaluate_s, measure_s, save_s = (
        by_version(run.metrics, f"{name}_s", len(commits)) for name in ("train", "sync", "evaluate", "measure", "save")
    )
    trained_s = commits - measure_s
    began_s = trained_s - train_s
    free_s = np.concatenate([[0.0], commits[:-1]]) + sync_s
    other = np.concatenate([[0.0], evaluate_s + save_s])[: len(commits)] > 0  # before this step, or after it
    settled = ~(other | np.concatenate([[False], other[:-1]]))
    late = np.arange(len(commits)) >= warm_up
    delivered = np.full(len(commits), -np.inf)
    used = leases.used_version >= 0
    np.maximum.at(delivered, leases.used_version[used], leases.delivered_s[used])
    latency = began_s - np.maximum(free_s, delivered)
    from_s = float(commits[warm_up - 1]) if warm_up else 0.0
    if run.rollouts is None:
        raise ValueError("no rollouts here")
    if run.iterations is None or run.iterations.is_empty():
        raise ValueError("no iterations here, so nothing says how long decoding took")
    answers = columns_of(run.rollouts, *ANSWERS, "generated_tokens", "prompt_tokens")
    weights_s = written_s(leases, sync_s)
    rounds = Rounds.of(run.iterations, leases, answers)
    training = np.stack([began_s, trained_s], axis=1)
    after = rounds.begin_s >= from_s
    overlapped = _overlap(rounds.at_s - rounds.seconds, rounds.at_s, training) > 0.5 * rounds.seconds
    prefilled = after & (rounds.prefill_tokens > 0)
    between = after & rounds.undisturbed(weights_s)
    whole = np.isfinite(answers["end_s"]) & ~np.isnan(leases.delivered_s[answers["lease"]])
    whole = np.flatnonzero(whole)[np.argsort(answers["lease"][whole], kind="stable")]
    lease = answers["lease"][whole].astype(np.int64)
    return Timings(
        step_s=train_s[late],
        step_tokens=_step_tokens(leases, answers, len(commits))[late],
        step_overlap=_busy_share(rounds, training)[late],
        sync_s=sync_s[late & (np.arange(len(commits)) > 0)],
        latency_s=np.maximum(latency[late & settled & np.isfinite(latency)], 0.0),
        evaluate_s=evaluate_s[evaluate_s > 0],
        load_s=rounds.pauses(weights_s, from_s).seconds,
        reward_s=_reward_s(leases, answers, warm_up),
        decode_s=rounds.seconds[after],
        decode_running=rounds.running[after],
        decode_context=rounds.context[after],
        decode_overlapped=overlapped[after],
        prefill_s=rounds.prefill_s[prefilled],
        prefill_tokens=rounds.prefill_tokens[prefilled],
        prefill_overlapped=overlapped[prefilled],
        loop_s=rounds.gap_s[between],
        loop_running=rounds.running[between],
        lease=lease,
        tokens=answers["generated_tokens"][whole].astype(np.float64),
        prompt_tokens=answers["prompt_tokens"][whole].astype(np.float64),
        version=leases.base_version[lease].astype(np.float64),
    )


def _step_tokens(leases: Leases, answers: Mapping[str, NDArray[Any]], steps: int) -> Floats:
    """Tokens of each step's answers, with their prompts."""
    used = leases.used_version[answers["lease"]]
    trained = (used >= 0) & np.isfinite(answers["end_s"])
    tokens = answers["generated_tokens"] + answers["prompt_tokens"]
    found: Floats = np.bincount(used[trained], tokens[trained], steps).astype(np.float64)[:steps]
    return found


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


def _busy_share(rounds: Rounds, spans: Floats) -> Floats:
    """The share of each of ``spans`` in which some server was at a decoding step (prefills count as such)."""
    spent = np.zeros(len(spans))
    for each in np.unique(rounds.server):
        rows = rounds.server == each
        start_s = rounds.begin_s[rows]
        edges = np.stack([start_s, np.maximum(rounds.at_s[rows], start_s)], axis=1).reshape(-1)
        edges = np.maximum.accumulate(edges)
        spent = np.maximum(spent, _overlap(spans[:, 0], spans[:, 1], edges.reshape(-1, 2)))
    whole = np.maximum(spans[:, 1] - spans[:, 0], 1e-12)
    return np.clip(spent / whole, 0.0, 1.0)
