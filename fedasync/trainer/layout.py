"""Tensors end to end in one block of bytes: where each lies, of which type and shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ALIGN_BYTES = 64


class Place(NamedTuple):
    """A tensor's place: where it begins and how long it is, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class Layout(NamedTuple):
    """The places of a set of tensors, and the length of the block, a multiple of 64 bytes."""

    places: tuple[Place, ...]
    block_bytes: int

    @staticmethod
    def of(weights: Mapping[str, Tensor]) -> Layout:
        places, at = [], 0
        for name, tensor in weights.items():
            shape = tuple(tensor.shape)
            size = prod(shape) * tensor.element_size()
            places.append(Place(name, str(tensor.dtype).removeprefix("torch."), shape, at, size))
            at += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return Layout(tuple(places), at)

    def write(self, weights: Mapping[str, Tensor], block: Tensor) -> None:
        """Copy tensors of this layout into a block [block_bytes] of uint8."""
        import torch

        for place in self.places:
            flat = weights[place.name].detach().contiguous().reshape(-1)
            if place.size:
                block[place.start : place.start + place.size].copy_(flat.view(torch.uint8))

    def read(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors of a block [block_bytes] of uint8, as views of it."""
        import torch

        return {
            name: block[start : start + size].view(getattr(torch, dtype)).reshape(shape)
            for name, dtype, shape, start, size in self.places
        }

    def encoded(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decoded(content: bytes) -> Layout:
        places, block_bytes = json.loads(content)
        return Layout(tuple(Place(name, dtype, tuple(shape), *at) for name, dtype, shape, *at in places), block_bytes)
