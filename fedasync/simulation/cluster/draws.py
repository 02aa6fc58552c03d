"""Lengths that are drawn many at a time: laws as functions of arrays, and whole tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedasync.simulation.laws import Constant, Exponential, Law, Lognormal, ShiftedExponential, Uniform, steps

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_TOKENS = 2**31 - 1
"""Of a prompt, and of an answer with what tools said: they are kept in 32 bits."""


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
