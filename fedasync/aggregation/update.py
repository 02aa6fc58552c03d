"""What an update rule is: two small functions over a flat vector.

A rule is a frozen value that says which form of contribution it wants, and is applied in place. Rules call methods
of the tensors they are given and import nothing, so that a timing-only study can name them without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fedasync.aggregation.model import Form

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 16
"""Elements worked on at a time: several blocks fit into a core's cache, so that memory is passed over once."""


@dataclass(frozen=True, slots=True)
class Input:
    """One contribution as an update sees it: ``values`` [P] in the form that the rule wants."""

    values: Tensor
    samples: int
    staleness: int
    worker: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """A ready buffer: what enters the model by this step, and what lies in or leaves a sliding window."""

    entering: Sequence[Input]
    window: Sequence[Input] = ()
    leaving: Sequence[Input] = ()


class Update(Protocol):
    """The third decision: how a ready buffer becomes the next version."""

    @property
    def wants(self) -> Form:
        """Form of the contributions that ``apply`` is given."""
        ...

    def init(self, values: Tensor) -> Any:
        """The rule's own state (momentum, counters) for a model ``values`` [P]."""
        ...

    def apply(self, values: Tensor, state: Any, inputs: Inputs) -> Any:
        """Turn ``values`` [P] into the next version in place, and return the next state."""
        ...


def blocks(length: int) -> Iterator[slice]:
    """Cut a vector into cache-sized pieces."""
    for start in range(0, length, BLOCK):
        yield slice(start, min(start + BLOCK, length))
