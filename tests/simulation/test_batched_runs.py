"""A whole run computed in batches is the run computed one by one: the same log, and weights to rounding."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedasync import strategies
from fedasync.federated.arrays import WorkloadError
from fedasync.simulation import Population, simulate
from fedasync.simulation.laws import Lognormal
from fedasync.workloads import Classification, Dirichlet, Iid, LocalTraining, Quadratic

TOKENS, LENGTH, CLASSES = 12, 6, 3


class Sequence(nn.Module):
    """Token ids [B, L] to logits, through a layer that yields [B, L, 8]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.layer = layer
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(x))
        found: Tensor = self.head((hidden[0] if isinstance(hidden, tuple) else hidden).mean(1))
        return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(LENGTH, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)
    )


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(LENGTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def transformer() -> nn.Module:
    return Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))


def gru() -> nn.Module:
    return Sequence(nn.GRU(8, 8, batch_first=True))


def lstm() -> nn.Module:
    return Sequence(nn.LSTM(8, 8, batch_first=True))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(LENGTH, 7), nn.Dropout(0.5), nn.Linear(7, CLASSES))


MODULES = {f.__name__: f for f in (mlp, cnn, normalised, transformer, gru, lstm)}


def workload(module: Callable[[], nn.Module], local: LocalTraining) -> Classification:
    """Clients of 1 to some 20 samples each; in double precision, in which rounding does not grow to choices."""
    rng = np.random.default_rng(5)
    y = rng.integers(CLASSES, size=140)
    x: Any = (y[:, None] * 3 + rng.integers(TOKENS // 2, size=(140, LENGTH))) % TOKENS
    if module in (mlp, cnn, normalised, dropping):
        x = x / TOKENS
    dealt = Iid() if module is normalised else Dirichlet(0.5)  # a batch of one has no statistics
    parts = dealt.split(y[:110], 12, 3)
    return Classification(x[:110], y[:110], x[110:], y[110:], parts, lambda: module().double(), local)


@pytest.mark.parametrize("local", ["momentum, prox and decay", "adam"])
@pytest.mark.parametrize("name", MODULES)
def test_a_run_in_batches_is_the_run_one_by_one(name: str, local: str) -> None:
    settings = (
        LocalTraining(steps=4, batch_size=5, optimizer="adam", learning_rate=0.01)
        if local == "adam"
        else LocalTraining(epochs=2, batch_size=6, momentum=0.9, weight_decay=0.01, learning_rate=0.05)
    )
    world = workload(MODULES[name], settings)
    strategy = strategies.fedasync(concurrency=7, alpha=0.5, proximal_mu=0.0 if local == "adam" else 0.1)
    one, batched = (
        simulate(strategy, Population(duration_s=Lognormal(5.0, 0.8)), world, updates=60, training=training, seed=1)
        for training in ("one_by_one", "batched")
    )
    assert batched.summary["not_batched"] is None
    assert one.events.equals(batched.events)
    assert one.model is not None
    assert batched.model is not None
    moved = one.model.values - world.initial_model(1).values
    assert (one.model.values - batched.model.values).norm() <= 1e-5 * moved.norm()
    assert moved.norm() > 0.01


def test_evaluations_between_batches_change_nothing() -> None:
    """Evaluation puts a module into another mode, which batch norm would notice."""
    world = workload(normalised, LocalTraining(epochs=2, batch_size=6))
    one, batched, bare = (
        simulate(
            strategies.fedbuff(concurrency=6, buffer_size=3),
            Population(duration_s=Lognormal(5.0, 0.8)),
            world,
            updates=40,
            training=training,
            evaluate_every_s=every_s,
        )
        for training, every_s in (("one_by_one", 3.0), ("batched", 3.0), ("batched", None))
    )
    assert one.model is not None
    assert batched.model is not None
    assert bare.model is not None
    assert torch.equal(batched.model.values, bare.model.values)
    assert (one.model.values - batched.model.values).norm() <= 1e-5 * one.model.values.norm()


class Misbehaves(Quadratic):
    """Trains well one by one."""

    def train_batch(self, work: Any, memory_bytes: int) -> Any:
        if len(work) > 1:
            raise MemoryError("too many")
        return super().train_batch(work, memory_bytes)


class ReturnsTooFew(Quadratic):
    def train_batch(self, work: Any, memory_bytes: int) -> Any:
        return super().train_batch(work, memory_bytes)[1:]


def test_a_batch_that_fails_by_itself_is_told() -> None:
    population = Population(duration_s=Lognormal(5.0, 0.8))
    run = simulate(strategies.fedasync(concurrency=3), population, Misbehaves(6), updates=9)
    assert run.summary["not_batched"] == "a batch raised MemoryError: too many"
    with pytest.raises(WorkloadError, match="train_batch returned 0 contributions for 1 tasks"):
        simulate(strategies.fedasync(concurrency=3), population, ReturnsTooFew(6), updates=9)


def test_results_computed_ahead_take_no_more_memory_than_was_given() -> None:
    class Wide(Quadratic):
        most = 0

        def train_batch(self, work: Any, memory_bytes: int) -> Any:
            Wide.most = max(Wide.most, len(work))
            return super().train_batch(work, memory_bytes)

    world, population = Wide(30, dimensions=100), Population(duration_s=Lognormal(5.0, 0.1))
    runs = []
    for memory_bytes, most in ((1 << 30, 20), (5 * 800, 5), (1, 1)):
        Wide.most = 0
        strategy = strategies.fedasync(concurrency=20)
        runs.append(simulate(strategy, population, world, updates=60, batch_memory_bytes=memory_bytes))
        assert most // 2 < Wide.most <= most
    assert all(torch.equal(run.model.values, runs[0].model.values) for run in runs)  # type: ignore[union-attr]


def test_a_module_that_draws_random_numbers_trains_one_by_one_and_says_so() -> None:
    world = workload(dropping, LocalTraining())
    run = simulate(strategies.fedasync(concurrency=3), Population(duration_s=Lognormal(5.0, 0.8)), world, updates=5)
    assert "random numbers" in run.summary["not_batched"]
    alone = simulate(
        strategies.fedasync(concurrency=3),
        Population(duration_s=Lognormal(5.0, 0.8)),
        world,
        updates=5,
        training="one_by_one",
    )
    assert alone.summary["not_batched"] is None
    assert torch.equal(run.model.values, alone.model.values)  # type: ignore[union-attr]


def test_a_process_keeps_nothing_of_the_runs_that_it_made() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    world = workload(mlp, LocalTraining())
    made = []
    for each in range(6):
        for strategy in (strategies.fedbuff(concurrency=6), strategies.fedfa(concurrency=4, window=5)):
            simulate(strategy, Population(duration_s=Lognormal(5.0, 0.8)), world, updates=40, seed=each)
            simulate(strategy, Population(duration_s=Lognormal(5.0, 0.8)), Quadratic(9), updates=40, seed=each)
        made.append(tensors())
    assert made[-1] == made[1]
