"""The arithmetic of secure aggregation: the server sees masked vectors only, and the masks cancel in their sum.

As in Bonawitz et al. (2017), "Practical Secure Aggregation": clients round what they send to fixed point and add, for
every other client of the buffer, a mask that the two share, one of them with the opposite sign; sums are modulo 2^64.
It is the arithmetic alone, for studies of what rounding costs: masks come from places in the buffer, the same at every
step, and not from keys; drop-outs and the exchange of messages are not simulated. It hides nothing from anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedasync.core.bounds import check_integer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SecureMean:
    """Σ weight·s(τ)·v from masked fixed-point summands, ``fractional_bits`` behind the point.

    It equals the plain mean up to K/2 units of the last bit. Summands beyond ±2^(61 − fractional_bits)/K are held to
    that, since their sum would wrap around. The server must know a client's weight, not its vector.
    """

    fractional_bits: int = 24
    kind: Literal["secure_mean"] = "secure_mean"

    def __post_init__(self) -> None:
        check_integer("secure_mean: fractional_bits", self.fractional_bits, 0)
        if self.fractional_bits > 48:
            raise ValueError(f"secure_mean: fractional_bits must be ≤ 48, got {self.fractional_bits}")

    @property
    def fewest(self) -> int:
        """Vectors that it takes."""
        return 1

    def aggregate(
        self, vectors: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float], out: Tensor
    ) -> None:
        import torch

        total = torch.zeros(out.shape, dtype=torch.int64)
        for message in self.messages(vectors, weights, scales):
            total += message
        out.copy_(total.double() / 2**self.fractional_bits)

    def messages(self, vectors: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float]) -> list[Tensor]:
        """What the server receives, [P] of int64 each: any but all of them together look random."""
        import torch

        unit, most = 2.0**self.fractional_bits, 2.0**61 / len(vectors)
        sent = [
            (v.double() * (weight * scale * unit)).round_().clamp_(-most, most).to(torch.int64)
            for v, weight, scale in zip(vectors, weights, scales, strict=True)
        ]
        for i in range(len(sent)):
            for j in range(i):
                generator = torch.Generator().manual_seed(i * len(sent) + j)  # the secret that the two share
                mask = torch.randint(-(2**63), 2**63 - 1, sent[i].shape, generator=generator, dtype=torch.int64)
                sent[i] += mask  # wraps around
                sent[j] -= mask
        return sent
