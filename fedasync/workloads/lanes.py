"""What makes the bytes of a lane independent of the lanes beside it, where torch's CPU kernels would not.

Stacked tensors [lanes, ...] meet kernels whose rounding depends on where an element lies in memory:

* Some elementwise functions (sigmoid, gelu, elu, pow, …) use a vector instruction for blocks of elements and another
  formula for what is left over at the end. Nothing is left over when the number of lanes is a multiple of a
  ``quantum`` that makes every block whole.
* MKL's matrix products take another way for matrices that do not begin on a 16-byte boundary; sums over rows and
  batch normalisation of [samples, channels] take another one for the last of many columns, which may be another
  lane's. ``Aligned`` puts matrices on boundaries and makes rows of columns.

Both are found by observing one pass (``observe``), so modules with sizes that fit pay nothing. One lane takes other
kernels than many: there are never fewer than two. All this was measured with torch 2.13 on x86-64 (AVX-512), and holds
for one thread on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OBSERVED_LANES = 3
"""Odd, so that a lane count that happens to fit hides nothing."""

VECTOR = 32
"""Elements in the largest block of an elementwise kernel: two AVX-512 vectors of float32."""

BOUNDARY = 16
"""Bytes."""

EXACT = frozenset(
    """
    abs add add_ addcmul alias amax amin any arange argmax argmin as_strided avg_pool2d avg_pool2d_backward baddbmm
    bitwise_and bitwise_not bitwise_or bmm cat ceil clamp clamp_max clamp_min clone constant_pad_nd convolution
    convolution_backward copy_ cos cumsum detach diagonal div embedding embedding_dense_backward empty empty_like
    empty_strided eq erf exp expand expm1 fill fill_ flip floor full full_like gather ge gt index index_add
    index_put index_select isinf isnan le leaky_relu leaky_relu_backward lerp lift_fresh_copy log log1p logical_and
    logical_not logical_or logsumexp lt masked_fill max max_pool2d_with_indices max_pool2d_with_indices_backward
    maximum mean min minimum mul mul_ native_batch_norm native_batch_norm_backward native_group_norm
    native_group_norm_backward native_layer_norm native_layer_norm_backward ne neg new_empty new_empty_strided
    new_full new_ones new_zeros ones ones_like permute reciprocal relu repeat reshape round rsqrt rsub scalar_tensor
    scatter scatter_add select select_backward sign sin slice slice_backward split split_with_sizes sqrt squeeze
    stack sub sub_ sum t tanh tanh_backward threshold_backward to transpose tril triu unbind unsafe_split unsqueeze
    view where zero_ zeros zeros_like _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _log_softmax
    _log_softmax_backward_data _reshape_alias _safe_softmax _softmax _softmax_backward_data _to_copy _unsafe_view
    """.split()  # noqa: SIM905
)
"""Operations whose result at an element is the same wherever it lies (given ``Aligned``); of others the worst is
assumed."""


def lane_count(lanes: int, quantum: int = 1) -> int:
    """The number of lanes that are computed for ``lanes`` of them: eight sizes an octave, so that shapes recur."""
    step = max(quantum, 1 << max(0, lanes.bit_length() - 4))
    return max(2, -(-lanes // step) * step)


def most_lanes(limit: int, quantum: int = 1) -> int:
    """The largest number of lanes for which at most ``limit`` are computed, and if there is none, the smallest."""
    step = max(quantum, 1 << max(0, limit.bit_length() - 4))
    return max(limit // step * step, lane_count(1, quantum))


@dataclass(frozen=True, slots=True)
class Traits:
    """What a pass over stacked tensors showed."""

    lane_bytes: int
    """Memory that a lane allocates in a pass; an upper bound of what it holds at a time."""
    quantum: int
    aligned: bool
    """The pass must run under ``Aligned``."""
    operations: int
    random: str | None
    """Name of an operation that draws random numbers."""


def observe(run: Callable[[], Any]) -> Traits:
    """The traits of ``run``, which computes ``OBSERVED_LANES`` lanes."""
    observer = _Observer()
    with observer:
        run()
    return Traits(
        observer.bytes // OBSERVED_LANES, observer.quantum, observer.aligned, observer.operations, observer.random
    )


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd and vmap."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or every process pays 1.2 s for importing a compiler that is not used here


class _Observer(Mode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0
        self.quantum = 1
        self.aligned = False
        self.random: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.operations += 1
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if all(value.alias_info is None for value in func._schema.returns):
            self.bytes += sum(t.numel() * t.element_size() for t in outputs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = name
        if name in ("bmm", "baddbmm"):
            pitches = [_lane_pitch(t) for t in (*args[-2:], out)]
            self.aligned |= any(pitch % BOUNDARY for pitch in pitches) or any(map(_interleaved, args[-2:]))
        elif name in ("sum", "mean") and len(args) > 1 and args[1]:
            self.aligned |= _columns_of_lanes(args[0], args[1])
        elif name == "native_batch_norm":
            self.aligned |= args[0].dim() == 2
        if name not in EXACT and outputs and outputs[0].is_floating_point():
            operands = [t for t in (*tree_leaves(args), *outputs) if isinstance(t, Tensor)]
            self.quantum = max(self.quantum, _quantum(operands, outputs[0].shape))
        return out


def _lane_pitch(matrices: Tensor) -> int:
    """Bytes from one lane to the next in the operand [lanes · k, m, n] of a batched product."""
    return matrices.stride(0) * (len(matrices) // OBSERVED_LANES) * matrices.element_size()


def _interleaved(matrices: Tensor) -> bool:
    """Whether the rows of different matrices alternate in memory, so that their pitch depends on how many there are."""
    inner = max((step for n, step in zip(matrices.shape[1:], matrices.stride()[1:], strict=True) if n > 1), default=0)
    return inner >= matrices.stride(0) > 0 and len(matrices) > 1


def _columns_of_lanes(x: Tensor, summed: Sequence[int]) -> bool:
    """Whether columns that are summed side by side belong to several lanes."""
    run = 1
    for step, d in sorted((x.stride(d), d) for d in range(x.dim()) if x.shape[d] > 1):
        if step != run or d in _positive(summed, x.dim()):
            break
        run *= x.shape[d]
    return run > 1 and run % OBSERVED_LANES == 0 and run // OBSERVED_LANES % (2 * VECTOR) != 0


def _positive(dims: Sequence[int], count: int) -> list[int]:
    return [d % count for d in dims]


def _quantum(operands: Sequence[Tensor], shape: torch.Size) -> int:
    """The number of lanes of which a multiple leaves nothing over in an elementwise operation."""
    whole = [t for t in operands if t.numel() > 1]
    if any(
        t.dim() > len(shape) or any(n not in (1, m) for n, m in zip(t.shape[::-1], shape[::-1], strict=False))
        for t in whole
    ):
        return VECTOR  # not elementwise: what it is, is not known
    run = 1
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            continue
        if any(t.expand(shape).stride(d) != run for t in whole):
            if run == 1:
                return VECTOR  # not in the order of memory: what runs together is not known
            break
        run *= shape[d]
    # The kernel works through runs of elements that lie together; they span lanes only if they hold all of them.
    return VECTOR // gcd(run // OBSERVED_LANES, VECTOR) if run % OBSERVED_LANES == 0 else 1


class Aligned(Mode):  # type: ignore[no-untyped-call]
    """Runs products on matrices that begin on a boundary, and normalisation with a row for each channel."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.bmm.default:
            return _product(*args)
        if func is aten.baddbmm.default:
            scale = {"beta": 1, "alpha": 1, **(kwargs or {})}
            return torch.add(scale["beta"] * args[0], _product(*args[1:]), alpha=scale["alpha"])
        if func in (aten.sum.dim_IntList, aten.mean.dim) and len(args) > 1 and args[1]:
            return _sum(func, *args, **(kwargs or {}))
        if func is aten.native_batch_norm.default and args[0].dim() == 2:
            out, mean, deviation = func(_rows(args[0]), *args[1:])
            return _columns(out), mean, deviation
        if func is aten.native_batch_norm_backward.default and args[0].dim() == 2:
            gradient, *others = func(_rows(args[0]), _rows(args[1]), *args[2:])
            return _columns(gradient), *others
        return func(*args, **(kwargs or {}))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[B, m, n] from [B, m, k] and [B, k, n], with every matrix, the product's too, on a boundary."""
    unit = BOUNDARY // left.element_size()
    rows = left.shape[1]
    if rows * right.shape[2] % unit:
        left = torch.constant_pad_nd(left, [0, 0, 0, -rows % unit])
    product = torch.bmm(_on_boundaries(left, unit), _on_boundaries(right, unit))
    return product if product.shape[1] == rows else product[:, :rows].contiguous()


def _on_boundaries(matrices: Tensor, unit: int) -> Tensor:
    if _interleaved(matrices):
        matrices = matrices.contiguous()
    if matrices.stride(0) % unit == 0:
        return matrices
    size = matrices[0].numel()
    flat = torch.constant_pad_nd(matrices.reshape(len(matrices), size), [0, -size % unit])
    return flat[:, :size].view(matrices.shape)


def _sum(func: Any, x: Tensor, dims: Sequence[int], keepdim: bool = False, **kwargs: Any) -> Tensor:
    """Sum or mean with what is summed side by side in memory."""
    summed = _positive(dims, x.dim())
    kept = [d for d in range(x.dim()) if d not in summed]
    rows = x.permute(*kept, *summed).contiguous()
    out: Tensor = func(rows, list(range(len(kept), x.dim())), **kwargs)
    for d in sorted(summed) if keepdim else ():
        out = out.unsqueeze(d)
    return out


def _rows(x: Tensor) -> Tensor:
    return x.t().contiguous().unsqueeze(0)


def _columns(x: Tensor) -> Tensor:
    return x.squeeze(0).t().contiguous()
