"""The learning workload that every system gets: data, split, model and local work, in plain torch.

scikit-learn's digits; 297 images are the test set, 1,500 are dealt to 100 clients of 15; MLP 64-32-10; a client makes
five steps of SGD, batches of 10 and 5 images in turn, learning rate 0.1; one torch thread a process. Data, split and
initial weights are those of ``fedasync.workloads.Digits(clients=100, partition=Iid(), hidden=32)``.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import chain, islice

import numpy as np
import torch
from protocol import BATCH_SIZE, CLIENTS, HIDDEN, LEARNING_RATE, STEPS, TEST_SAMPLES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pixels and labels, test pixels and labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy((pixels / 16).astype(np.float32)), torch.from_numpy(labels.astype(np.int64))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return x[train], y[train], x[test], y[test]


@cache
def partition() -> list[list[int]]:
    """Training rows of each client."""
    rng = np.random.default_rng(np.random.SeedSequence(0, spawn_key=tuple(b"partition")))
    return [sorted(part.tolist()) for part in np.array_split(rng.permutation(len(data()[1])), CLIENTS)]


@cache
def client(index: int) -> tuple[Tensor, Tensor]:
    x, y, _, _ = data()
    rows = partition()[index]
    return x[rows], y[rows]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def train(net: nn.Module, index: int) -> None:
    """The local work of one client, in place."""
    x, y = client(index)
    optimiser = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    passes = (torch.split(torch.randperm(len(x)), BATCH_SIZE) for _ in range(STEPS))
    for rows in islice(chain.from_iterable(passes), STEPS):
        optimiser.zero_grad()
        cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()


def outcome(net: nn.Module) -> dict[str, float | str]:
    """Test accuracy and a digest of the weights."""
    _, _, x, y = data()
    with torch.no_grad():
        accuracy = (net(x).argmax(dim=1) == y).double().mean().item()
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    return {"accuracy": accuracy, "sha256": hashlib.sha256(flat.numpy().tobytes()).hexdigest()}
