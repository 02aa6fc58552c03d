"""Handwritten digits of 8 x 8 pixels: a real problem that trains in seconds and needs no download."""

from __future__ import annotations

import gzip
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer
from fedasync.workloads.classification import Classification
from fedasync.workloads.modules import mlp
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.partition import Dirichlet, Partition

if TYPE_CHECKING:
    from torch.nn import Module

TEST_SAMPLES = 297


class Digits(Classification):
    """The ``load_digits`` data of scikit-learn: 1,797 images of ten digits, pixels scaled to 0 … 1.

    297 images, the same in every run, are the test set; ``partition`` deals the other 1,500 to ``clients`` from
    ``seed``. ``model`` is an MLP 64-``hidden``-10 or a CNN of two 3 x 3 convolutions (9,930 parameters).

    Raises ValueError for parameters out of range and ImportError without torch and scikit-learn.
    """

    def __init__(
        self,
        clients: int = 50,
        partition: Partition = Dirichlet(0.5),
        model: Literal["mlp", "cnn"] = "mlp",
        hidden: int = 32,
        local: LocalTraining = LocalTraining(),
        seed: int = 0,
    ) -> None:
        missing = [name for name in ("torch", "sklearn") if find_spec(name) is None]
        if missing:
            raise ImportError(
                f"the digits workload needs torch and scikit-learn, and there is no {' and no '.join(missing)}: "
                "pip install 'fedasync[torch]'"
            )
        check_integer("Digits: clients", clients, 1)
        check_integer("Digits: hidden", hidden, 1)
        check_integer("Digits: seed", seed, 0)
        if model not in ("mlp", "cnn"):
            raise ValueError(f"Digits: model must be 'mlp' or 'cnn', got {model!r}")
        pixels, labels = _images()
        order = np.random.default_rng(0).permutation(len(labels))
        test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
        super().__init__(
            pixels[train],
            labels[train],
            pixels[test],
            labels[test],
            partition.split(labels[train], clients, seed),
            partial(mlp, 64, hidden, 10) if model == "mlp" else _cnn,
            local,
        )


@cache
def _images() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """From scikit-learn's file, read without importing scikit-learn: that takes seconds, in every client's process."""
    found = find_spec("sklearn")
    assert found is not None  # checked before
    assert found.origin is not None
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int64)


def _cnn() -> Module:
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
