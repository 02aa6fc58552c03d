"""State as plain data and named tensors: what a file can hold, and nothing that a file could make run.

``plain`` turns nested containers of numbers and tensors into data that JSON keeps, and puts the tensors into a
``Pool``; ``restored`` makes the same containers again, bit for bit. Tensors that share memory share it again. A
dataclass or a NamedTuple is known by its name among ``kinds_of`` a rule, so that no file names what is imported.
Containers come back as a tree: one that stood in two places comes back as two.
"""

from __future__ import annotations

import builtins
import sys
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    from torch import Tensor

Kinds = Mapping[str, type]
"""Name → dataclass or NamedTuple."""

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter}


class StateError(ValueError):
    """A state holds what cannot be kept as plain data, or plain data that does not fit the state."""


class Pool:
    """Tensors that are written out under names, every piece of memory once.

    They are the owner's own, not copies: write them out before the owner goes on.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Name → all of a piece of memory, one-dimensional."""
        self._names: dict[int, str] = {}

    def put(self, tensor: Tensor) -> dict[str, Any]:
        """Plain data that stands for the tensor. Raises StateError for one that is not dense."""
        import torch

        if tensor.layout != torch.strided:
            raise StateError(f"a tensor of layout {tensor.layout} cannot be kept; a dense one would do")
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes() // tensor.element_size()
        name = self._names.get(address) if size else None
        if name is None:
            name = str(len(self.tensors))
            self.tensors[name] = tensor.detach().as_strided((size,), (1,), 0)
            self._names[address] = name
        if (found := self.tensors[name].dtype) != tensor.dtype:
            raise StateError(f"one piece of memory is read as {found} and as {tensor.dtype}; one dtype would do")
        device = {} if tensor.device.type == "cpu" else {"device": str(tensor.device)}
        if tensor.dim() == 1 and tensor.numel() == size:
            return {"tensor": name, **device}
        place = {"shape": list(tensor.shape), "stride": list(tensor.stride()), "offset": tensor.storage_offset()}
        return {"tensor": name, **place, **device}


class Stored:
    """Tensors by the names that a ``Pool`` gave them. They belong to whoever takes them out."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def take(self, found: Mapping[str, Any]) -> Tensor:
        """The tensor that ``Pool.put`` described. Raises StateError where there is none."""
        name = found["tensor"]
        if name not in self._tensors:
            raise StateError(f"tensor {name!r} is missing; there are {len(self._tensors)} others")
        if "device" in found:
            self._tensors[name] = self._tensors[name].to(found["device"])
        whole = self._tensors[name]
        if "shape" not in found:
            return whole
        return whole.as_strided(found["shape"], found["stride"], found["offset"])


def plain(value: object, pool: Pool, kinds: Kinds) -> Any:
    """A state as data that JSON keeps, its tensors in ``pool``. Raises StateError, which names what cannot be kept."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if isfinite(value) else {"float": repr(value)}
    if _is_tensor(value):
        return pool.put(value)  # type: ignore[arg-type]
    if isinstance(value, deque) and type(value) is deque:
        return {"deque": [plain(item, pool, kinds) for item in value], "maxlen": value.maxlen}
    for name, kind in _SEQUENCES.items():
        if type(value) is kind:
            return {name: [plain(item, pool, kinds) for item in value]}  # type: ignore[attr-defined]
    for name, kind in _MAPPINGS.items():
        if type(value) is kind:
            items = value.items()  # type: ignore[attr-defined]
            return {name: [[plain(key, pool, kinds), plain(item, pool, kinds)] for key, item in items]}
    if _is_record(type(value)):
        names = _fields(type(value))
        _check_record(value, names, kinds)
        return {"record": _name(type(value)), "fields": [plain(getattr(value, n), pool, kinds) for n in names]}
    raise StateError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be kept; numbers, text, tensors, and lists, "
        "tuples, sets, dicts, deques, dataclasses and NamedTuples of them would do"
    )


