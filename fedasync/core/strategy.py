"""A strategy: a choice of the four decisions, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from math import inf
from typing import Any, Literal

from fedasync.core.admission import Admission, Cohort, Concurrency, StalenessBudget, SyncBudget
from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.core.buffering import Barrier, Buffer, Grouped, Quota, Sliding, Tumbling
from fedasync.core.combined_publication import Publication
from fedasync.core.compass import Compass
from fedasync.core.publication import EveryVersion
from fedasync.core.tiers import Tiers
from fedasync.core.timeouts import AdaptiveTimeout

AtBound = Literal["drop", "wait"]


@dataclass(frozen=True)
class Strategy:
    """Admission, buffer, update, publication, and the bounds that hold under any of them.

    ``update`` is opaque to the core: the runtime applies it between ``StepReady`` and ``commit``.
    ``max_staleness`` drops a contribution that would be applied with a larger τ; with ``stop_stale`` a lease whose
    contribution can only be dropped is cancelled at once. With ``at_bound`` = ``wait`` nothing is dropped: no step
    begins that would leave work, in flight or waiting, that could not all be used within max_staleness.
    ``lease_timeout_s`` gives up a lease after that time. ``clip_norm`` bounds how far a contribution may move the model
    from its base: one that goes farther is scaled back to that distance; one beyond ``max_norm`` is rejected.
    ``proximal_mu`` is the client's side of FedProx and FedAsync.

    Raises ValueError for a choice that can never make progress.
    """

    name: str
    admission: Admission
    buffer: Buffer
    update: Any
    publication: Publication = EveryVersion()
    max_staleness: int | None = None
    stop_stale: bool = False
    lease_timeout_s: float | AdaptiveTimeout | None = None
    clip_norm: float | None = None
    max_norm: float | None = None
    proximal_mu: float = 0.0
    at_bound: AtBound = "drop"

    def __post_init__(self) -> None:
        if isinstance(self.admission, Cohort) != isinstance(self.buffer, Barrier):
            raise ValueError(
                f"strategy {self.name!r}: a cohort and a barrier belong together, got "
                f"{type(self.admission).__name__} with {type(self.buffer).__name__}: no round would ever end"
            )
        if isinstance(self.admission, (Tiers, Compass)) != isinstance(self.buffer, Grouped):
            raise ValueError(
                f"strategy {self.name!r}: leases in groups and a grouped buffer belong together, got "
                f"{type(self.admission).__name__} with {type(self.buffer).__name__}"
            )
        self._check_that_a_step_can_be_reached()
        self._check_budget()
        if self.max_staleness is not None:
            check_integer(f"strategy {self.name!r}: max_staleness", self.max_staleness, 0)
        if isinstance(self.lease_timeout_s, int | float) and not 0 < self.lease_timeout_s < inf:
            raise ValueError(
                f"strategy {self.name!r}: lease_timeout_s must be > 0 and finite, got {self.lease_timeout_s}"
            )
        for name in ("clip_norm", "max_norm"):
            if getattr(self, name) is not None:
                check_real(f"strategy {self.name!r}: {name}", getattr(self, name), 0, above=True)
        if self.stop_stale and self.max_staleness is None:
            raise ValueError(f"strategy {self.name!r}: stop_stale needs a max_staleness beyond which work is stopped")
        self._check_waiting_at_the_bound()
        if not 0 <= self.proximal_mu < inf:
            raise ValueError(f"strategy {self.name!r}: proximal_mu must be ≥ 0 and finite, got {self.proximal_mu}")
        self._check_lag()

    def _check_lag(self) -> None:
        """Workers start from the published version: a bound on staleness bounds how far it may lag."""
        lag, rule = self.publication.most_lag, f"publication {self.publication.kind!r}"
        lets = f"{rule} lets it lag {'without bound' if lag == inf else f'by {lag:g}'}"
        if self.max_staleness is not None and lag > self.max_staleness:
            larger = "" if lag == inf else f"max_staleness ≥ {lag:g}, or "
            raise ValueError(
                f"strategy {self.name!r}: max_staleness = {self.max_staleness} admits nothing once the published "
                f"version lags by more, and {lets}; {larger}within_staleness with eta ≤ {self.max_staleness} around "
                "the rule would do"
            )
        if isinstance(self.admission, StalenessBudget) and self.admission.eta is not None and lag > self.admission.eta:
            raise ValueError(
                f"strategy {self.name!r}: a staleness budget of eta = {self.admission.eta} is exceeded once the "
                f"published version lags by more, and {lets}; within_staleness with eta ≤ {self.admission.eta} around "
                "the rule would do"
            )

    def _check_budget(self) -> None:
        """A budget counts batches: the buffer takes one, and a publication comes when the budget counts on it."""
        if not isinstance(self.admission, (StalenessBudget, SyncBudget)):
            return
        batch, taken = self.admission.batch, getattr(self.buffer, "size", None)
        if not isinstance(self.buffer, Tumbling) or taken != batch:
            raise ValueError(
                f"strategy {self.name!r}: a buffer of K = {taken} does not fit a staleness budget, which admits "
                f"batch = {batch} more leases a version: larger it can never be reached after a while, smaller the "
                f"leases in flight grow without bound; a tumbling buffer of K = {batch} would do"
            )
        if isinstance(self.admission, SyncBudget) and self.publication.most_lag >= self.admission.every:
            raise ValueError(
                f"strategy {self.name!r}: a sync budget of every = {self.admission.every} counts on a publication "
                f"within so many versions, got {self.publication}; EveryN(n = {self.admission.every}) would do"
            )

    def _check_waiting_at_the_bound(self) -> None:
        """At the bound a step waits: it never waits for what cannot come, only if all that starts can be used in time.

        Of H leases held before the step from a version, all from that version less the lag, ``batch`` are used by each
        of the max_staleness − lag + 1 steps that may use them.
        """
        check_choice(f"strategy {self.name!r}: at_bound", self.at_bound, AtBound)
        if self.at_bound == "drop":
            return
        where = f"strategy {self.name!r}: at_bound = 'wait'"
        if self.max_staleness is None or self.stop_stale:
            raise ValueError(f"{where} needs a max_staleness to wait at, and drops nothing: no stop_stale")
        if not isinstance(self.buffer, Tumbling) or self.buffer.order not in ("oldest_first", "dispatch"):
            raise ValueError(
                f"{where}: the oldest must be used first, got {self.buffer}; order = 'oldest_first' or 'dispatch' "
                "would do"
            )
        admission, least = self.admission, inf
        if isinstance(admission, SyncBudget):
            least = -(-admission.between // admission.batch) - 1
        elif isinstance(admission, StalenessBudget) and admission.eta is not None:
            least = admission.eta + self.publication.most_lag
        if least == inf:
            raise ValueError(
                f"{where} needs bounds on how much is ahead of the steps and on how far the published version lags, "
                f"got {admission} with {self.publication}; a staleness budget with an eta, and EveryVersion, would do"
            )
        if self.max_staleness < least:
            raise ValueError(
                f"{where}: what the budget lets start cannot all be used within max_staleness = {self.max_staleness}: "
                f"a step would wait for ever; max_staleness ≥ {least:g} would do"
            )

    def _check_that_a_step_can_be_reached(self) -> None:
        """Workers that wait for the next version bring no more contributions to it than there are of them."""
        waits = isinstance(self.admission, Concurrency) and self.admission.redispatch == "next_version"
        if isinstance(self.buffer, Quota) and not waits:
            raise ValueError(f"strategy {self.name!r}: a quota needs a concurrency with redispatch = 'next_version'")
        needed = self.buffer.missing(0, 0, 0) if isinstance(self.buffer, (Tumbling, Sliding, Quota)) else 0
        if waits and needed > self.admission.most_in_flight:
            raise ValueError(
                f"strategy {self.name!r}: a buffer of K = {needed} can never be filled by "
                f"{self.admission.most_in_flight} workers that wait for the next version; K ≤ "
                f"{self.admission.most_in_flight} would do"
            )

    @property
    def identity(self) -> str:
        """Name and every knob as text; an update that is no dataclass is known by type and attributes."""
        own = getattr(self.update, "__dict__", {})
        update = self.update if is_dataclass(self.update) else f"{type(self.update).__qualname__} {own}"
        return repr(replace(self, update=update))

    @property
    def first_step_needs(self) -> int:
        """Accepted contributions before version 1 can exist."""
        if isinstance(self.admission, Cohort):
            return self.admission.target
        return self.buffer.missing(0, 0, 0)

    @property
    def gated(self) -> bool:
        """All arrivals of one instant are looked at before any slot is given out again."""
        return isinstance(self.admission, Cohort) or (
            isinstance(self.admission, Concurrency) and self.admission.simultaneous == "together"
        )

    def refusal(self, workers: int) -> str | None:
        """Why this strategy cannot run on that many workers, one lease each; None when it can."""
        match self.admission:
            case Cohort(size=size) if size > workers:
                return (
                    f"strategy {self.name!r}: a cohort of {size} can never be filled by {workers} clients; "
                    f"cohort ≤ {workers} would do"
                )
            case Concurrency(limit=limit) | Compass(limit=limit) if limit > workers:
                return (
                    f"strategy {self.name!r}: a concurrency of {limit} can never be reached by {workers} clients, "
                    f"one lease each; concurrency ≤ {workers} would do"
                )
            case Tiers(tiers=tiers) if tiers > workers:
                return f"strategy {self.name!r}: {tiers} tiers for {workers} clients; tiers ≤ {workers} would do"
        return None
