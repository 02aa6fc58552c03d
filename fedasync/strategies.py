"""The strategy table: each row names its paper and makes its choice of the four decisions.

A row is a function of its knobs, which are the keys of a study's ``[strategy]`` table. A row of your own is a
function that returns a ``Strategy``, named there by its dotted path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack, get_type_hints

from typing_extensions import TypedDict

from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.core import Barrier, Cohort, Concurrency, EveryN, EveryVersion, Sliding, Strategy, Tumbling
from fedasync.core.admission import Redispatch, Simultaneous
from fedasync.core.buffering import WarmUp
from fedasync.core.staleness import Polynomial, Staleness


class Bounds(TypedDict, total=False):
    """Knobs of every row."""

    max_staleness: int | None
    """Drop a contribution that would be applied with a larger τ (default: none is dropped)."""
    lease_timeout_s: float | None
    """Give up a lease after this time (default: never)."""
    publish_every: int
    """Clients see every n-th version (default 1)."""


class Dispatch(Bounds, total=False):
    """Knobs of every asynchronous row."""

    redispatch: Redispatch
    simultaneous: Simultaneous


def fedavg(*, cohort: int, keep: int | None = None, **bounds: Unpack[Bounds]) -> Strategy:
    """FedAvg (McMahan et al. 2017): a round of ``cohort`` clients, mean weighted by samples.

    ``keep`` < cohort is over-selection: the round ends with the first ``keep`` results.
    """
    return _round("fedavg", cohort, keep, 0.0, bounds)


def fedprox(*, cohort: int, keep: int | None = None, proximal_mu: float = 0.01, **bounds: Unpack[Bounds]) -> Strategy:
    """FedProx (Li et al. 2020): FedAvg whose clients add (mu/2)·‖x − w‖² to their objective.

    The paper tries mu in {0.001, 0.01, 0.1, 1}; the default is ours.
    """
    return _round("fedprox", cohort, keep, proximal_mu, bounds)


def fedasync(
    *,
    concurrency: int,
    alpha: float = 0.6,
    staleness: Staleness = Polynomial(0.5),
    proximal_mu: float = 0.005,
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """FedAsync (Xie et al. 2019): mix every arriving model into the current one by α·s(τ).

    Defaults as in public re-implementations; the paper's own were not confirmed.
    """
    update = Mixing(alpha, staleness)
    return _asynchronous("fedasync", concurrency, Tumbling(1), update, dispatch, proximal_mu)


def fedbuff(
    *,
    concurrency: int,
    buffer_size: int = 10,
    server_learning_rate: float = 1.0,
    staleness: Staleness = Polynomial(0.5),
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """FedBuff (Nguyen et al. 2022): a server step along the mean of every K staleness-weighted deltas.

    K = 10 and s(τ) = (1 + τ)^(−1/2) as in public re-implementations; the server learning rate is ours.
    """
    update = DeltaMean(server_learning_rate, staleness)
    return _asynchronous("fedbuff", concurrency, Tumbling(buffer_size), update, dispatch)


def fedfa(
    *,
    concurrency: int,
    window: int = 5,
    warm_up: WarmUp = "wait_until_full",
    recompute_every: int = 256,
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """FedFa (Xu et al. 2024), parameter variant: every arrival makes a version, the mean of the last K models.

    K = 5 as in public re-implementations; the paper's values were not confirmed.
    """
    return _asynchronous("fedfa", concurrency, Sliding(window, warm_up), WindowMean(recompute_every), dispatch)


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedasync": fedasync,
    "fedbuff": fedbuff,
    "fedfa": fedfa,
}
"""Name in a study file → row."""


def _round(name: str, cohort: int, keep: int | None, proximal_mu: float, bounds: Bounds) -> Strategy:
    _known(name, bounds, Bounds)
    return Strategy(
        name,
        Cohort(cohort, keep),
        Barrier(),
        SampleWeightedMean(),
        _publication(bounds),
        bounds.get("max_staleness"),
        bounds.get("lease_timeout_s"),
        proximal_mu,
    )


def _asynchronous(
    name: str,
    concurrency: int,
    buffer: Tumbling | Sliding,
    update: Mixing | DeltaMean | WindowMean,
    dispatch: Dispatch,
    proximal_mu: float = 0.0,
) -> Strategy:
    _known(name, dispatch, Dispatch)
    admission = Concurrency(
        concurrency, dispatch.get("redispatch", "after_step"), dispatch.get("simultaneous", "one_by_one")
    )
    return Strategy(
        name,
        admission,
        buffer,
        update,
        _publication(dispatch),
        dispatch.get("max_staleness"),
        dispatch.get("lease_timeout_s"),
        proximal_mu,
    )


def _known(name: str, knobs: Mapping[str, object], table: Any) -> None:
    if unknown := set(knobs) - set(get_type_hints(table)):
        raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")


def _publication(bounds: Bounds) -> EveryVersion | EveryN:
    n = bounds.get("publish_every", 1)
    return EveryVersion() if n == 1 else EveryN(n)
