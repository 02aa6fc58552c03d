"""A model as one flat vector: what travels, what is averaged, what is only carried."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor of a layout: its place in the flat vector that holds it."""

    name: str
    shape: tuple[int, ...]
    start: int
    averaged: bool = True
    """False for integer state (BatchNorm's ``num_batches_tracked``): it lies in ``Model.integers``."""
    statistic: bool = field(default=False, compare=False)
    """A floating buffer (BatchNorm's running variance): clients' values are averaged, and no rule steps along it."""

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of the tensors of a model, in the order in which they lie in its flat vectors."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], statistics: Container[str] = ()) -> Layout:
        """The layout of named tensors: floating ones are averaged, all others carried."""
        entries = []
        end = {True: 0, False: 0}
        for name, tensor in tensors.items():
            averaged = tensor.is_floating_point()
            entries.append(Entry(name, tuple(tensor.shape), end[averaged], averaged, averaged and name in statistics))
            end[averaged] += tensor.numel()
        return cls(tuple(entries))

    @property
    def parameters(self) -> int:
        """Length P of the flat float vector."""
        return sum(e.size for e in self.entries if e.averaged)

    @property
    def statistics(self) -> list[slice]:
        """Where the statistics lie in the flat float vector."""
        return [slice(e.start, e.start + e.size) for e in self.entries if e.statistic]

    @property
    def carried(self) -> int:
        """Length Q of the flat integer vector."""
        return sum(e.size for e in self.entries if not e.averaged)

    def views(self, values: Tensor, integers: Tensor | None = None) -> dict[str, Tensor]:
        """The named tensors as views into the flat ``values`` [P] and ``integers`` [Q]: no copy."""
        named = {}
        for e in self.entries:
            flat = values if e.averaged else integers
            if flat is None:
                raise ValueError(f"layout entry {e.name!r} holds integers, and no integer vector was given")
            named[e.name] = flat[e.start : e.start + e.size].view(e.shape)
        return named


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a model.

    ``values`` [P] holds every floating-point tensor, ``integers`` [Q] (int64, or None when Q = 0) the state that
    is carried along and never averaged into floats.
    """

    values: Tensor
    layout: Layout
    integers: Tensor | None = None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], statistics: Container[str] = ()) -> Model:
        """Copy named tensors (a ``state_dict``) into a fresh flat model; all float tensors share one dtype."""
        import torch

        layout = Layout.of(tensors, statistics)
        floats = [t.detach().reshape(-1) for t in tensors.values() if t.is_floating_point()]
        others = [t.detach().reshape(-1).to(torch.int64) for t in tensors.values() if not t.is_floating_point()]
        if not floats:
            raise ValueError("a model needs at least one floating-point tensor")
        if len({t.dtype for t in floats}) > 1:
            raise ValueError(
                f"all float tensors of a model share one dtype, got {sorted({str(t.dtype) for t in floats})}"
            )
        return cls(torch.cat(floats), layout, torch.cat(others) if others else None)

    def tensors(self) -> dict[str, Tensor]:
        """The named tensors, as views."""
        return self.layout.views(self.values, self.integers)

    def to_bytes(self) -> bytes:
        """The named tensors in the safetensors format, their order in its metadata."""
        from safetensors.torch import save

        tensors = self.tensors()
        return save({name: t.contiguous() for name, t in tensors.items()}, {"order": json.dumps(list(tensors))})

    @classmethod
    def from_bytes(cls, content: bytes) -> Model:
        """The model that ``to_bytes`` wrote; for another's safetensors file, its tensors in the file's order."""
        from safetensors.torch import load

        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        order = json.loads(header.get("__metadata__", {}).get("order", "null")) or list(tensors)
        return cls.from_tensors({name: tensors[name] for name in order})


Form = Literal["parameters", "delta"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a client sends back: its model after local training, or the difference from where it started.

    ``values`` [P] belongs to the receiver from when it is handed over: it may be overwritten, and its memory may become
    a version's. Nobody else writes it from then on, nor counts on what it holds. ``samples`` is the number of training
    samples behind it, the weight n_k of FedAvg.

    ``step_size_sum`` is how far a gradient of constant 1 would have moved each parameter: the sum of the step sizes of
    plain SGD, η·‖a‖₁ in FedNova's terms (Wang et al. 2020). None where no such number exists (adaptive optimisers).
    SCAFFOLD, FedNova and DC-ASGD need it to tell the mean gradient from the distance.
    """

    values: Tensor
    form: Form
    samples: int
    integers: Tensor | None = None
    step_size_sum: float | None = None
