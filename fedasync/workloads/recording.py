"""A function on tensors as the list of its operations, to be run again without the Python that led to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.fx import Graph, Node

Function = Callable[..., tuple[Tensor, ...]]

SAME_MEMORY = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
}


def record(function: Function, inputs: Sequence[Tensor]) -> Function | None:
    """``function`` for inputs of these shapes, or None if it cannot be recorded or other bits come out.

    ``inputs`` are not written, even if ``function`` writes them.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")
        module = make_fx(function)(*_copies(inputs))
        _clean(module.graph)
        module.recompile()

        def recorded(*tensors: Tensor) -> tuple[Tensor, ...]:
            with torch.inference_mode():
                return tuple(module.forward(*tensors))

        found, expected = _copies(inputs), _copies(inputs)
        outputs = zip((*recorded(*found), *found), (*function(*expected), *expected), strict=True)
        if all(_same(one, other) for one, other in outputs):
            return recorded
    return None


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """With the same strides, which a recording depends on."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors]


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())


def _clean(graph: Graph) -> None:
    """Drop views that change nothing, and, where nothing is written in place, what is computed twice or for nothing."""
    pure = not any(_writes(node) for node in graph.nodes)
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _source(node)
        if same is None and pure:
            same = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    if pure:
        graph.eliminate_dead_code()


def _writes(node: Node) -> bool:
    """Batch normalisation updates its running statistics, and its schema does not say so."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.is_mutable or "batch_norm" in schema.name)


def _source(node: Node) -> Node | None:
    """The node whose value, element by element in the same memory, is also this one's."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is torch.ops.aten.mul.Scalar and node.args[1] == 1:
        return source
    if node.target is torch.ops.aten.transpose.int and source.target is node.target:
        return source.args[0] if source.args[1:] == node.args[1:] else None  # type: ignore[return-value]
    if node.target not in SAME_MEMORY:
        return None
    here, there = node.meta.get("tensor_meta"), source.meta.get("tensor_meta")
    unchanged = here is not None and there is not None and (here.shape, here.stride) == (there.shape, there.stride)
    return source if unchanged else None
