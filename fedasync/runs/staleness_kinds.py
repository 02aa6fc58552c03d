"""The field's definitions of staleness, each as a function of one log: events and rollouts.

Systems mean different things by one word: they count from dispatch, from the oldest or from the newest token, in
versions, publications, samples, or seconds, and of an answer, a token, or a batch. A step that starts from version v
trains v + 1; staleness is v minus the version counted from, so that 0 is on-policy everywhere here. Names of systems
say who uses a definition, as their manuals and code did when they were read; details differ (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedasync.runs.lease_arrays import Leases, lease_arrays
from fedasync.runs.record import Record
from fedasync.runs.rollouts import columns_of

if TYPE_CHECKING:
    import polars as pl

Values = NDArray[Any]


@dataclass(frozen=True)
class Trained:
    """The answers that were trained, in the table's order: arrays ``[answers]``, and the leases that they index.

    An answer is trained when its group was consumed and it had ended before the group was delivered: a short group
    leaves out those that had not.
    """

    leases: Leases
    lease: Values
    tokens: Values
    first: Values
    last: Values
    mean: Values
    end_s: Values
    segments: Values
    samples: Values
    """``[versions + 1]``: answers that a version had been trained on, of the whole run."""

    def __len__(self) -> int:
        return len(self.lease)

    @property
    def used(self) -> Values:
        """The version that the answer's step started from."""
        return self.leases.used_version[self.lease]

    @property
    def base(self) -> Values:
        """The version that its lease was given out at."""
        return self.leases.base_version[self.lease]


