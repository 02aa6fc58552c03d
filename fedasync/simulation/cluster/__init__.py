"""A cluster for reinforcement learning of language models, under the virtual clock.

Rollout servers generate the answers to prompts, a trainer makes versions of them, and the weights of published versions
go back to the servers. The coordinator is the one of every runtime.
"""

from fedasync.rl.partial_groups import AllowShort, Refill, RequireFull
from fedasync.simulation.cluster.agents import Tool, Turns
from fedasync.simulation.cluster.cluster import Cluster, Reward
from fedasync.simulation.cluster.contention import Contention
from fedasync.simulation.cluster.decoding import Decoding, FixedSpeed, MeasuredSpeed, SharedSpeed
from fedasync.simulation.cluster.faults import (
    Faults,
    RewardStuck,
    ServerDown,
    SlowServer,
    SlowSync,
    SyncFails,
    TrainerCrash,
)
from fedasync.simulation.cluster.hardware import GPUS, MODELS, Gpu, LanguageModel
from fedasync.simulation.cluster.prompts import Prompts, Recorded, TwoLevel
from fedasync.simulation.cluster.settings import ClusterSettings
from fedasync.simulation.cluster.simulate import ClusterRequest, simulate_cluster
from fedasync.simulation.cluster.training import Trainer
from fedasync.simulation.cluster.weights import Weights

__all__ = [
    "GPUS",
    "MODELS",
    "AllowShort",
    "Cluster",
    "ClusterRequest",
    "ClusterSettings",
    "Contention",
    "Decoding",
    "Faults",
    "FixedSpeed",
    "Gpu",
    "LanguageModel",
    "MeasuredSpeed",
    "Prompts",
    "Recorded",
    "Refill",
    "RequireFull",
    "Reward",
    "RewardStuck",
    "ServerDown",
    "SharedSpeed",
    "SlowServer",
    "SlowSync",
    "SyncFails",
    "Tool",
    "Trainer",
    "TrainerCrash",
    "Turns",
    "TwoLevel",
    "Weights",
    "simulate_cluster",
]
