"""How far two versions of a policy differ on the same states; equal ones give exactly 0 (a cosine: exactly 1).

Every function takes arrays of the new (online) version and of the published (deployed) one for the same N states, and
raises ValueError where they do not fit. Sums are in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def action_disagreement(current: ArrayLike, published: ArrayLike) -> float:
    """Share of states on which the largest action value is another action's; [N, actions] each, the first of equals."""
    new, old = _pair("action values", current, published, 2)
    return float(np.mean(new.argmax(axis=1) != old.argmax(axis=1)))


def gaussian_kl(mean: ArrayLike, std: ArrayLike, published_mean: ArrayLike, published_std: ArrayLike) -> float:
    """KL(new ‖ published) of diagonal Gaussians in nats, mean over states and action dimensions; [N, dimensions] each.

    The mean over dimensions, not their sum, and the new policy first, as in the released code of the
    low-switching-cost work (before any squashing of the actions).
    """
    new, old = _pair("means", mean, published_mean, 2)
    new_std, old_std = _pair("standard deviations", std, published_std, 2)
    if new_std.shape != new.shape:
        raise ValueError(
            f"standard deviations must have the shape of the means {list(new.shape)}, got {list(new_std.shape)}"
        )
    if not (new_std.min() > 0 and old_std.min() > 0):
        raise ValueError(f"standard deviations must be > 0, got {min(new_std.min(), old_std.min()):g}")
    ratio = new_std / old_std
    kl = -np.log(ratio) + (ratio**2 + ((new - old) / old_std) ** 2 - 1) / 2
    return float(np.mean(np.maximum(kl, 0.0)))


def categorical_kl(logits: ArrayLike, published_logits: ArrayLike) -> float:
    """KL(new ‖ published) of categorical distributions in nats, mean over states; unnormalised logs [N, actions]."""
    new, old = _pair("logits", logits, published_logits, 2)
    log_new, log_old = _log_softmax(new), _log_softmax(old)
    kl = (np.exp(log_new) * (log_new - log_old)).sum(axis=1)
    return float(np.mean(np.maximum(kl, 0.0)))


def feature_cosine(current: ArrayLike, published: ArrayLike) -> float:
    """Cosine of a state's features [N, ...] under the two versions, then the mean over states.

    Features that are zero under both versions are alike (1), under one of them not (0).
    """
    new, old = (np.reshape(each, (len(each), -1)) for each in _pair("features", current, published, None))
    new, old = _scaled(new), _scaled(old)
    dot, new_square, old_square = (np.einsum("nd,nd->n", a, b) for a, b in ((new, old), (new, new), (old, old)))
    norms = np.sqrt(new_square * old_square)
    both_zero = (new_square == 0) & (old_square == 0)
    cosine = np.where(norms > 0, dot / np.where(norms > 0, norms, 1.0), both_zero.astype(np.float64))
    return float(np.mean(np.clip(cosine, -1.0, 1.0)))


def _scaled(rows: Array) -> Array:
    """Rows with largest element 1, so that their squares neither overflow nor vanish."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scaled: Array = rows / np.where(largest > 0, largest, 1.0)
    return scaled


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    normal: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normal


def _pair(what: str, new: ArrayLike, old: ArrayLike, dimensions: int | None) -> tuple[Array, Array]:
    a: NDArray[Any] = np.asarray(new, np.float64)
    b: NDArray[Any] = np.asarray(old, np.float64)
    fits = a.ndim == dimensions if dimensions else a.ndim >= 2
    if a.shape != b.shape or not fits or a.size == 0:
        wanted = "[N, ...]" if dimensions is None else "[N, …]"
        raise ValueError(
            f"{what} of the two versions must have one shape {wanted} with N ≥ 1, "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError(f"{what} must be finite, got NaN or infinity")
    return a, b
