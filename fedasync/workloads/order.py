"""The order in which a task passes over its samples: a function of seed, epoch and sample, with no state to keep.

The generator is SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 15),
whose k-th output is a bijection of its start + k·γ. Sorting the samples by it costs a few array operations for any
number of tasks, where one generator object a task costs twenty microseconds each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
LAST = np.uint64(2**64 - 1)


def orders(seeds: NDArray[np.uint64], epochs: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """A uniform permutation of 0 … n − 1 for each task and epoch, as an array [tasks, epochs, largest n].

    ``seeds`` [tasks] with 0 ≤ seed < 2^64, ``counts`` [tasks] their numbers of samples n. Row (i, e) begins with the
    permutation of task i in epoch e; behind its n values stand indices ≥ n, in any order.
    """
    sample = np.arange(counts.max(initial=0), dtype=np.uint64)
    epoch = np.arange(1, epochs + 1, dtype=np.uint64)
    start = _mixed(_mixed(seeds + GAMMA)[:, None] + epoch * GAMMA)
    keys = _mixed(start[:, :, None] + (sample + np.uint64(1)) * GAMMA)
    if counts.min(initial=len(sample)) < len(sample):
        keys[np.broadcast_to((sample >= counts[:, None].astype(np.uint64))[:, None, :], keys.shape)] = LAST
    # Keys of one row are distinct (a bijection of distinct numbers), so any sorting algorithm gives the same order.
    return np.argsort(keys, axis=-1)


def generator_seed(seed: int) -> int:
    """A seed for a generator of another library, which may look at its low 32 bits only: all of ``seed`` is in them."""
    return int(_mixed(_mixed(np.array([seed], dtype=np.uint64)))[0] >> np.uint64(1))


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
