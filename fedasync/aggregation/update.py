"""What an update rule is: two small functions over a flat vector.

A rule is a frozen value that says which form of contribution it wants, and turns one version into the next. Torch is
imported where a rule is applied, so that a timing-only study can name it without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedasync.aggregation.model import Form

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 18
"""Elements worked on at a time: few enough that several blocks lie in a cache, so that memory is passed over once;
enough that a call from Python costs little beside its work."""


class Input(NamedTuple):
    """One contribution as an update sees it: ``values`` [P] in the form that the rule wants."""

    values: Tensor
    samples: int
    staleness: int
    worker: int
    admitted_s: float = 0.0
    """When the lease was given out."""
    group: int = 0
    """FedAT's tier."""
    step_size_sum: float | None = None
    """As in ``Contribution``."""
    control: Tensor | None = None
    """[P]: what the client added to every gradient (see ``Steering``)."""
    base: Tensor | None = None
    """[P]: the version that the client started from, for a rule with ``needs_base``."""


class Inputs(NamedTuple):
    """A ready buffer: what enters the model by this step, and what lies in or leaves a sliding window."""

    entering: Sequence[Input]
    window: Sequence[Input] = ()
    leaving: Sequence[Input] = ()
    undrafted: Sequence[Input] = ()
    """What arrived beyond a quota."""
    version: int = 0
    """The version that the step starts from."""
    time_s: float = 0.0
    """When the step became ready."""
    clients: int = 0
    """Clients that take part in the training, N: those at work and all others."""
    seed: int = 0
    """Fixes everything random in the step."""


class Update(Protocol):
    """The third decision: how a ready buffer becomes the next version.

    A rule written like this one is applied in place, to a copy where others still read the former version. A rule may
    do better and write the next version somewhere else, which saves that copy and, mostly, its memory: see
    ``Elsewhere``.
    """

    @property
    def wants(self) -> Form:
        """Form of the contributions that ``apply`` is given."""
        ...

    def init(self, values: Tensor) -> Any:
        """The rule's own state (momentum, counters) for a model ``values`` [P]."""
        ...

    def apply(self, values: Tensor, state: Any, inputs: Inputs) -> Any:
        """Turn ``values`` [P] into the next version in place, and return the next state. Read the inputs only."""
        ...


# A rule may say ``stays_between = True``: its versions lie between the models that enter, so that finite ones cannot
# make NaN or infinity, and the server need not look. One that cannot do without ``step_size_sum`` says
# ``needs_step_sizes = True``.


class Elsewhere(Update, Protocol):
    """A rule whose ``apply`` has a parameter ``out``; the server looks for that name in its signature."""

    def apply(self, values: Tensor, state: Any, inputs: Inputs, out: Tensor | None = None) -> Any:
        """Write the next version into ``out`` [P] and leave ``values`` as they are; without ``out``, work in place.

        ``out`` is memory that holds nothing, or that of a contribution which this step uses up: of the first of
        ``inputs.leaving``, or where nothing leaves and there is no window, of the first of ``inputs.entering``. It
        overlaps nothing else. So element i of that contribution must have been read when element i of ``out`` is
        written; and no tensor of ``inputs`` may be kept in the state, whose memory may become a version.
        """
        ...


class Steering(Update, Protocol):
    """A rule that has a say in its clients' work: the server looks for a method ``control``."""

    def control(self, state: Any, worker: int) -> Tensor | None:
        """[P], in memory of its own: what the worker that starts now adds to every gradient (None: nothing)."""
        ...


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut vectors [P] of one length into cache-sized pieces, views that are worked on together."""
    import torch

    if vectors[0].numel() <= BLOCK:
        return iter((vectors,))
    return zip(*(torch.split(vector, BLOCK) for vector in vectors), strict=True)