def trained_rows(leases: Leases, lease: NDArray[Any], end_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows of a table of rollouts were trained ``[answers]``."""
    trained: NDArray[np.bool_] = leases.consumed[lease] & (end_s <= leases.delivered_s[lease])
    return trained


def trained_answers(
    log: Record | pl.DataFrame | pl.LazyFrame | Leases,
    rollouts: pl.DataFrame | pl.LazyFrame,
    *,
    from_version: int = 0,
) -> Trained:
    """The trained answers of a run, of the steps that start from ``from_version`` or later.

    Raises ValueError for tables without the columns of docs/log.md.
    """
    leases = log if isinstance(log, Leases) else lease_arrays(log)
    found = columns_of(rollouts, "lease", "end_s")
    at = np.flatnonzero(trained_rows(leases, found["lease"], found["end_s"]))
    used = leases.used_version[found["lease"][at]]
    by_step = np.bincount(used, minlength=len(leases.commits_s))
    if from_version:
        at = at[used >= from_version]

    def column(name: str) -> NDArray[Any]:
        return found[name][at] if name in found else columns_of(rollouts, name)[name][at]

    return Trained(
        leases,
        lease=column("lease"),
        tokens=column("generated_tokens"),
        first=column("first_version"),
        last=column("last_version"),
        mean=column("mean_version"),
        end_s=column("end_s"),
        segments=column("segments"),
        samples=np.concatenate([[0], np.cumsum(by_step)]),
    )


# -- versions, an answer each ----------------------------------------------------------------------------------------


def dispatch(trained: Trained) -> Values:
    """Versions from the one that the group was dispatched under, whatever generated its tokens."""
    return trained.used - trained.base


def before_delivery(trained: Trained) -> Values:
    """The part of `dispatch` up to the delivery of the group: the log's ``delivered.staleness``."""
    return trained.leases.delivered_version[trained.lease] - trained.base


def in_queue(trained: Trained) -> Values:
    """Versions committed while the group lay in the buffer: the other part, of `dispatch` as of `oldest`."""
    return trained.used - trained.leases.delivered_version[trained.lease]


def oldest(trained: Trained) -> Values:
    """Versions from the oldest one that generated any token of the answer."""
    return trained.used - trained.first


def oldest_in_flight(trained: Trained) -> Values:
    """The part of `oldest` up to the delivery of the group; its other part is `in_queue`."""
    return trained.leases.delivered_version[trained.lease] - trained.first


def newest(trained: Trained) -> Values:
    """Versions from the one that generated the last token."""
    return trained.used - trained.last


def token_mean(trained: Trained) -> Values:
    """Versions from the mean over the answer's tokens of the versions that generated them."""
    return trained.used - trained.mean


def span(trained: Trained) -> Values:
    """Versions between the first and the last token: `oldest` − `newest`."""
    return trained.last - trained.first


def spanned(trained: Trained) -> Values:
    """Stretches under one version that the answer is made of: 1 for an answer of one version."""
    return trained.segments


def episode_end(trained: Trained) -> Values:
    """Versions from the one that was published last when the answer ended, though other weights made its tokens.

    A publication at that very instant does not count as earlier.
    """
    leases = trained.leases
    published = np.concatenate([[0], leases.published_version])
    then: Values = published[np.searchsorted(leases.published_s, trained.end_s, side="left")]
    return trained.used - then


def publication_debt(trained: Trained) -> Values:
    """Versions that had been committed and not published when the group was dispatched."""
    return trained.leases.made[trained.lease] - trained.base


# -- other units, and of groups and batches --------------------------------------------------------------------------


def publications(trained: Trained) -> Values:
    """Publications from dispatch to use. Where every version is published at once, it equals `dispatch`."""
    leases = trained.leases
    between: Values = leases.used_publications - leases.publications
    return between[trained.lease]


def samples(trained: Trained) -> Values:
    """Answers that were trained from the version of dispatch to the answer's step: lag in samples."""
    return np.subtract(trained.samples[trained.used], trained.samples[trained.base])


def seconds(trained: Trained) -> Values:
    """Seconds from dispatch until the step was committed."""
    return (trained.leases.used_s - trained.leases.admitted_s)[trained.lease]


def group_oldest(trained: Trained) -> Values:
    """``[groups]``: the version published at use minus the oldest one that generated any token of the group.

    Groups are in the order of their leases.
    """
    leases = trained.leases
    first = np.full(len(leases), np.iinfo(np.int64).max)
    np.minimum.at(first, trained.lease, trained.first)
    there = np.flatnonzero(first < np.iinfo(np.int64).max)
    published = np.concatenate([[0], leases.published_version])
    ages: Values = published[leases.used_publications[there]] - first[there]
    return ages


def stale_share(trained: Trained, *, by_tokens: bool = False) -> Values:
    """``[batches]``: the share of a step's answers (or of their tokens) dispatched before the last publication."""
    weights = trained.tokens if by_tokens else np.ones(len(trained), np.int64)
    whole = np.bincount(trained.used, weights)
    late = np.bincount(trained.used, weights * (publications(trained) > 0))
    there = whole > 0
    shares: Values = late[there] / whole[there]
    return shares


def older_tokens(trained: Trained, bounds: Sequence[int]) -> list[tuple[float, float]]:
    """For each bound x the share of trained tokens older than x versions: at least, at most.

    An answer says which versions its first and its last token are of, and their mean, not how many tokens each version
    made. The two numbers are the extremes that these allow, and equal where no answer spans more than two versions.
    """
    total = float(trained.tokens.sum())
    if not total:
        return [(0.0, 0.0) for _ in bounds]
    found = []
    for bound in bounds:
        cut = trained.used - bound - 1  # of this version or an older one: too old
        part = (cut >= trained.first) & (cut < trained.last)
        certain = float(trained.tokens[cut >= trained.last].sum())
        first, last, mean, tokens, at = (
            a[part] for a in (trained.first, trained.last, trained.mean, trained.tokens, cut)
        )
        most = np.minimum(1.0, (last - mean) / (last - at))
        least = np.maximum(0.0, 1.0 - (mean - first) / (at + 1 - first))
        found.append(((certain + float(tokens @ least)) / total, (certain + float(tokens @ most)) / total))
    return found


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A definition: its unit, what it is a number of, which systems use it, and how it follows from the columns."""

    name: str
    unit: str
    of: Literal["answers", "groups", "batches"]
    systems: str
    formula: str
    values: Callable[[Trained], Values]


_USED = "consumed.version"
KINDS = (
    Kind(
        "dispatch",
        "versions",
        "answers",
        "AReaL, SkyRL, NeMo-RL, Tinker cookbook, open-instruct",
        f"{_USED} − base_version",
        dispatch,
    ),
    Kind(
        "before_delivery",
        "versions",
        "answers",
        "prime-rl's count before its queue was included",
        "delivered.version − base_version",
        before_delivery,
    ),
    Kind("oldest", "versions", "answers", "prime-rl, verl V1 (worst)", f"{_USED} − first_version", oldest),
    Kind(
        "oldest_in_flight",
        "versions",
        "answers",
        "prime-rl (in-flight part)",
        "delivered.version − first_version",
        oldest_in_flight,
    ),
    Kind("in_queue", "versions", "answers", "prime-rl (in-queue part)", f"{_USED} − delivered.version", in_queue),
    Kind("newest", "versions", "answers", "verl V1", f"{_USED} − last_version", newest),
    Kind("token_mean", "versions", "answers", "ours", f"{_USED} − mean_version", token_mean),
    Kind("span", "versions", "answers", "verl V1", "last_version − first_version", span),
    Kind("spanned", "segments", "answers", "verl V1, slime", "segments", spanned),
    Kind(
        "episode_end",
        "versions",
        "answers",
        "torchforge",
        f"{_USED} − (version published last before end_s)",
        episode_end,
    ),
    Kind(
        "publication_debt",
        "versions",
        "answers",
        "UniRL",
        "(rows committed before admission) − base_version",
        publication_debt,
    ),
    Kind("group_oldest", "versions", "groups", "miles", "(published at use) − min(first_version)", group_oldest),
    Kind(
        "publications",
        "publications",
        "answers",
        "TRL, verl fully_async (parameter syncs)",
        "rows published between admission and use",
        publications,
    ),
    Kind("samples", "samples", "answers", "PipelineRL", "answers trained by versions base_version … used", samples),
    Kind(
        "stale_share",
        "share",
        "batches",
        "verl fully_async",
        "share of a step's answers with publications > 0",
        stale_share,
    ),
    Kind("seconds", "s", "answers", "ours", "consumed.time_s − admitted.time_s", seconds),
)
"""Every definition; xtuner's, of tokens beyond a bound, is `older_tokens`."""

BOUNDS = (0, 1, 2, 4, 8, 16)
"""Ages (versions) for which the share of older tokens is told."""


def staleness_table(trained: Trained) -> list[dict[str, Any]]:
    """A row a definition: ``kind, unit, of, mean, p50, p99, max`` a sample, and ``token_mean, token_p50, token_p99``.

    The latter weigh every answer or group by its generated tokens; of a batch they are the share of tokens instead.
    A quantile is the smallest value that at least this share of all does not exceed. No rows for no answers.
    """
    if not len(trained):
        return []
    by_lease = np.bincount(trained.lease, trained.tokens)
    groups = by_lease[np.bincount(trained.lease) > 0]
    rows = []
    for kind in KINDS:
        values = kind.values(trained)
        plain = summarise(values)
        if kind.of == "batches":
            weighted = summarise(stale_share(trained, by_tokens=True))
        else:
            weighted = summarise(values, trained.tokens if kind.of == "answers" else groups)
        named = {f"token_{name}": weighted[name] for name in ("mean", "p50", "p99")}
        rows.append({"kind": kind.name, "unit": kind.unit, "of": kind.of, **plain, **named})
    return rows


def summarise(values: Values, weights: Values | None = None) -> dict[str, float | None]:
    """Weighted ``mean``, ``p50``, ``p99``, and ``max``; all None where the weights are 0."""
    total = float(len(values) if weights is None else weights.sum())
    if not total:
        return dict.fromkeys(("mean", "p50", "p99", "max"))
    lowest = values.min()
    points: Values
    heavy: Values
    if np.issubdtype(values.dtype, np.integer) and values.max() - lowest <= 4 * len(values):
        heavy = np.bincount(values - lowest, weights)
        places = np.flatnonzero(heavy)
        points, heavy = places + lowest, heavy[places]
    elif weights is None:
        points, heavy = np.sort(values), np.broadcast_to(np.int64(1), values.shape)
    else:
        order = np.argsort(values)
        points, heavy = values[order], weights[order]
    up_to = np.cumsum(heavy, dtype=np.float64)

    def quantile(share: float) -> float:
        at = np.searchsorted(up_to, share * total * (1 - 1e-12))
        return float(points[min(int(at), len(points) - 1)])

    return {
        "mean": float(points @ heavy) / total,
        "p50": quantile(0.5),
        "p99": quantile(0.99),
        "max": float(values.max()),
    }
