"""Knobs that rows of the table share, and how they become a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from typing_extensions import TypedDict

from fedasync.aggregation.aggregators import Aggregator, Mean
from fedasync.aggregation.privacy import Privacy
from fedasync.aggregation.server_step import is_private
from fedasync.aggregation.update import Update
from fedasync.core import Barrier, Buffer, Cohort, Concurrency, EveryN, EveryVersion, Publication, Strategy
from fedasync.core.admission import Admission, Redispatch, Simultaneous
from fedasync.core.timeouts import AdaptiveTimeout


class Bounds(TypedDict, total=False):
    """Knobs of every row."""

    max_staleness: int | None
    """Drop a contribution that would be applied with a larger τ (default: none is dropped)."""
    stop_stale: bool
    """Cancel work at once when it can only be dropped (default false: it is done to its end)."""
    lease_timeout_s: float | AdaptiveTimeout | None
    """Give up a lease after this time, or after one that follows recent durations (default: never)."""
    publish_every: int
    """Clients see every n-th version (default 1): short for a publication of kind fixed."""
    publication: Publication
    """When clients see a new version (default: every_version)."""
    clip_norm: float | None
    """Scale a contribution back to this distance from its base (default: none is clipped)."""
    max_norm: float | None
    """Reject a contribution that lies farther from its base (default: none is rejected for it)."""


class Dispatch(Bounds, total=False):
    """Knobs of every asynchronous row."""

    redispatch: Redispatch
    simultaneous: Simultaneous


class Robust(TypedDict, total=False):
    """Knobs of rows whose buffer is a plain mean."""

    aggregator: Aggregator
    """What the buffer becomes: mean (default), median, trimmed_mean, krum."""
    privacy: Privacy | None
    """Gaussian noise for central differential privacy; needs a clip_norm."""


class RobustBounds(Bounds, Robust, total=False):
    pass


class RobustDispatch(Dispatch, Robust, total=False):
    pass


def strategy(
    name: str, admission: Admission, buffer: Buffer, update: Update, knobs: Mapping[str, Any], proximal_mu: float = 0.0
) -> Strategy:
    """A row put together: its own choices, and the shared knobs."""
    if is_private(knobs.get("privacy")) and knobs.get("max_norm") is not None:
        raise ValueError(
            f"{name}: who is rejected by a max_norm depends on the client's data, which privacy is to hide; clip_norm "
            "alone would do"
        )
    return Strategy(
        name,
        admission,
        buffer,
        update,
        _publication(name, knobs),
        knobs.get("max_staleness"),
        knobs.get("stop_stale", False),
        knobs.get("lease_timeout_s"),
        knobs.get("clip_norm"),
        knobs.get("max_norm"),
        proximal_mu,
    )


def _publication(name: str, knobs: Mapping[str, Any]) -> Publication:
    if "publication" not in knobs:
        n = knobs.get("publish_every", 1)
        return EveryVersion() if n == 1 else EveryN(n)
    if "publish_every" in knobs:
        raise ValueError(
            f"{name}: publish_every = {knobs['publish_every']} and a publication both say when clients see a version; "
            "one of them would do"
        )
    rule: Publication = knobs["publication"]
    return rule


def in_rounds(
    name: str, cohort: int, keep: int | None, update: Update, knobs: Mapping[str, Any], proximal_mu: float = 0.0
) -> Strategy:
    """A synchronous row."""
    return strategy(name, Cohort(cohort, keep), Barrier(), update, knobs, proximal_mu)


def at_work(
    name: str, concurrency: int, buffer: Buffer, update: Update, knobs: Mapping[str, Any], proximal_mu: float = 0.0
) -> Strategy:
    """An asynchronous row: ``concurrency`` clients at work at any time."""
    admission = Concurrency(concurrency, knobs.get("redispatch", "after_step"), knobs.get("simultaneous", "one_by_one"))
    return strategy(name, admission, buffer, update, knobs, proximal_mu)


def known(name: str, knobs: Mapping[str, object], table: Any) -> None:
    """Raise TypeError for a keyword that is none of the table's, as a call of a plain function does."""
    if unknown := set(knobs) - set(get_type_hints(table)):
        raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")


def robust(knobs: Mapping[str, Any]) -> tuple[Aggregator, Privacy | None]:
    """The two knobs of ``Robust``; a privacy without noise is none."""
    privacy: Privacy | None = knobs.get("privacy")
    return knobs.get("aggregator", Mean()), privacy if is_private(privacy) else None


def plain(knobs: Mapping[str, Any]) -> bool:
    """The buffer becomes a mean without noise."""
    aggregator, privacy = robust(knobs)
    return isinstance(aggregator, Mean) and privacy is None
