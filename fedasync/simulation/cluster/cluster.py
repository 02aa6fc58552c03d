"""A cluster as its user describes it: who generates, who trains, over which wires."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer, check_real, check_type
from fedasync.rl.partial_groups import PartialGroups, Refill
from fedasync.simulation.cluster.contention import Contention
from fedasync.simulation.cluster.decoding import Decoding, FixedSpeed, MeasuredSpeed, ServerCost, SharedSpeed
from fedasync.simulation.cluster.hardware import GPUS, MODELS, Gpu, LanguageModel
from fedasync.simulation.cluster.training import Trainer, TrainerCost
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant, Law

Routing = Literal["least_loaded", "round_robin"]
Dropped = Literal["replace", "requeue"]

MOST_SERVERS = 32_767
"""Answers note their servers in 16 bits."""


@dataclass(frozen=True)
class Reward:
    """The reward service: seconds an answer takes it, and how many it grades at once (None: any number)."""

    latency_s: Law = Constant(0.0)
    workers: int | None = None

    def __post_init__(self) -> None:
        check_type("reward: latency_s", self.latency_s, Law, "a law such as Constant(1.0)")
        if self.workers is not None:
            check_integer("reward: workers", self.workers, 1)


PARTS = {
    "gpu": (str | Gpu, "the name of a preset, or a Gpu"),
    "model": (str | LanguageModel, "the name of a preset, or a LanguageModel"),
    "decoding": (
        Decoding | FixedSpeed | SharedSpeed | MeasuredSpeed,
        "a Decoding, a FixedSpeed, a SharedSpeed or a MeasuredSpeed",
    ),
    "trainer": (Trainer, "a Trainer"),
    "weights": (Weights, "a Weights"),
    "reward": (Reward, "a Reward"),
    "contention": (Contention, "a Contention"),
    "partial_groups": (PartialGroups, "a RequireFull, an AllowShort or a Refill"),
}
"""The types of a cluster's parts, and what is said where one has another."""


@dataclass(frozen=True)
class Cluster:
    """GPUs that generate (rollout servers of ``tensor_parallel`` GPUs each) and GPUs that train one model.

    ``gpu`` and ``model`` are names of presets or values of one's own. ``colocated``: all GPUs do both in turns, and
    each change takes ``switch_s``; generation stops while training goes on, and its KV cache is dropped.

    A new answer goes to the server with the fewest answers (``least_loaded``) or to the next one. An answer that uses
    tools comes back to its server; with ``prefix_cache`` only what the tool said is prefilled there, unless the weights
    have changed. ``partial_groups`` says what becomes of a group that loses an answer; ``dropped``, whether the prompt
    of a group that was dropped as too stale is asked again; ``most_attempts`` bounds how often a prompt is whose group
    failed by its own fault. ``contention``: what generating and training cost each other on one machine.

    Answers whose lengths have a bound beyond a server's KV cache are refused. Where no bound is known (a lognormal
    without ``most_tokens``), a sequence that is alone on its server may outgrow the cache, and goes on.
    """

    generation_gpus: int
    training_gpus: int
    gpu: str | Gpu = "h800"
    model: str | LanguageModel = "1.5b"
    tensor_parallel: int = 1
    colocated: bool = False
    switch_s: float = 0.0
    decoding: Decoding | FixedSpeed | SharedSpeed | MeasuredSpeed = Decoding()
    trainer: Trainer = Trainer(mfu=0.4)
    weights: Weights = Weights()
    reward: Reward = Reward()
    routing: Routing = "least_loaded"
    prefix_cache: bool = False
    partial_groups: PartialGroups = Refill()
    dropped: Dropped = "replace"
    most_attempts: int = 3
    contention: Contention = Contention()

    def __post_init__(self) -> None:
        for name in ("generation_gpus", "training_gpus", "tensor_parallel", "most_attempts"):
            check_integer(name, getattr(self, name), 1)
        for name in ("colocated", "prefix_cache"):
            check_type(name, getattr(self, name), bool, "true or false")
        for name, (kind, wanted) in PARTS.items():
            check_type(name, getattr(self, name), kind, wanted)
        check_real("switch_s", self.switch_s, 0, inf)
        check_choice("routing", self.routing, Routing)
        check_choice("dropped", self.dropped, Dropped)
        if self.generation_gpus % self.tensor_parallel:
            raise ValueError(
                f"generation_gpus = {self.generation_gpus} do not make whole servers of {self.tensor_parallel} GPUs "
                f"(tensor_parallel); a multiple of {self.tensor_parallel} would do"
            )
        if self.servers > MOST_SERVERS:
            raise ValueError(
                f"{self.servers:,} rollout servers (generation_gpus / tensor_parallel); ≤ {MOST_SERVERS:,} would do"
            )
        if self.switch_s and not self.colocated:
            raise ValueError(
                f"switch_s = {self.switch_s:g} says nothing where other GPUs train; colocated = true, or no switch_s, "
                "would do"
            )
        if self.colocated and not self.contention.is_none:
            raise ValueError(
                "contention: says nothing on a colocated cluster, where generating and training take turns; leave it "
                "out"
            )
        if self.colocated and self.weights.order != "all_at_once":
            raise ValueError(
                f"weights: order = {self.weights.order!r} says nothing on a colocated cluster, whose training stops "
                "all servers; 'all_at_once' would do"
            )
        if self.colocated and self.training_gpus != self.generation_gpus:
            raise ValueError(
                f"colocated: the same GPUs generate and train, got generation_gpus = {self.generation_gpus} and "
                f"training_gpus = {self.training_gpus}; equal numbers would do"
            )
        for name, value, presets in (("gpu", self.gpu, GPUS), ("model", self.model, MODELS)):
            if isinstance(value, str) and value not in presets:
                raise ValueError(f"{name}: no preset {value!r}; one of {', '.join(presets)}, or a table, would do")
        self.server_cost  # noqa: B018  raises where the model does not fit

    @property
    def hardware(self) -> Gpu:
        return GPUS[self.gpu] if isinstance(self.gpu, str) else self.gpu

    @property
    def language_model(self) -> LanguageModel:
        return MODELS[self.model] if isinstance(self.model, str) else self.model

    @property
    def servers(self) -> int:
        """Rollout servers."""
        return self.generation_gpus // self.tensor_parallel

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.generation_gpus if self.colocated else self.generation_gpus + self.training_gpus

    @property
    def server_cost(self) -> ServerCost:
        return self.decoding.cost(self.hardware, self.language_model, self.tensor_parallel)

    @property
    def trainer_cost(self) -> TrainerCost:
        return self.trainer.cost(self.hardware, self.language_model, self.training_gpus)

    @property
    def sync_s(self) -> float:
        """Seconds in which one server takes new weights, apart from the delay until it learns of them."""
        return self.weights.seconds(self.hardware, self.language_model, self.tensor_parallel)
