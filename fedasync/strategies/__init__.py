"""The strategy table: each row names its paper and makes its choice of the four decisions.

A row is a function of its knobs, which are the keys of a study's ``[strategy]`` table. A row of your own is a
function that returns a ``Strategy``, named there by its dotted path.
"""

from __future__ import annotations

from collections.abc import Callable

from fedasync.core import Strategy
from fedasync.strategies.asynchronous import (
    dc_asgd,
    delta_step,
    fadas,
    fedasync,
    fedbuff,
    fedfa,
    fedstaleweight,
    rennala,
    ringmaster,
    sliding_delta,
)
from fedasync.strategies.memory import area, ca2fl, mifa
from fedasync.strategies.rollouts import (
    PolicyStep,
    areal,
    nemo_rl,
    one_step_overlap,
    pipeline_rl,
    prime_rl,
    skyrl,
    streaming,
    synchronous_rl,
    trl,
    verl,
    verl_bounded,
)
from fedasync.strategies.semi_synchronous import fedat, fedcompass, fedfix, safa
from fedasync.strategies.synchronous import (
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fednova,
    fedprox,
    fedyogi,
    scaffold,
)

FEDERATED: tuple[Callable[..., Strategy], ...] = (
    fedavg,
    fedprox,
    fedavgm,
    fedadam,
    fedyogi,
    fedadagrad,
    scaffold,
    fednova,
    fedasync,
    fedbuff,
    fedfa,
    sliding_delta,
    delta_step,
    fadas,
    fedstaleweight,
    ringmaster,
    rennala,
    dc_asgd,
    ca2fl,
    mifa,
    area,
    fedat,
    safa,
    fedfix,
    fedcompass,
)

ROLLOUTS: tuple[Callable[..., Strategy], ...] = (
    synchronous_rl,
    one_step_overlap,
    areal,
    streaming,
    verl,
    verl_bounded,
    prime_rl,
    nemo_rl,
    trl,
    skyrl,
    pipeline_rl,
)
"""Rows whose update trains a policy on a cluster, which is only simulated."""

ROWS = FEDERATED + ROLLOUTS

STRATEGIES: dict[str, Callable[..., Strategy]] = {row.__name__: row for row in ROWS}
"""Name in a study file → row."""

__all__ = [
    "FEDERATED",
    "ROLLOUTS",
    "ROWS",
    "STRATEGIES",
    "PolicyStep",
    "area",
    "areal",
    "ca2fl",
    "dc_asgd",
    "delta_step",
    "fadas",
    "fedadagrad",
    "fedadam",
    "fedasync",
    "fedat",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "fedcompass",
    "fedfa",
    "fedfix",
    "fednova",
    "fedprox",
    "fedstaleweight",
    "fedyogi",
    "mifa",
    "nemo_rl",
    "one_step_overlap",
    "pipeline_rl",
    "prime_rl",
    "rennala",
    "ringmaster",
    "safa",
    "scaffold",
    "skyrl",
    "sliding_delta",
    "streaming",
    "synchronous_rl",
    "trl",
    "verl",
    "verl_bounded",
]
