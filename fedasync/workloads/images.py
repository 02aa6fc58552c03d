"""What the image data sets share: flat images, dealt to clients by a partition."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer
from fedasync.workloads.classification import Classification
from fedasync.workloads.modules import ImageModel, image_module
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.partition import Partition
from fedasync.workloads.samples import subset

Samples: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Pixels [N, channels · height · width] and labels [N]."""


class ImageClassification(Classification):
    """Flat images of ``shape`` (channels, height, width): ``train`` dealt to clients, ``test`` kept.

    The limits ``train_samples`` and ``test_samples`` take the same images in every run, and the fewer are among the
    more. The arrays of ``train`` are shared, not copied.

    Raises ValueError for parameters out of range, naming the subclass.
    """

    def __init__(
        self,
        train: Samples,
        test: Samples,
        shape: tuple[int, int, int],
        clients: int,
        partition: Partition,
        model: ImageModel,
        hidden: int,
        train_samples: int | None,
        test_samples: int | None,
        local: LocalTraining,
        seed: int,
    ) -> None:
        name = type(self).__name__
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
