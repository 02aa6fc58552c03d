"""What the image data sets share: flat images, dealt to clients by a partition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer
from fedasync.workloads.classification import Classification
from fedasync.workloads.modules import ImageModel, image_module
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.partition import Dirichlet, Partition
from fedasync.workloads.samples import need_torch, subset

Samples: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Pixels [N, channels · height · width] and labels [N]."""

Images: TypeAlias = tuple[Samples, Samples, tuple[int, int, int]]
"""Training images, test images, and their shape (channels, height, width)."""


class ImageClassification(Classification, ABC):
    """The images that a subclass reads (from ``path``): those for training dealt to clients, those for tests kept.

    A subclass says its ``kind`` in a study, how many clients there are when nothing else is said, and how to read.
    The limits ``train_samples`` and ``test_samples`` take the same images in every run, and the fewer are among the
    more. The arrays of the training images are shared, not copied.

    Raises ValueError for parameters out of range, naming the subclass; ImportError without torch.
    """

    kind: ClassVar[str]
    usual_clients: ClassVar[int]

    def __init__(
        self,
        path: str | None = None,
        clients: int | None = None,
        partition: Partition = Dirichlet(0.5),
        model: ImageModel = "mlp",
        hidden: int = 64,
        train_samples: int | None = None,
        test_samples: int | None = None,
        local: LocalTraining = LocalTraining(),
        seed: int = 0,
    ) -> None:
        need_torch(self.kind)
        train, test, shape = self.read(path)
        name = type(self).__name__
        clients = self.usual_clients if clients is None else clients
        check_integer(f"{name}: clients", clients, 1)
        check_integer(f"{name}: seed", seed, 0)
        rows = subset(f"{name}: train_samples", train_samples, len(train[1]))
        kept = subset(f"{name}: test_samples", test_samples, len(test[1]))
        classes = int(max(train[1].max(), test[1].max())) + 1
        module = image_module(name, model, shape, hidden, classes)
        super().__init__(
            *train,
            test[0][kept],
            test[1][kept],
            [rows[part] for part in partition.split(train[1][rows], clients, seed)],
            module,
            local,
        )

    @staticmethod
    @abstractmethod
    def read(path: str | None) -> Images:
        """The images of the folder ``path``, or those to be had without one."""
