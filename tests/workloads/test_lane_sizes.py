"""Lanes of clients of all sizes: samples gathered in pieces, batches that may not be filled up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedasync.workloads import Classification, LocalTraining, Task


def made_of(module: Any, counts: list[int], local: LocalTraining) -> Classification:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((sum(counts), 6)), rng.integers(3, size=sum(counts))
    parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    return Classification(x, y, x, y, parts, module, local)


def linear_double() -> nn.Module:
    return nn.Linear(6, 3).double()


class Centred(nn.Module):
    """The samples of a batch see each other, and nothing is kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x - x.mean(0))
        return found


@pytest.mark.parametrize("memory_bytes", [0, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20])
def test_samples_gathered_piece_by_piece_while_lanes_end(memory_bytes: int) -> None:
    world = made_of(linear_double, [60, 12, 30, 7, 44], LocalTraining(epochs=3, batch_size=5))
    model = world.initial_model(0)
    work = [(world, Task(client, model, seed=client)) for client in range(5)]
    for found, (_, task) in zip(world.train_batch(work, memory_bytes), work, strict=True):
        assert torch.allclose(found.values, world.train(task).values, rtol=1e-9, atol=1e-12)
    whole = world.train_batch(work, 2**30)
    assert all(
        torch.equal(a.values, b.values) for a, b in zip(whole, world.train_batch(work, memory_bytes), strict=True)
    )


@pytest.mark.parametrize("counts", [[20, 13, 8], [20, 20], [16, 3, 1], [40, 21]])
def test_a_module_whose_samples_see_each_other_is_never_filled_up(counts: list[int]) -> None:
    """Whatever the clients' sizes are: the trial makes up its own."""
    world = made_of(Centred, counts, LocalTraining(epochs=2, batch_size=20))
    assert world.not_batched is None
    model = world.initial_model(0)
    work = [(world, Task(client, model, seed=client)) for client in range(len(counts))]
    for found, (_, task) in zip(world.train_batch(work, 2**30), work, strict=True):
        assert torch.allclose(found.values, world.train(task).values, rtol=1e-9, atol=1e-12)
