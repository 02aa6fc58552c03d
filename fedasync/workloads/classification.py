"""Classification of your own arrays by your own module, as a federated workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.aggregation.model import Contribution, Model
from fedasync.core.bounds import check_client
from fedasync.workloads.protocol import Task
from fedasync.workloads.training import LocalTraining, ModuleTrainer, module_state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

EVALUATION_BATCH = 1024


class Classification:
    """A ``Workload``: cross-entropy on labelled samples, ``accuracy`` and ``loss`` on a test set.

    Parameters
    ----------
    features, labels : [N, ...] and [N]
        Training samples. Floating features are cast to the dtype of the module, others (token ids) to int64;
        labels are integers ≥ 0.
    test_features, test_labels : [M, ...] and [M]
        Samples that no client trains on.
    partition : one index array per client
        Rows of ``features`` that the client holds, as a ``Partition`` splits them.
    module : function that returns a new ``torch.nn.Module``
        From a batch of features [B, ...] to logits [B, classes]. To use the workload in several processes it must
        be picklable: a function of a file, not a lambda.
    local : LocalTraining
        What a client does with its samples.

    Raises ValueError for arrays that do not fit together and for clients without samples.
    """

    def __init__(
        self,
        features: NDArray[Any],
        labels: NDArray[Any],
        test_features: NDArray[Any],
        test_labels: NDArray[Any],
        partition: Sequence[NDArray[Any]],
        module: Callable[[], Any],
        local: LocalTraining = LocalTraining(),
    ) -> None:
        features, labels, test_features, test_labels = map(np.asarray, (features, labels, test_features, test_labels))
        _check_samples("", features, labels)
        _check_samples("test_", test_features, test_labels)
        if not partition:
            raise ValueError("partition must hold an index array for at least one client, got none")
        rows_of = [np.asarray(rows) for rows in partition]
        for client, rows in enumerate(rows_of):
            if rows.size == 0:
                raise ValueError(f"partition: client {client} has no samples; every client needs at least one")
            if rows.min() < 0 or rows.max() >= len(labels):
                raise ValueError(
                    f"partition: client {client} has rows {rows.min()} to {rows.max()};"
                    f" rows of features are 0 to {len(labels) - 1}"
                )
        self.local = local
        self._train = (features, labels)
        self._test = (test_features, test_labels)
        self._partition = rows_of
        self._module = module
        self._trainer: ModuleTrainer | None = None
        self._gathered: dict[int | None, tuple[Tensor, Tensor]] = {}

    def client_samples(self) -> Sequence[int]:
        return [len(rows) for rows in self._partition]

    def initial_model(self, seed: int) -> Model:
        """The module's own initialisation after ``torch.manual_seed(seed)``; torch's generator is left alone."""
        return Model.from_tensors(module_state(self._new_module(seed)))

    def train(self, task: Task) -> Contribution:
        """See ``ModuleTrainer.train``."""
        check_client(task.client, len(self._partition))
        return self._bound().train(task, self._data(task.client), self.local)

    def evaluate(self, model: Model) -> dict[str, float]:
        """Share of test samples whose largest logit is their label's, and mean cross-entropy in nats."""
        import torch
        from torch.nn.functional import cross_entropy

        trainer = self._bound()
        trainer.load(model)
        trainer.module.eval()
        correct, loss = 0, 0.0
        with torch.no_grad():
            batches = (torch.split(tensor, EVALUATION_BATCH) for tensor in self._data(None))
            for x, y in zip(*batches, strict=True):
                logits = trainer.module(x)
                loss += cross_entropy(logits, y, reduction="sum").item()
                correct += int((logits.argmax(dim=1) == y).sum())
        samples = len(self._test[1])
        return {"accuracy": correct / samples, "loss": loss / samples}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made on demand: a copied trainer would have lost its shared storage."""
        return {**self.__dict__, "_trainer": None, "_gathered": {}}

    def _new_module(self, seed: int) -> Module:
        import torch

        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            module: Module = self._module()
        return module

    def _bound(self) -> ModuleTrainer:
        from torch.nn.functional import cross_entropy

        if self._trainer is None:
            self._trainer = ModuleTrainer(self._new_module(0), lambda module, x, y: cross_entropy(module(x), y))
        return self._trainer

    def _data(self, client: int | None) -> tuple[Tensor, Tensor]:
        """Features and labels of a client, or of the test set for None: gathered once and kept."""
        import torch

        if client not in self._gathered:
            if client is None:
                features, labels = self._test
            else:
                rows = self._partition[client]
                features, labels = self._train[0][rows], self._train[1][rows]
            dtype = self._bound().dtype if np.issubdtype(features.dtype, np.floating) else torch.int64
            self._gathered[client] = (
                torch.as_tensor(features, dtype=dtype),
                torch.as_tensor(labels, dtype=torch.int64),
            )
        return self._gathered[client]


def _check_samples(prefix: str, features: NDArray[Any], labels: NDArray[Any]) -> None:
    if labels.ndim != 1 or len(labels) == 0:
        raise ValueError(f"{prefix}labels must have shape [N] with N ≥ 1, got {list(labels.shape)}")
    if len(features) != len(labels):
        raise ValueError(f"{prefix}features and {prefix}labels must be as many, got {len(features)} and {len(labels)}")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise ValueError(f"{prefix}labels must be integers ≥ 0, got {labels.dtype} with smallest {labels.min()}")