def restored(found: Any, stored: Stored, kinds: Kinds) -> Any:
    """The value that ``plain`` turned into ``found``. Raises StateError for data that does not fit."""
    if not isinstance(found, dict):
        return found
    tag = next(iter(found), "")
    if tag == "float":
        return float(found[tag])
    if tag == "tensor":
        return stored.take(found)
    if tag == "deque":
        return deque((restored(item, stored, kinds) for item in found[tag]), found["maxlen"])
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](restored(item, stored, kinds) for item in found[tag])
    if tag in _MAPPINGS:
        made = _MAPPINGS[tag]()
        for key, item in found[tag]:
            made[restored(key, stored, kinds)] = restored(item, stored, kinds)
        return made
    if tag == "record":
        return _record(found, [restored(item, stored, kinds) for item in found["fields"]], kinds)
    raise StateError(f"unknown kind of data {tag!r} in a state")


def kinds_in(value: object) -> set[type]:
    """The dataclasses and NamedTuples in nested containers."""
    if _is_tensor(value):
        return set()
    if _is_record(type(value)):
        return {type(value)}.union(*(kinds_in(getattr(value, name, None)) for name in _fields(type(value))))
    if isinstance(value, Mapping):
        return set[type]().union(*map(kinds_in, value.keys()), *map(kinds_in, value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return set[type]().union(*map(kinds_in, value))
    return set()


def kinds_of(update: object, initial: Iterable[type]) -> dict[str, type]:
    """What the state of a rule may be made of: ``initial``, the kinds that its first state holds (``kinds_in``), and
    those to which annotations of their fields lead, or of what the rule's own ``init`` and ``apply`` return.
    """
    found: dict[str, type] = {}
    functions = [getattr(type(update), name, None) for name in ("init", "apply")]
    waiting: list[object] = [*initial, *(hint for each in functions for hint in _hints(each, ("return",)))]
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        if isinstance(hint, type) and _is_record(hint) and _name(hint) not in found:
            found[_name(hint)] = hint
            waiting += _hints(hint)
    return found


class _Names(dict[str, Any]):
    """Names that an annotation uses: of its module, or built in; one imported for type checkers only is no kind."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = [vars(sys.modules[module]) for module in modules if module in sys.modules]

    def __missing__(self, name: str) -> Any:
        return next((names[name] for names in self._modules if name in names), getattr(builtins, name, object))


def _hints(of: object, names: Container[str] | None = None) -> list[object]:
    """The annotations of a class or function, or some of them; none where they cannot be read."""
    if of is None:
        return []
    classes = of.__mro__ if isinstance(of, type) else (of,)
    try:
        hints = get_type_hints(of, localns=_Names(each.__module__ for each in classes))
    except (NameError, AttributeError, TypeError):  # then no kind is known by them, which ``plain`` tells
        return []
    return [hint for name, hint in hints.items() if names is None or name in names]


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or _is_named_tuple(kind)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields(kind: type) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)  # type: ignore[attr-defined]


def _check_record(value: object, names: list[str], kinds: Kinds) -> None:
    """Refuse now what could not be restored later."""
    name = _name(type(value))
    if kinds.get(name) is not type(value):
        raise StateError(
            f"a {name} in a rule's state cannot be found again when it is restored; an init whose state holds one, or "
            "is annotated with it, would do"
        )
    if more := sorted(set(getattr(value, "__dict__", ())) - set(names)):
        raise StateError(f"a {name} has attributes that are no fields: {', '.join(more)}; fields would do")


def _record(found: Mapping[str, Any], values: list[Any], kinds: Kinds) -> Any:
    kind = kinds.get(found["record"])
    if kind is None:
        raise StateError(f"the rule's state has no {found['record']}; it has {', '.join(sorted(kinds)) or 'none'}")
    names = _fields(kind)
    if len(names) != len(values):
        raise StateError(f"{found['record']} has {len(names)} fields, and {len(values)} were kept")
    if _is_named_tuple(kind):
        return kind._make(values)  # type: ignore[attr-defined]
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen ones too, and without a second __post_init__
    return made
