"""Which samples are taken, and what is done to their features before a module sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer


def need_torch(name: str) -> None:
    """Raise ImportError, with the remedy in one line, where torch is missing."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the {name} workload needs torch ({error}): pip install 'fedasync[torch]'") from error


def subset(name: str, limit: int | None, count: int) -> NDArray[np.int64]:
    """``limit`` of ``count`` rows, ascending: the same ones every time, the fewer among the more; None: all.

    Raises ValueError, with the key's ``name``, for a limit below 1 or above ``count``.
    """
    if limit is None:
        return np.arange(count)
    check_integer(name, limit, 1)
    if limit > count:
        raise ValueError(f"{name} must be at most {count}, the number of samples, got {limit}")
    return np.sort(np.random.default_rng(0).permutation(count)[:limit])


def standardised(train: NDArray[Any], *others: NDArray[Any]) -> list[NDArray[np.float32]]:
    """Columns of every array less the mean of ``train``, over its standard deviation (1 for a constant column)."""
    mean, deviation = train.mean(axis=0, dtype=np.float64), train.std(axis=0, dtype=np.float64)
    deviation[deviation == 0] = 1.0
    return [((each - mean) / deviation).astype(np.float32) for each in (train, *others)]


def classes_of(name: str, train: NDArray[Any], test: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Class of each label, numbered in the order of the training labels' values, and how many classes there are.

    Raises ValueError, with the label's ``name``, for a test label that no training sample has.
    """
    known, y = np.unique(train, return_inverse=True)
    strange = ~np.isin(test, known)
    if strange.any():
        raise ValueError(f"{name}: {test[strange].tolist()[0]!r} stands in the test samples only; leave that class out")
    return y, np.searchsorted(known, test), len(known)
