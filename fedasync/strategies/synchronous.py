"""Rows in rounds: all of a cohort start from one version, and the round waits for them."""

from __future__ import annotations

from typing import Any, Unpack

from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fednova import NormalisedMean
from fedasync.aggregation.scaffold import ControlVariates
from fedasync.aggregation.server_optimizers import Adagrad, Adam, Convention, ServerOptimizer, Sgd, Yogi
from fedasync.aggregation.server_step import ServerStep, check_size
from fedasync.core import Cohort, Strategy
from fedasync.strategies.knobs import Bounds, RobustBounds, in_rounds, known, plain, robust


def fedavg(
    *,
    cohort: int,
    keep: int | None = None,
    server_optimizer: ServerOptimizer = Sgd(),
    **knobs: Unpack[RobustBounds],
) -> Strategy:
    """FedAvg (McMahan et al. 2017): a round of ``cohort`` clients, mean weighted by samples.

    ``keep`` < cohort is over-selection: the round ends with the first ``keep`` results. ``server_optimizer`` makes
    something else of the mean update than adding it (Reddi et al. 2021).
    """
    return _averaged("fedavg", cohort, keep, server_optimizer, knobs, 0.0)


def fedprox(
    *,
    cohort: int,
    keep: int | None = None,
    proximal_mu: float = 0.01,
    server_optimizer: ServerOptimizer = Sgd(),
    **knobs: Unpack[RobustBounds],
) -> Strategy:
    """FedProx (Li et al. 2020): FedAvg whose clients add (mu/2)·‖x − w‖² to their objective.

    The paper tries mu in {0.001, 0.01, 0.1, 1}, as recalled; the default is ours.
    """
    return _averaged("fedprox", cohort, keep, server_optimizer, knobs, proximal_mu)


def fedavgm(
    *,
    cohort: int,
    keep: int | None = None,
    server_learning_rate: float = 1.0,
    server_momentum: float = 0.9,
    **knobs: Unpack[RobustBounds],
) -> Strategy:
    """FedAvgM (Hsu et al. 2019): FedAvg with momentum on the server.

    The paper tries β in {0, 0.7, 0.9, 0.97, 0.99, 0.997}, as recalled; the default is ours.
    """
    return _averaged("fedavgm", cohort, keep, Sgd(server_learning_rate, server_momentum), knobs, 0.0)


def fedadam(
    *,
    cohort: int,
    keep: int | None = None,
    server_learning_rate: float = 0.1,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    tau: float = 1e-3,
    convention: Convention = "paper",
    **knobs: Unpack[RobustBounds],
) -> Strategy:
    """FedAdam (Reddi et al. 2021): the round's mean update as Adam's gradient.

    No bias correction and v from τ² as in the paper, as recalled; ``flower`` and ``textbook`` correct it in their ways.
    η is Flower's default.
    """
    optimizer = Adam(server_learning_rate, beta_1, beta_2, tau, convention)
    return _averaged("fedadam", cohort, keep, optimizer, knobs, 0.0)


def fedyogi(
    *,
    cohort: int,
    keep: int | None = None,
    server_learning_rate: float = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    tau: float = 1e-3,
    **knobs: Unpack[RobustBounds],
) -> Strategy:
    """FedYogi (Reddi et al. 2021): Adam whose v grows only as fast as the gradient asks. η is Flower's default."""
    return _averaged("fedyogi", cohort, keep, Yogi(server_learning_rate, beta_1, beta_2, tau), knobs, 0.0)


def fedadagrad(
    *,
    cohort: int,
    keep: int | None = None,
    server_learning_rate: float = 0.1,
    beta_1: float = 0.0,
    tau: float = 1e-3,
    **knobs: Unpack[RobustBounds],
) -> Strategy:
    """FedAdagrad (Reddi et al. 2021): steps shrink with the sum of all squared updates. η is Flower's default."""
    return _averaged("fedadagrad", cohort, keep, Adagrad(server_learning_rate, beta_1, tau), knobs, 0.0)


def scaffold(
    *, cohort: int, keep: int | None = None, server_learning_rate: float = 1.0, **knobs: Unpack[Bounds]
) -> Strategy:
    """SCAFFOLD (Karimireddy et al. 2020), option II: control variates correct each client's gradients.

    The server keeps every client's variate. Needs local SGD.
    """
    known("scaffold", knobs, Bounds)
    return in_rounds("scaffold", cohort, keep, ControlVariates(server_learning_rate), knobs)


def fednova(*, cohort: int, keep: int | None = None, **knobs: Unpack[Bounds]) -> Strategy:
    """FedNova (Wang et al. 2020): updates normalised by how many local steps are behind them. Needs local SGD."""
    known("fednova", knobs, Bounds)
    return in_rounds("fednova", cohort, keep, NormalisedMean(), knobs)


def _averaged(
    name: str, cohort: int, keep: int | None, optimizer: ServerOptimizer, knobs: RobustBounds, proximal_mu: float
) -> Strategy:
    known(name, knobs, RobustBounds)
    if plain(knobs) and optimizer == Sgd():
        return in_rounds(name, cohort, keep, SampleWeightedMean(), knobs, proximal_mu)
    aggregator, privacy = robust(knobs)
    admission = Cohort(cohort, keep)
    check_size(name, aggregator, admission.target)
    update: Any = ServerStep(
        optimizer, aggregator, weights="samples", privacy=privacy, clip_norm=knobs.get("clip_norm")
    )
    return in_rounds(name, cohort, keep, update, knobs, proximal_mu)
