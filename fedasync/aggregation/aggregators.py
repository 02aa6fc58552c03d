"""How the vectors of a buffer become one: the mean, and what withstands some that are wrong.

An aggregator is a frozen value with one function, ``aggregate(vectors, weights, scales, out)``: vectors [P] each,
weights that sum to 1 (1/K, or shares of the samples), scales s(τ), and where to write. Only the mean looks at the
weights: the others count every contribution once. Element i of ``out`` may lie in the memory of element i of the first
vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedasync.aggregation.secure_sum import SecureMean
from fedasync.aggregation.update import blocks
from fedasync.core.bounds import check_integer, check_real

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECE = 1 << 13
"""Elements of every vector that are looked at together where all vectors are at hand at once."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Σ weight·s(τ)·v: divided by K, not by Σ s(τ)."""

    kind: Literal["mean"] = "mean"

    @property
    def fewest(self) -> int:
        """Vectors that it takes."""
        return 1

    def aggregate(
        self, vectors: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float], out: Tensor
    ) -> None:
        import torch

        factors = [weight * scale for weight, scale in zip(weights, scales, strict=True)]
        for mean, first, *others in blocks(out, *vectors):
            torch.mul(first, factors[0], out=mean)
            for v, factor in zip(others, factors[1:], strict=True):
                mean.add_(v, alpha=factor)


@dataclass(frozen=True, slots=True)
class Median:
    """The median of every coordinate (Yin et al. 2018); of an even number the mean of the two middle ones.

    Withstands fewer than half of the buffer.
    """

    kind: Literal["median"] = "median"

    @property
    def fewest(self) -> int:
        return 1

    def aggregate(
        self, vectors: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float], out: Tensor
    ) -> None:
        _mean_of_the_middle(vectors, scales, (len(vectors) - 1) // 2, out)


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The mean of every coordinate without its largest and smallest ``share`` of values (Yin et al. 2018).

    ⌊share·K⌋ values are left out at each end, and as many wrong contributions are withstood: none where that is 0.
    Default 0.2 ours.
    """

    share: float = 0.2
    kind: Literal["trimmed_mean"] = "trimmed_mean"

    def __post_init__(self) -> None:
        check_real("trimmed_mean: share", self.share, 0, 0.5, below=True)

    @property
    def fewest(self) -> int:
        """So many that something is left out."""
        return ceil(1 / self.share - 1e-9) if self.share else 1

    def aggregate(
        self, vectors: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float], out: Tensor
    ) -> None:
        cut = int(self.share * len(vectors) + 1e-9)  # 0.3 · 10 is not quite 3
        _mean_of_the_middle(vectors, scales, min(cut, (len(vectors) - 1) // 2), out)


@dataclass(frozen=True, slots=True)
class Krum:
    """The mean of the ``keep`` vectors that lie nearest to their neighbours (Blanchard et al. 2017).

    keep > 1 is Multi-Krum. A vector's score is the sum of its squared distances to the K − f − 2 nearest others,
    f = ``byzantine`` the number that may be wrong. The paper's guarantee needs K ≥ 2f + 3, and of more than K − f kept
    ones some would be wrong.
    """

    byzantine: int = 1
    keep: int = 1
    kind: Literal["krum"] = "krum"

    def __post_init__(self) -> None:
        check_integer("krum: byzantine", self.byzantine, 0)
        check_integer("krum: keep", self.keep, 1)

    @property
    def fewest(self) -> int:
        return max(2 * self.byzantine + 3, self.keep + self.byzantine)

    def aggregate(
        self, vectors: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float], out: Tensor
    ) -> None:
        """Of a round that lost so many that K − f − 2 < 1, one neighbour counts."""
        chosen = self.chosen(vectors)
        share = [1 / len(chosen)] * len(chosen)
        Mean().aggregate([vectors[i] for i in chosen], share, [scales[i] for i in chosen], out)

    def chosen(self, vectors: Sequence[Tensor]) -> list[int]:
        """Places of the vectors kept, in order; at equal scores the first. As sent: scaled ones lie close together."""
        import torch

        count = len(vectors)
        between = torch.zeros(count * (count - 1) // 2, dtype=torch.float64)
        for _, pieces in _pieces(vectors[0], vectors, [1.0] * count, torch.float64):
            between += torch.pdist(torch.stack(pieces)).square()
        squared = torch.full((count, count), float("inf"), dtype=torch.float64)
        row, column = torch.triu_indices(count, count, 1)
        squared[row, column] = squared[column, row] = between
        neighbours = max(1, count - self.byzantine - 2)
        scores = squared.sort(dim=1).values[:, :neighbours].sum(dim=1).tolist()
        return sorted(sorted(range(count), key=lambda i: (scores[i], i))[: self.keep])


Aggregator: TypeAlias = Mean | Median | TrimmedMean | Krum | SecureMean


def _mean_of_the_middle(vectors: Sequence[Tensor], scales: Sequence[float], cut: int, out: Tensor) -> None:
    """The mean of every coordinate's values without the ``cut`` largest and smallest."""
    import torch

    spare = torch.empty(0)
    for mean, rows in _pieces(out, vectors, scales, out.dtype):
        if spare.shape != mean.shape:
            spare = torch.empty_like(mean)
        for low, high in _comparators(len(rows)):
            torch.minimum(rows[low], rows[high], out=spare)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
        middle = rows[cut : len(rows) - cut]
        for row in middle[1:]:
            middle[0].add_(row)
        torch.div(middle[0], len(middle), out=mean)


def _pieces(
    target: Tensor, vectors: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """A piece of the target, and copies of the vectors' pieces, scaled."""
    import torch

    for block in blocks(target, *vectors):
        for piece, *others in zip(*(torch.split(vector, PIECE) for vector in block), strict=True):
            yield piece, [other.to(dtype) * scale for other, scale in zip(others, scales, strict=True)]


@cache
def _comparators(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs of places to put in order, one after the other, so that all are: Batcher's odd-even mergesort (1968).

    A few elementwise minima and maxima: for the sizes of a buffer much quicker than to sort every coordinate.
    """
    pairs = []
    run = 1
    while run < count:
        gap = run
        while gap:
            for first in range(gap % run, count - gap, 2 * gap):
                for low in range(first, min(first + gap, count - gap)):
                    if low // (2 * run) == (low + gap) // (2 * run):
                        pairs.append((low, low + gap))
            gap //= 2
        run *= 2
    return tuple(pairs)
