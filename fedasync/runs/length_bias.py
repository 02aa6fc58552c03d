"""Length bias: whether the answers that are trained are as long as those that are generated.

Compared are answers whose fate is decided: their group was consumed, rejected, failed or cancelled. What was in flight
or buffered when the run ended is left out on both sides. An instant falls rather into a long answer than into a short
one, so what the end cuts off is longer than the rest; counted as generated it would show a bias in runs that train all
they make. Left out, such a run has the ratio 1 exactly. The price: of the longest answers a short run decides few, and
neither side has them. A run should last many times its longest answer.

Answers that were aborted (stopped before they ended, in a group that was given up or delivered short) have a length
that nobody knows, but at least what they had generated. They are apart: ``ratio`` is without them, and
``ratio_at_most`` counts them with what they had, an upper end of the ratio to all that was begun. A rule that aborts in
flight shows its bias there, and only there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.runs.lease_arrays import Leases
from fedasync.runs.staleness_kinds import trained_rows

SHARES = (0.1, 0.5, 0.9, 0.99)
"""Quantiles of length that are compared."""


def length_bias(
    leases: Leases, lease: NDArray[Any], tokens: NDArray[Any], end_s: NDArray[np.float64]
) -> dict[str, Any]:
    """Trained against generated length in tokens; arrays are columns of the table of rollouts ``[answers]``.

    ``answers``: how many ``generated`` (ended, and decided) were ``trained`` and ``dropped``, how many were ``aborted``
    and ``undecided``. ``generated_mean_tokens``, ``trained_mean_tokens``, ``dropped_mean_tokens``; ``ratio`` and
    ``dropped_ratio`` of these means to the generated one; ``ratio_at_most``. ``quantiles`` compares those of `SHARES`.
    ``deciles`` cut the generated lengths in ten: of each part the share of the generated and of the trained answers,
    and their ratio. Equal lengths lie in one part, so that parts may be unequal, or empty (ratio None).
    A number of what is not there is None.
    """
    lost, consumed = leases.lost[lease], leases.consumed[lease]
    decided = lost | consumed
    ended = np.isfinite(end_s)
    trained = trained_rows(leases, lease, end_s)
    generated = decided & ended
    aborted = decided & ~ended
    lengths, trained_lengths = np.sort(tokens[generated]), np.sort(tokens[trained])
    dropped_lengths = tokens[generated & ~trained]
    mean, trained_mean, dropped_mean = _mean(lengths), _mean(trained_lengths), _mean(dropped_lengths)
    begun = np.concatenate([lengths, tokens[aborted]])
    return {
        "answers": {
            "generated": len(lengths),
            "trained": len(trained_lengths),
            "dropped": len(dropped_lengths),
            "aborted": int(np.count_nonzero(aborted)),
            "undecided": int(np.count_nonzero(~decided)),
        },
        "generated_mean_tokens": mean,
        "trained_mean_tokens": trained_mean,
        "dropped_mean_tokens": dropped_mean,
        "ratio": _over(trained_mean, mean),
        "ratio_at_most": _over(trained_mean, _mean(begun)),
        "dropped_ratio": _over(dropped_mean, mean),
        "quantiles": [_quantile(share, lengths, trained_lengths) for share in SHARES if len(lengths)],
        "deciles": _deciles(lengths, trained_lengths),
    }


def _deciles(lengths: NDArray[Any], trained: NDArray[Any]) -> list[dict[str, float | None]]:
    if not len(lengths):
        return []
    count = len(lengths)
    ends = lengths[[-(-count * tenth // 10) - 1 for tenth in range(1, 11)]]  # the smallest that a share does not exceed
    up_to = np.searchsorted(lengths, ends, side="right")
    trained_up_to = np.searchsorted(trained, ends, side="right")
    found: list[dict[str, float | None]] = []
    for part in range(10):
        before, trained_before = (up_to[part - 1], trained_up_to[part - 1]) if part else (0, 0)
        share = float(up_to[part] - before) / count
        own = float(trained_up_to[part] - trained_before) / len(trained) if len(trained) else None
        found.append(
            {
                "to_tokens": int(ends[part]),
                "generated_share": share,
                "trained_share": own,
                "ratio": _over(own, share),
            }
        )
    return found


def _quantile(share: float, lengths: NDArray[Any], trained: NDArray[Any]) -> dict[str, float | None]:
    of_all, of_trained = (
        float(np.quantile(some, share, method="inverted_cdf")) if len(some) else None for some in (lengths, trained)
    )
    return {"share": share, "generated": of_all, "trained": of_trained, "ratio": _over(of_trained, of_all)}


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _over(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
