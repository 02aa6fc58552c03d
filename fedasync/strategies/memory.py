"""Rows that remember every client: what arrives often does not count for more."""

from __future__ import annotations

from typing import Unpack

from fedasync.aggregation.area import MeanOfLast
from fedasync.aggregation.ca2fl import CachedCalibration
from fedasync.aggregation.mifa import LatestMean
from fedasync.core import Strategy, Tumbling
from fedasync.strategies.knobs import Dispatch, at_work, known


def ca2fl(
    *, concurrency: int, buffer_size: int = 10, server_learning_rate: float = 1.0, **dispatch: Unpack[Dispatch]
) -> Strategy:
    """CA2FL (Wang et al. 2024): FedBuff calibrated by the cached last update of every client. Defaults as FedBuff's."""
    known("ca2fl", dispatch, Dispatch)
    update = CachedCalibration(server_learning_rate)
    return at_work("ca2fl", concurrency, Tumbling(buffer_size), update, dispatch)


def mifa(
    *,
    concurrency: int,
    buffer_size: int = 10,
    server_learning_rate: float = 1.0,
    wait_for_all: bool = True,
    **dispatch: Unpack[Dispatch],
) -> Strategy:
    """MIFA (Gu et al. 2021): every step averages the latest update of all clients, at work or not.

    The paper has rounds of whoever is available; here a round is the next ``buffer_size`` arrivals (ours). As in the
    paper, nothing moves until every client has delivered once.
    """
    known("mifa", dispatch, Dispatch)
    update = LatestMean(server_learning_rate, wait_for_all)
    return at_work("mifa", concurrency, Tumbling(buffer_size), update, dispatch)


def area(*, concurrency: int, buffer_size: int = 1, **dispatch: Unpack[Dispatch]) -> Strategy:
    """AREA (Iakovidou and Kim 2024): the model is the mean of what every client uploaded last.

    ``buffer_size`` is the number of arrivals between two server steps; 1 is ours.
    """
    known("area", dispatch, Dispatch)
    return at_work("area", concurrency, Tumbling(buffer_size), MeanOfLast(), dispatch)
