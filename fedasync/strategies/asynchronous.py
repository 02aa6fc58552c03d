"""Rows that do not wait: clients start again as soon as they have delivered."""

from __future__ import annotations

from typing import Unpack

from fedasync.aggregation.conventions import FedAsyncConvention, FedBuffConvention, fedasync_update, fedbuff_update
from fedasync.aggregation.dc_asgd import DelayCompensation
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.fedstaleweight import StalenessProportional
from fedasync.aggregation.server_optimizers import Amsgrad, ServerOptimizer, Sgd
from fedasync.aggregation.server_step import ServerStep, WindowAggregate, check_size
from fedasync.aggregation.sliding_delta import WindowStep
from fedasync.aggregation.update import Update
from fedasync.core import Sliding, Strategy, Tumbling
from fedasync.core.bounds import check_integer
from fedasync.core.buffering import WarmUp
from fedasync.core.staleness import Constant, Polynomial, Staleness
from fedasync.strategies.knobs import Dispatch, RobustDispatch, at_work, known, plain, robust


def fedasync(
    *,
    concurrency: int,
    alpha: float = 0.6,
    staleness: Staleness = Polynomial(0.5),
    proximal_mu: float = 0.005,
    convention: FedAsyncConvention = "paper",
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """FedAsync (Xie et al. 2019): mix every arriving model into the current one by α·s(τ).

    Defaults as in public re-implementations; the paper's own were not confirmed. ``convention`` computes as a framework
    does (see ``fedasync conformance``).
    """
    known("fedasync", dispatch, Dispatch)
    update = fedasync_update(convention, alpha, staleness)
    return at_work("fedasync", concurrency, Tumbling(1), update, dispatch, proximal_mu)


def fedbuff(
    *,
    concurrency: int,
    buffer_size: int = 10,
    server_learning_rate: float = 1.0,
    staleness: Staleness = Polynomial(0.5),
    server_optimizer: ServerOptimizer | None = None,
    convention: FedBuffConvention = "paper",
    **dispatch: Unpack[RobustDispatch],
) -> Strategy:
    """FedBuff (Nguyen et al. 2022): a server step along the mean of every K staleness-weighted deltas.

    K = 10 and s(τ) = (1 + τ)^(−1/2) as in public re-implementations; the server learning rate is ours.
    ``server_optimizer`` replaces the plain step, and ``server_learning_rate`` with it. ``convention`` computes as a
    framework does (see ``fedasync conformance``).
    """
    known("fedbuff", dispatch, RobustDispatch)
    update = _buffered("fedbuff", buffer_size, server_learning_rate, staleness, server_optimizer, dispatch, convention)
    return at_work("fedbuff", concurrency, Tumbling(buffer_size), update, dispatch)


def fedfa(
    *,
    concurrency: int,
    window: int = 5,
    warm_up: WarmUp = "wait_until_full",
    recompute_every: int = 256,
    **dispatch: Unpack[RobustDispatch],
) -> Strategy:
    """FedFa (Xu et al. 2024), parameter variant: every arrival makes a version, the mean of the last K models.

    K = 5 as in public re-implementations; the paper's values were not confirmed.
    """
    known("fedfa", dispatch, RobustDispatch)
    update: Update = WindowMean(recompute_every)
    if not plain(dispatch):
        aggregator, privacy = robust(dispatch)
        check_size("fedfa", aggregator, window)
        update = WindowAggregate(aggregator, privacy, dispatch.get("clip_norm"))
    return at_work("fedfa", concurrency, Sliding(window, warm_up), update, dispatch)


def sliding_delta(
    *,
    concurrency: int,
    window: int = 5,
    server_learning_rate: float = 1.0,
    warm_up: WarmUp = "wait_until_full",
    **dispatch: Unpack[RobustDispatch],
) -> Strategy:
    """A window of deltas (ours): every arrival steps along the mean of the last K deltas, so each is applied K times.

    A candidate for what FedFa's paper calls its delta variant, whose formula we could not read.
    """
    known("sliding_delta", dispatch, RobustDispatch)
    aggregator, privacy = robust(dispatch)
    check_size("sliding_delta", aggregator, window)
    update = WindowStep(server_learning_rate, aggregator, privacy, dispatch.get("clip_norm"))
    return at_work("sliding_delta", concurrency, Sliding(window, warm_up), update, dispatch)


def delta_step(*, concurrency: int, window: int = 5, **dispatch: Unpack[Dispatch]) -> Strategy:
    """Asynchronous SGD in delta form (ours by name): w ← w + Δ/K at every arrival, K = ``window``.

    The other candidate for FedFa's delta variant; it needs no window at all.
    """
    known("delta_step", dispatch, Dispatch)
    check_integer("delta_step: window", window, 1)
    return at_work("delta_step", concurrency, Tumbling(1), DeltaMean(1 / window, Constant()), dispatch)


def fadas(
    *,
    concurrency: int,
    buffer_size: int = 5,
    server_learning_rate: float = 1e-3,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    epsilon: float = 1e-8,
    delay_adaptive: bool = True,
    delay_threshold: int = 1,
    **dispatch: Unpack[RobustDispatch],
) -> Strategy:
    """FADAS (Wang et al. 2024): an AMSGrad step of the server along the mean of every M deltas.

    ``delay_adaptive`` divides η by the buffer's largest τ where that exceeds ``delay_threshold``. Defaults as in the
    authors' repository, which has η = 1e-4 without delay adaptation.
    """
    known("fadas", dispatch, RobustDispatch)
    optimizer = Amsgrad(server_learning_rate, beta_1, beta_2, epsilon, delay_threshold if delay_adaptive else None)
    update = _buffered("fadas", buffer_size, 1.0, Constant(), optimizer, dispatch, "paper")
    return at_work("fadas", concurrency, Tumbling(buffer_size), update, dispatch)


def fedstaleweight(
    *,
    concurrency: int,
    buffer_size: int = 10,
    server_learning_rate: float = 1.0,
    memory: int = 5,
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """FedStaleWeight (Ma et al. 2024): a buffer weighted by each client's mean staleness over its last 5 deliveries."""
    known("fedstaleweight", dispatch, Dispatch)
    update = StalenessProportional(server_learning_rate, memory)
    return at_work("fedstaleweight", concurrency, Tumbling(buffer_size), update, dispatch)


def ringmaster(
    *,
    concurrency: int,
    delay_threshold: int,
    server_learning_rate: float = 1.0,
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """Ringmaster ASGD (Maranjyan et al. 2025): a step at every arrival with τ < R = ``delay_threshold``.

    The others are ignored. That a delay of R is one too many, and the variant with stops, ``stop_stale``, where a
    client is stopped as soon as its work can only be ignored, are as recalled. R = 1 is Rennala with B = 1, R = ∞
    asynchronous SGD.
    """
    known("ringmaster", dispatch, Dispatch)
    bounded = {"max_staleness": _threshold("ringmaster", delay_threshold, dispatch) - 1}
    update = DeltaMean(server_learning_rate, Constant())
    return at_work("ringmaster", concurrency, Tumbling(1), update, {**dispatch, **bounded})


def rennala(
    *,
    concurrency: int,
    buffer_size: int,
    server_learning_rate: float = 1.0,
    **dispatch: Unpack[RobustDispatch],
) -> Strategy:
    """Rennala SGD (Tyurin and Richtárik 2023): the mean of B deltas, all computed at the current version.

    Work that began at an older version is done to its end and dropped.
    """
    known("rennala", dispatch, RobustDispatch)
    _threshold("rennala", 1, dispatch)
    aggregator, privacy = robust(dispatch)
    update: Update = DeltaMean(server_learning_rate, Constant())
    if not plain(dispatch):
        check_size("rennala", aggregator, buffer_size)
        clip_norm = dispatch.get("clip_norm")
        update = ServerStep(Sgd(server_learning_rate), aggregator, privacy=privacy, clip_norm=clip_norm)
    return at_work("rennala", concurrency, Tumbling(buffer_size), update, {**dispatch, "max_staleness": 0})


def dc_asgd(
    *,
    concurrency: int,
    compensation: float | None = None,
    adaptive: bool = False,
    mean_square_momentum: float = 0.95,
    epsilon: float = 1e-7,
    server_learning_rate: float = 1.0,
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """DC-ASGD (Zheng et al. 2017): each arrival corrected by λ·g⊙g⊙(w − w_base). Needs local SGD.

    λ = 0.04, or 2 if ``adaptive``, as in public ports.
    """
    known("dc_asgd", dispatch, Dispatch)
    lambda_ = (2.0 if adaptive else 0.04) if compensation is None else compensation
    update = DelayCompensation(lambda_, adaptive, mean_square_momentum, epsilon, server_learning_rate)
    return at_work("dc_asgd", concurrency, Tumbling(1), update, dispatch)


def _buffered(
    name: str,
    buffer_size: int,
    server_learning_rate: float,
    staleness: Staleness,
    optimizer: ServerOptimizer | None,
    knobs: RobustDispatch,
    convention: FedBuffConvention,
) -> Update:
    aggregator, privacy = robust(knobs)
    if optimizer is None and plain(knobs):
        return fedbuff_update(convention, server_learning_rate, staleness)
    if convention != "paper":
        raise ValueError(
            f"{name}: convention {convention!r} is a rule of its own: no server_optimizer, aggregator or privacy goes "
            "with it; convention = 'paper' would do"
        )
    if optimizer is not None and server_learning_rate != 1:
        raise ValueError(
            f"{name}: server_learning_rate = {server_learning_rate} beside a server_optimizer, which has its own"
        )
    check_size(name, aggregator, buffer_size)
    optimizer = Sgd(server_learning_rate) if optimizer is None else optimizer
    return ServerStep(optimizer, aggregator, staleness, privacy=privacy, clip_norm=knobs.get("clip_norm"))


def _threshold(name: str, delay_threshold: int, dispatch: Dispatch) -> int:
    if "max_staleness" in dispatch:
        raise ValueError(f"{name} has its own bound on the delay and takes no max_staleness")
    check_integer(f"{name}: delay_threshold", delay_threshold, 1)
    return delay_threshold
