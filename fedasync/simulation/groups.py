"""Which client belongs to which group (a tier, a region): exact numbers, dealt at random."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import floor, isfinite

import numpy as np
from numpy.typing import NDArray

from fedasync.streams import Stream


def check_shares(name: str, shares: Sequence[float]) -> None:
    """Raise ValueError unless shares are numbers > 0 that add up to 1."""
    for share in shares:
        if not (isfinite(share) and share > 0):
            raise ValueError(f"{name} must be > 0, got {share}")
    if abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"{name} must add up to 1, got {' + '.join(f'{share:g}' for share in shares)} = {sum(shares):g}"
        )


def counts(shares: Sequence[float], total: int) -> list[int]:
    """Shares of a number as integers that add up to it: rounded down, then one more where most was lost."""
    exact = [share / sum(shares) * total for share in shares]
    found = [floor(number) for number in exact]
    by_loss = sorted(range(len(shares)), key=lambda group: (found[group] - exact[group], group))
    for group in by_loss[: total - sum(found)]:
        found[group] += 1
    return found


def dealt(numbers: Sequence[int], stream: Stream) -> array[int]:
    """For each client the group it belongs to, ``numbers[g]`` clients in group g, at random."""
    groups = np.empty(sum(numbers), np.int32)
    groups[order(stream, len(groups))] = np.repeat(np.arange(len(numbers), dtype=np.int32), numbers)
    return array("i", groups.tobytes())


def order(stream: Stream, count: int) -> NDArray[np.int64]:
    """A random order of 0 … count − 1."""
    found: NDArray[np.int64] = np.argsort(np.array(stream.block(0, count), np.uint64), kind="stable")
    return found


def uniforms_of(stream: Stream, count: int) -> Iterator[list[float]]:
    """``stream.uniform`` of 0 … count − 1, a part of them at a time."""
    for first in range(0, count, 1 << 16):
        bits = np.array(stream.block(first, min(1 << 16, count - first)), np.uint64)
        yield (((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52).tolist()
