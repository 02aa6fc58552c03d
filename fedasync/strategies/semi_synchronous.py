"""Rows in between: some wait for some, by tiers, quotas, fixed times or assigned steps."""

from __future__ import annotations

from typing import Unpack

from fedasync.aggregation.fedat import TierMix
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfix import IntervalWeighted
from fedasync.aggregation.safa import CacheMean
from fedasync.core import Compass, Concurrency, Grouped, Periodic, Quota, Strategy, Tiers
from fedasync.core.staleness import Polynomial, Staleness
from fedasync.strategies.knobs import Bounds, known, strategy


def fedat(*, tiers: int = 5, cohort: int, proximal_mu: float = 0.4, **bounds: Unpack[Bounds]) -> Strategy:
    """FedAT (Chai et al. 2021): synchronous rounds within tiers of like speed, asynchronous across them.

    ``cohort`` is a tier's round. 5 tiers and mu = 0.4 as recalled; the paper also compresses what travels, which is not
    part of this row.
    """
    known("fedat", bounds, Bounds)
    return strategy("fedat", Tiers(tiers, cohort), Grouped(), TierMix(tiers), bounds, proximal_mu)


def safa(
    *, concurrency: int, quota: int, lag: int = 5, round_limit_s: float | None = None, **bounds: Unpack[Bounds]
) -> Strategy:
    """SAFA (Wu et al. 2021): a round ends when ``quota`` results are drafted; stragglers go on unless they lag too far.

    The authors have all clients at work: ``concurrency`` = clients, and quota C·N. Who delivered waits for the next
    version; work whose base is more than ``lag`` versions old is stopped. Lag 5 as recalled. Who was drafted for the
    last version is drafted again only when nobody works any more or the round has lasted ``round_limit_s``: without a
    limit, a quota of half of those at work makes every round wait for its slowest.
    """
    known("safa", bounds, Bounds)
    if "max_staleness" in bounds:
        raise ValueError("safa has its own bound on the delay, lag, and takes no max_staleness")
    bounded = {"stop_stale": True, **bounds, "max_staleness": lag}
    admission = Concurrency(concurrency, redispatch="next_version")
    return strategy("safa", admission, Quota(quota, round_limit_s), CacheMean(lag), bounded)


def fedfix(
    *, concurrency: int, interval_s: float, server_learning_rate: float = 1.0, **bounds: Unpack[Bounds]
) -> Strategy:
    """FedFix (Fraboni et al. 2023): a server step every ``interval_s`` over whatever has arrived.

    Who delivered waits for the step. Contributions are weighted by the intervals that they took, so that slow clients
    count as much as fast ones. Weights are shares of all N clients: with n of them at work, η = N/n is the full step.
    """
    known("fedfix", bounds, Bounds)
    admission = Concurrency(concurrency, redispatch="next_version")
    update = IntervalWeighted(interval_s, server_learning_rate)
    return strategy("fedfix", admission, Periodic(interval_s), update, bounds)


def fedcompass(
    *,
    concurrency: int,
    least_steps: int = 20,
    most_steps: int = 100,
    patience: float = 1.2,
    server_learning_rate: float = 1.0,
    staleness: Staleness = Polynomial(0.5),
    **bounds: Unpack[Bounds],
) -> Strategy:
    """FedCompass (Li et al. 2024): local steps assigned so that groups of clients arrive together.

    w ← w + η·Σ s(τ)·Δ/N over a group: with n of N clients at work, η = N/n is the full step. 20 to 100 steps are those
    of a figure of the paper; patience 1.2 as recalled; the staleness function is ours.
    """
    known("fedcompass", bounds, Bounds)
    admission = Compass(concurrency, least_steps, most_steps, patience)
    update = DeltaMean(server_learning_rate, staleness, "clients")
    return strategy("fedcompass", admission, Grouped(), update, bounds)
