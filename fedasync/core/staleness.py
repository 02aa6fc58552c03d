"""Weights s(τ) by which a stale contribution counts for less.

FedAsync (Xie et al. 2019) names the three families; FedBuff (Nguyen et al. 2022) uses the polynomial with a = 1/2.
Every one satisfies s(0) = 1 and never increases. τ is an integer ≥ 0: the versions between a contribution's base and
the version that it is applied to.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal


def checked(tau: int) -> int:
    """τ, if it is one. Raises ValueError for a negative number."""
    if tau < 0:
        raise ValueError(f"staleness is an integer ≥ 0, got {tau}")
    return tau


@dataclass(frozen=True, slots=True)
class Constant:
    """s(τ) = 1."""

    kind: Literal["constant"] = "constant"

    def __call__(self, tau: int) -> float:
        checked(tau)
        return 1.0


@dataclass(frozen=True, slots=True)
class Polynomial:
    """s(τ) = (τ + 1)^(−a)."""

    a: float = 0.5
    kind: Literal["polynomial"] = "polynomial"

    def __post_init__(self) -> None:
        if not 0 <= self.a < inf:
            raise ValueError(f"polynomial staleness: a must be ≥ 0 and finite, got {self.a}")

    def __call__(self, tau: int) -> float:
        return float((checked(tau) + 1) ** -self.a)


@dataclass(frozen=True, slots=True)
class Hinge:
    """s(τ) = 1 while τ ≤ b, then 1 / (a·(τ − b) + 1): continuous at b, as in the paper.

    Some frameworks leave out the "+ 1" and jump at b.
    """

    a: float = 10.0
    b: float = 4.0
    kind: Literal["hinge"] = "hinge"

    def __post_init__(self) -> None:
        if not (0 <= self.a < inf and 0 <= self.b < inf):
            raise ValueError(f"hinge staleness: a and b must be ≥ 0 and finite, got a = {self.a}, b = {self.b}")

    def __call__(self, tau: int) -> float:
        return 1.0 if checked(tau) <= self.b else 1.0 / (self.a * (tau - self.b) + 1.0)


Staleness = Constant | Polynomial | Hinge
