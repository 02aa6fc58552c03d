"""A function on tensors as the list of its operations, to be run again without the Python that led to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fedasync.workloads.lanes import Mode

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
    """``function`` for inputs of these shapes, or None if other bits come out of its recording.

    ``inputs`` are not written, even if ``function`` writes them.
    """
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")
        module = _trace(function, _copies(inputs))

        def recorded(*tensors: Tensor) -> tuple[Tensor, ...]:
            with torch.inference_mode():
                return tuple(module.forward(*tensors))

        found, expected = _copies(inputs), _copies(inputs)
        outputs = zip((*recorded(*found), *found), (*function(*expected), *expected), strict=True)
        if all(_same(one, other) for one, other in outputs):
            return recorded
    return None


def _trace(function: Function, inputs: Sequence[Tensor]) -> GraphModule:
    """The operations of one pass as straight code. What tensors came from no operation are constants of it."""
    tracer = _Tracer(inputs)
    with tracer:
        outputs = function(*inputs)
    tracer.graph.output(tuple(tracer.node(t) for t in outputs))
    _clean(tracer.graph)
    return GraphModule(tracer.constants, tracer.graph)


class _Tracer(Mode):  # type: ignore[no-untyped-call]
    """Writes down each operation below autograd and vmap.

    Torch's own tracer, make_fx, sees the same, but imports torch's compiler (1.2 s) and takes 70 ms and more a shape.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[str, Tensor] = {}
        self._nodes: dict[int, Node] = {}
        self._alive: list[object] = []  # so that no two tensors of a pass have the same id
        for i, tensor in enumerate(inputs):
            self._note(tensor, self.graph.placeholder(f"x{i}"))

    def node(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = value.detach()
            self._note(value, self.graph.get_attr(name))
        return self._nodes[id(value)]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = map_aggregate(tuple(args), self.node), map_aggregate(dict(kwargs or {}), self.node)
        node = self.graph.call_function(func, *given)
        if isinstance(out, Tensor):
            self._note(out, node)
        elif isinstance(out, (tuple, list)):
            for i, each in enumerate(out):
                if isinstance(each, Tensor):
                    self._note(each, self.graph.call_function(getitem, (node, i)))
        return out

    def _note(self, tensor: Tensor, node: Node) -> None:
        node.meta["lies"] = (tuple(tensor.shape), tensor.stride())
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)


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
    here, there = node.meta.get("lies"), source.meta.get("lies")
    return source if here is not None and here == there else None
