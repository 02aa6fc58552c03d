"""Random numbers by name with any number of indices, many at a time.

As ``streams.Stream``, of whose seeds these are made: a draw is a function of (seed, stream name, indices), and nothing
is consumed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedasync.simulation.laws import Constant, Exponential, Law, Lognormal, ShiftedExponential, Uniform, steps
from fedasync.streams import Stream

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_TOKENS = 2**31 - 1
"""Of a prompt, and of an answer with what tools said: they are kept in 32 bits."""

_GOLD = np.uint64(0x9E3779B97F4A7C15)


class Draws:
    """Uniform numbers keyed by integers ≥ 0: one round of the SplitMix64 finaliser an index."""

    __slots__ = ("_key",)

    def __init__(self, seed: int, name: str) -> None:
        self._key = np.uint64(Stream(seed, name).bits(0))

    def bits(self, *indices: int | Integers) -> NDArray[np.uint64]:
        """64 random bits for each of the indices, which broadcast; at least one of them has a dimension."""
        z = np.full(1, self._key)
        for index in indices:
            z = z + (np.atleast_1d(np.asarray(index)).astype(np.uint64) + np.uint64(1)) * _GOLD
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        return z

    def uniform(self, *indices: int | Integers) -> Floats:
        """Numbers in the open interval (0, 1)."""
        found: Floats = ((self.bits(*indices) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return found

    def normal(self, *indices: int | Integers) -> Floats:
        """Standard normal scores of the same numbers."""
        from scipy.special import ndtri

        found: Floats = ndtri(self.uniform(*indices))
        return found


def quantiles(law: Law) -> Callable[[Floats], Floats]:
    """``law.quantile`` for arrays."""
    from scipy.special import ndtri

    if isinstance(law, Constant):
        return lambda u: np.full(u.shape, law.value, np.float64)
    if isinstance(law, Lognormal):
        middle = law.mean * np.exp(-law.sigma * law.sigma / 2)
        return lambda u: middle * np.exp(law.sigma * ndtri(u))
    if isinstance(law, Uniform):
        return lambda u: law.low + (law.high - law.low) * u
    if isinstance(law, (Exponential, ShiftedExponential)):
        shift, scale = (0.0, law.mean) if isinstance(law, Exponential) else (law.shift, law.scale)
        return lambda u: shift - scale * np.log(1.0 - u)
    if (found := steps(law)) is not None:
        values, at_most = np.asarray(found[0], np.float64), np.asarray(found[1])
        return lambda u: values[np.searchsorted(at_most, u)]
    return lambda u: np.array([law.quantile(each) for each in u.ravel().tolist()], np.float64).reshape(u.shape)


def whole_tokens(lengths: Floats, most: int | None = None, *, least: int = 1) -> Integers:
    """Lengths as whole numbers, at least one (or ``least``), cut at ``most``.

    Raises ValueError for one beyond `MOST_TOKENS` that nothing cuts.
    """
    if most is None:
        check_tokens(float(lengths.max(initial=0.0)))
    found: Integers = np.clip(np.rint(lengths), least, most).astype(np.int64)
    return found


def check_tokens(tokens: float) -> None:
    """Raise ValueError for more tokens than can be counted."""
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"prompts: {tokens:.3g} tokens were drawn, of a prompt, an answer or a tool; ≤ {MOST_TOKENS:,} would do "
            "(most_tokens cuts answers)"
        )
