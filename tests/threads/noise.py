"""A model that trains, small enough for a test: six numbers of noise, three labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from fedasync.workloads import Classification, Iid, LocalTraining


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def noise(
    module: Callable[[], nn.Module],
    *,
    clients: int = 8,
    scale: float = 1.0,
    kind: type[Classification] = Classification,
) -> Any:
    """320 samples dealt evenly to the clients, who pass over theirs once, eight at a time; 80 to test on."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 6)).astype(np.float32) * scale, rng.integers(0, 3, 400)
    split = Iid().split(y[:320], clients, 0)
    return kind(x[:320], y[:320], x[320:], y[320:], split, module, LocalTraining(epochs=1, batch_size=8))
