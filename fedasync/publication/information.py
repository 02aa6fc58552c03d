"""What was learnt since the start: visits of hashed states, and the information matrix of their features.

As the low-switching-cost work counts them; the theory it tests publishes when such a number has doubled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedasync.core.bounds import check_integer
from fedasync.core.measured_publication import block_names


class SimHash:
    """sign(A·s) as a number of ``bits`` bits, A drawn once from a standard normal (Charikar 2002).

    32 bits in the released code. States in nearly the same direction mostly share a number.
    """

    def __init__(self, dimension: int, bits: int = 32, seed: int = 0) -> None:
        check_integer("hash: dimension", dimension, 1)
        check_integer("hash: bits", bits, 1)
        if bits > 63:
            raise ValueError(f"hash: bits must be an integer ≤ 63, got {bits}")
        self.matrix = np.random.default_rng(np.random.SeedSequence(seed)).standard_normal((bits, dimension))
        """[bits, dimension]."""
        self._places = np.int64(1) << np.arange(bits, dtype=np.int64)

    def __call__(self, states: ArrayLike) -> NDArray[np.int64]:
        """A number for each of the states [N, dimension]."""
        rows = np.asarray(states, np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.matrix.shape[1]:
            raise ValueError(f"states must have shape [N, {self.matrix.shape[1]}], got {list(rows.shape)}")
        # einsum sums in one order for any N; a matrix product may not, and a sign could flip
        found: NDArray[np.int64] = ((np.einsum("nd,bd->nb", rows, self.matrix) >= 0) * self._places).sum(axis=1)
        return found


class VisitCounts:
    """How often each pair (of state's hash and action, say) was visited, and how often such a count hit a power of 2.

    In T visits of at most P pairs ``doublings`` is at most P·(log₂ T + 1).
    """

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}
        self.doublings = 0
        """The measure ``visit_doublings``."""

    def visit(self, pairs: Iterable[Hashable]) -> None:
        counts = self.counts
        for pair in pairs:
            count = counts.get(pair, 0) + 1
            counts[pair] = count
            self.doublings += not count & (count - 1)

    def measures(self) -> dict[str, float]:
        return {"visit_doublings": float(self.doublings)}


class InformationMatrix:
    """Λ = Σ z·zᵀ of features z [dimension], one matrix for each of ``blocks`` (of steps in an episode, say).

    ``log_det`` is log det(Λ + I), kept up to date with every z by the matrix determinant lemma and Sherman and
    Morrison's formula, and computed anew after every ``exact_every`` of them. Over all z with trace Tr = Σ‖z‖² it is at
    most dimension·log(1 + Tr/dimension) (the elliptical potential), so it grows by log 2 at most
    dimension·log₂(1 + Tr/dimension) times.
    """

    def __init__(self, dimension: int, blocks: int = 1, exact_every: int = 1000) -> None:
        check_integer("information matrix: dimension", dimension, 1)
        check_integer("information matrix: blocks", blocks, 1)
        check_integer("information matrix: exact_every", exact_every, 1)
        self.dimension, self.blocks = dimension, blocks
        self.matrices = np.zeros((blocks, dimension, dimension))
        """[blocks, dimension, dimension]."""
        self._inverses = np.tile(np.eye(dimension), (blocks, 1, 1))
        """Of Λ + I."""
        self._log_dets = np.zeros(blocks)
        self._since_exact = np.zeros(blocks, np.int64)
        self._exact_every = exact_every

    def add(self, features: ArrayLike, block: int = 0) -> None:
        """Take one z [dimension], or several [N, dimension]."""
        rows = np.atleast_2d(np.asarray(features, np.float64))
        if rows.ndim != 2 or rows.shape[1] != self.dimension or not np.isfinite(rows).all():
            raise ValueError(
                f"features must be finite with shape [{self.dimension}] or [N, {self.dimension}], "
                f"got {list(np.shape(features))}"
            )
        if not 0 <= block < self.blocks:
            raise ValueError(f"block must be between 0 and {self.blocks - 1}, got {block}")
        if len(rows) >= self.dimension:
            self.matrices[block] += rows.T @ rows
            self._recompute(block)
            return
        for z in rows:
            self._add_one(z, block)

    def log_det(self, block: int = 0) -> float:
        """log det(Λ + I)."""
        return float(self._log_dets[block])

    def min_eigenvalue(self, block: int = 0) -> float:
        """The smallest eigenvalue of Λ; what rounding alone can make is 0."""
        values = np.linalg.eigvalsh(self.matrices[block])
        noise = self.dimension * np.finfo(np.float64).eps * max(values[-1], 0.0)
        return float(values[0]) if values[0] > noise else 0.0

    def measures(self, names: Iterable[str] = ("log_det",)) -> dict[str, float]:
        """``log_det`` and ``min_eigenvalue`` as rules name them: ``log_det_3`` is block 3's where there are several.

        Only those of ``names``: an eigenvalue costs dimension³. Raises ValueError for any other name.
        """
        found: dict[str, float] = {}
        for name in names:
            measure = "min_eigenvalue" if name.startswith("min_eigenvalue") else "log_det"
            if name not in block_names(measure, self.blocks):
                raise ValueError(f"an information matrix of {self.blocks} blocks has no measure {name!r}")
            block = 0 if self.blocks == 1 else int(name.rpartition("_")[2])
            found[name] = self.log_det(block) if measure == "log_det" else self.min_eigenvalue(block)
        return found

    def _add_one(self, z: NDArray[Any], block: int) -> None:
        self.matrices[block] += np.outer(z, z)
        self._since_exact[block] += 1
        if self._since_exact[block] >= self._exact_every:
            self._recompute(block)
            return
        inverse = self._inverses[block]
        direction = inverse @ z
        gain = float(z @ direction)
        self._log_dets[block] += np.log1p(gain)
        inverse -= np.outer(direction, direction) / (1.0 + gain)

    def _recompute(self, block: int) -> None:
        regular = self.matrices[block] + np.eye(self.dimension)
        self._log_dets[block] = np.linalg.slogdet(regular)[1]
        self._inverses[block] = np.linalg.inv(regular)
        self._since_exact[block] = 0
