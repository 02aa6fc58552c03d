"""Random numbers by name: the b-th draw of client a on a stream is a function of (seed, stream, a, b).

No generator is kept and nothing is consumed, so compared strategies meet the same clients and the same luck (common
random numbers), a new stream moves no other, and a simulation has no random state to save.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLD = 0x9E3779B97F4A7C15
_WIDE_GOLD = np.uint64(_GOLD)


class Stream:
    """Uniform numbers keyed by two integers ≥ 0.

    The key comes from numpy's SeedSequence, spawned from the study's seed by the stream's name; the draw is two rounds
    of the SplitMix64 finaliser (Steele, Lea & Flood 2014, with Stafford's constants) over key and indices.
    """

    __slots__ = ("_key",)

    def __init__(self, seed: int, name: str) -> None:
        if seed < 0:
            raise ValueError(f"seed must be an integer ≥ 0, got {seed}")
        sequence = np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))
        self._key = int(sequence.generate_state(1, np.uint64)[0])

    def bits(self, a: int, b: int = 0) -> int:
        """64 random bits."""
        z = (self._key + a * _GOLD) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z = ((z ^ (z >> 31)) + (b + 1) * _GOLD) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def uniforms(self, count: int) -> Callable[[int, int], float]:
        """``uniform`` for a = 0 … count − 1, quicker: half of the work is done for all of them at once."""
        z = _first_round(np.uint64(self._key) + np.arange(count, dtype=np.uint64) * np.uint64(_GOLD))
        keys = array("Q", z.tobytes())

        def uniform(a: int, b: int) -> float:
            z = (keys[a] + (b + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
            return (((z ^ (z >> 31)) >> 12) + 0.5) * 2.0**-52

        return uniform

    def block(self, first: int, count: int) -> list[int]:
        """``bits(a)`` for a = first … first + count − 1, made together."""
        key, gold = np.uint64(self._key), np.uint64(_GOLD)
        z = _first_round(key + np.arange(first, first + count, dtype=np.uint64) * gold)
        found: list[int] = _first_round(z + gold).tolist()
        return found

    def uniform(self, a: int, b: int = 0) -> float:
        """A number in the open interval (0, 1)."""
        return ((self.bits(a, b) >> 12) + 0.5) * 2.0**-52

    def seed(self, a: int, b: int = 0) -> int:
        """A seed for a generator: 0 ≤ seed < 2^63."""
        return self.bits(a, b) >> 1


class Draws:
    """Uniform numbers keyed by any number of integers ≥ 0, many at a time: one round of the finaliser an index."""

    __slots__ = ("_key",)

    def __init__(self, seed: int, name: str) -> None:
        self._key = np.uint64(Stream(seed, name).bits(0))

    def bits(self, *indices: int | NDArray[np.int64]) -> NDArray[np.uint64]:
        """64 random bits for each of the indices, which broadcast; at least one of them has a dimension."""
        z = np.full(1, self._key)
        for index in indices:
            z = z + (np.atleast_1d(np.asarray(index)).astype(np.uint64) + np.uint64(1)) * _WIDE_GOLD
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        return z

    def uniform(self, *indices: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Numbers in the open interval (0, 1)."""
        found: NDArray[np.float64] = ((self.bits(*indices) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return found

    def normal(self, *indices: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Standard normal scores of the same numbers."""
        from scipy.special import ndtri

        found: NDArray[np.float64] = ndtri(self.uniform(*indices))
        return found


def _first_round(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
