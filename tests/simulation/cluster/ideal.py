"""The ideal system of the tables: 64 slots of constant speed, batches of 64 single answers, a training step of 1 s.

Lengths are in tokens of 1 ms, so a mean length of 1,000 tokens takes 1 s.
"""

from __future__ import annotations

from typing import Any

from fedasync.core import EventLog, Strategy
from fedasync.simulation.cluster import Cluster, ClusterSettings, Faults, Prompts
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.cluster.training import Trainer
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Law, Lognormal

SLOTS = 64
BATCH = 64


def cluster(*, train_s: float = 1.0, slots: int = SLOTS, servers: int = 1, **knobs: Any) -> Cluster:
    """``servers`` of ``slots`` sequences each, which decode 1,000 tokens a second whatever else runs."""
    return Cluster(
        **{
            "generation_gpus": servers,
            "training_gpus": 1,
            "decoding": FixedSpeed(tokens_per_second=1000.0, max_running=slots),
            "trainer": Trainer(step_s=train_s),
            "weights": Weights(transfer=False),
            **knobs,
        }
    )


def lengths(sigma: float) -> Law:
    return Lognormal(1000.0, sigma) if sigma else Constant(1000.0)


def prompts(sigma: float = 1.0, *, answers: int = 1, **knobs: Any) -> Prompts:
    return Prompts(**{"answers": answers, "prompt_tokens": Constant(0.0), "answer_tokens": lengths(sigma), **knobs})


def play(
    strategy: Strategy,
    of: Cluster | None = None,
    asked: Prompts | None = None,
    *,
    faults: Faults | None = None,
    seed: int = 0,
    **limits: Any,
) -> ClusterSimulation:
    """A run, and all that can be asked of it afterwards."""
    settings = ClusterSettings(**{"versions": 100, **limits})
    simulation = ClusterSimulation(
        strategy, of or cluster(), asked or prompts(), settings, faults or Faults(), seed, EventLog()
    )
    simulation.run()
    return simulation
