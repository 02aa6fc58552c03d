"""Classification of your own arrays by your own module, as a federated workload."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedasync.aggregation.model import Contribution, Model
from fedasync.core.bounds import check_client
from fedasync.workloads.comparing import Comparison, compared_rows
from fedasync.workloads.optimizer import LocalTraining, training_device
from fedasync.workloads.protocol import Task, Workload
from fedasync.workloads.training import ModuleTrainer, module_state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fedasync.workloads.batched import BatchedTrainer, Dealt

EVALUATION_BATCH = 1024


class Classification:
    """A ``BatchedWorkload``: cross-entropy on labelled samples, ``accuracy`` and ``loss`` on a test set.

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
        training_device(local.device)  # a device that is not there is an error now, not in the middle of a run
        self.local = local
        self._train = (features, labels)
        self._test = (test_features, test_labels)
        self._partition = rows_of
        self._module = module
        self._trainer: ModuleTrainer | None = None
        self._batched: BatchedTrainer | str | None = None
        self._leader: Classification | None = None
        self._alone = object()
        self._dealt: Dealt | None = None
        self._tested: tuple[Tensor, Tensor] | None = None
        self._compared: Comparison | None = None

    def client_samples(self) -> Sequence[int]:
        return [len(rows) for rows in self._partition]

    def client_labels(self) -> Sequence[Sequence[int]]:
        """The distinct labels of each client's samples, in order."""
        return [np.unique(self._train[1][rows]).tolist() for rows in self._partition]

    def initial_model(self, seed: int) -> Model:
        """The module's own initialisation after ``torch.manual_seed(seed)``; torch's generator is left alone."""
        module = self._new_module(seed)
        return Model.from_tensors(module_state(module), dict(module.named_buffers()))

    def train(self, task: Task) -> Contribution:
        """See ``ModuleTrainer.train``."""
        check_client(task.client, len(self._partition))
        return self._bound().train(task, self._data().of(task.client), self.local)

    @property
    def batch_key(self) -> Hashable | None:
        """Equal for workloads with the very same module function, local training and shape of samples."""
        if self._leader is not None:
            return self._leader.batch_key
        return self._key() if self.not_batched is None else None

    @property
    def not_batched(self) -> str | None:
        """Why tasks train one by one; found out by a trial of two clients at the first question."""
        if self._leader is not None:
            return self._leader.not_batched
        if self._batched is None:
            self._batched = self._tried()
        return self._batched if isinstance(self._batched, str) else None

    def follow(self, leader: Classification) -> None:
        """Train in the lanes of ``leader``, which was made in the same way but for the seed.

        Nothing changes where the two do not fit together after all.
        """
        if (type(self), self.local, self._shape()) == (type(leader), leader.local, leader._shape()):
            self._leader = leader

    def train_batch(self, work: Sequence[tuple[Workload, Task]], memory_bytes: int) -> Sequence[Contribution]:
        """See ``BatchedTrainer.train``; one by one where ``not_batched`` says why."""
        from fedasync.workloads.batched import Lane

        if self._leader is not None:
            return self._leader.train_batch(work, memory_bytes)
        key = self.batch_key
        if isinstance(self._batched, str) or self._batched is None:
            return [workload.train(task) for workload, task in work]
        lanes = []
        fits: dict[int, bool] = {id(self): True}
        for workload, task in work:
            if id(workload) not in fits:
                fits[id(workload)] = isinstance(workload, Classification) and workload.batch_key == key
            if not fits[id(workload)] or not isinstance(workload, Classification):
                raise ValueError(f"{type(workload).__name__} has another batch_key than {type(self).__name__}")
            check_client(task.client, len(workload._partition))
            lanes.append(Lane(workload._data(), task))
        return self._batched.train(lanes, memory_bytes)

    def evaluate(self, model: Model) -> dict[str, float]:
        """Share of test samples whose largest logit is their label's, and mean cross-entropy in nats."""
        import torch
        from torch.nn.functional import cross_entropy

        trainer = self._bound()
        trainer.load(model)
        trainer.module.eval()
        correct, loss = 0, 0.0
        with torch.no_grad():
            batches = (torch.split(tensor, EVALUATION_BATCH) for tensor in self._test_data())
            for x, y in zip(*batches, strict=True):
                logits = trainer.module(x)
                loss += cross_entropy(logits, y, reduction="sum").item()
                correct += int((logits.argmax(dim=1) == y).sum())
        samples = len(self._test[1])
        return {"accuracy": correct / samples, "loss": loss / samples}

    def compare(self, published: Model, current: Model) -> dict[str, float]:
        """How differently two versions answer up to 512 test samples, evenly spread: see ``comparing.differences``."""
        trainer = self._bound()
        if self._compared is None:
            x, _ = self._test_data()
            self._compared = Comparison(x[compared_rows(len(x))])
        return self._compared.compare(trainer.module, trainer.load, published, current)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made on demand: a copied trainer would have lost its shared storage."""
        return {
            **self.__dict__,
            "_trainer": None,
            "_batched": None,
            "_leader": None,
            "_dealt": None,
            "_tested": None,
            "_compared": None,
        }

    def _new_module(self, seed: int) -> Module:
        import torch

        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            module: Module = self._module()
        return module

    def _bound(self) -> ModuleTrainer:
        if self._trainer is None:
            self._trainer = ModuleTrainer(self._new_module(0), _losses, training_device(self.local.device))
        return self._trainer

    def _shape(self) -> Hashable:
        features = self._data().tensors[0]
        return (self._bound().layout, features.shape[1:], features.dtype)

    def _key(self) -> Hashable:
        module = self._module
        made: Hashable = module
        if isinstance(module, partial):
            made = (module.func, module.args, tuple(sorted(module.keywords.items())))
        key = (type(self), made, self.local, self._shape())
        try:
            hash(key)
        except TypeError:  # the module is made from something that cannot be compared
            return self._alone
        return key

    def _tried(self) -> BatchedTrainer | str:
        from fedasync.workloads.batched import BatchedTrainer

        if type(self).train is not Classification.train:
            return f"{type(self).__name__} trains in its own way"
        own = ModuleTrainer(self._new_module(0), _losses, training_device(self.local.device))  # not evaluation's
        batched = BatchedTrainer(own, self.local, _lane_losses)
        return batched.trial(self._data(), self.initial_model(0)) or batched

    def _data(self) -> Dealt:
        """The training samples, made into tensors once."""
        from fedasync.workloads.batched import Dealt

        if self._dealt is None:
            self._dealt = Dealt.to_clients(self._tensors(*self._train), self._partition)
        return self._dealt

    def _test_data(self) -> tuple[Tensor, Tensor]:
        if self._tested is None:
            self._tested = self._tensors(*self._test)
        return self._tested

    def _tensors(self, features: NDArray[Any], labels: NDArray[Any]) -> tuple[Tensor, Tensor]:
        import torch

        trainer = self._bound()
        dtype = trainer.dtype if np.issubdtype(features.dtype, np.floating) else torch.int64
        return (
            torch.as_tensor(features, dtype=dtype, device=trainer.device),
            torch.as_tensor(labels, dtype=torch.int64, device=trainer.device),
        )


def _losses(module: Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each sample in nats."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(module(x), y, reduction="none")


def _lane_losses(module: Module, x: Tensor, y: Tensor) -> Tensor:
    """``_losses`` in half the operations: cross_entropy looks for an index to ignore, labels ≥ 0 need none."""
    import torch

    logits = module(x)
    losses: Tensor = torch.logsumexp(logits, 1) - logits.gather(1, y[:, None]).squeeze(1)
    return losses


def _check_samples(prefix: str, features: NDArray[Any], labels: NDArray[Any]) -> None:
    if labels.ndim != 1 or len(labels) == 0:
        raise ValueError(f"{prefix}labels must have shape [N] with N ≥ 1, got {list(labels.shape)}")
    if len(features) != len(labels):
        raise ValueError(f"{prefix}features and {prefix}labels must be as many, got {len(features)} and {len(labels)}")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise ValueError(f"{prefix}labels must be integers ≥ 0, got {labels.dtype} with smallest {labels.min()}")
