"""Errors of configuration: one line that says what, where, which value, and what would be accepted."""

from __future__ import annotations

import difflib
import inspect
import json
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


class StudyError(ValueError):
    """A study cannot be run as it is written, or could not go on; the message is for the user, on one line.

    ``status`` is the exit status that says so.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def parse(target: Any, table: object, where: str) -> Any:
    """Validate a TOML value against a type, or against the signature of a function, which is then called.

    Types are taken strictly (no text for a number) and no unknown key is accepted. ``where`` is the place of the value
    in its file, for the message of the StudyError.
    """
    _demand_kinds(target, table, where)
    try:
        with _interrupts_later():
            adapter = _adapter(target)
        return adapter.validate_json(json.dumps(table), strict=True, extra="forbid")
    except ValidationError as error:
        raise StudyError(_first_line(error, target, where)) from None
    except (ValueError, ImportError) as error:  # raised by the function that was called
        raise StudyError(f"{where}: {error}") from None
    except PydanticUserError as error:
        why = error.message.split(". ")[0]
        raise StudyError(f"{where}: {target.__name__} cannot be made from TOML: {why}") from None


@lru_cache(maxsize=64)
def _adapter(target: Any) -> TypeAdapter[Any]:
    """Making one takes milliseconds, and the runs of a study ask for the same few."""
    return TypeAdapter(_callable(target))


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C takes effect only afterwards: pydantic's core would swallow it, or make it an error of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _callable(target: Any) -> Any:
    """A plain class as the function that makes it, so that its signature is what is validated."""
    if not inspect.isclass(target) or is_dataclass(target):
        return target

    def make(**keys: Any) -> Any:
        return target(**keys)

    make.__name__ = target.__name__
    make.__signature__ = signature(target)  # type: ignore[attr-defined]
    make.__annotations__ = _hints(target)
    return make


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; known: a, b, c", with the likeliest first."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"; did you mean {close[0]!r}?" if close else "") + f" (known: {', '.join(known)})"


def _first_line(error: ValidationError, target: Any, where: str) -> str:
    errors = _without_other_kinds(error.errors())
    first = min(errors, key=lambda e: e["type"] not in _UNKNOWN)  # a misspelt key is also a missing one
    # Branches of a union carry their type's name in the location: users see keys only.
    place = ".".join([where, *(str(part) for part in first["loc"] if _is_key(part))])
    others = len({tuple(filter(_is_key, e["loc"])) for e in errors}) - 1
    more = f" (and {others} more)" if others else ""
    return f"{_joined(place, _text(first, target))}{more}"


def _joined(place: str, text: str) -> str:
    """Place and text, without saying the table's name twice."""
    file, _, table = place.rpartition(": ")
    return f"{file}: {text}" if file and text.startswith((f"{table}.", f"{table}: ")) else f"{place}: {text}"


def _text(error: Any, target: Any) -> str:
    kind = error["type"]
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind in _UNKNOWN:
        inner = [_dataclasses(target).get(str(part)) for part in error["loc"] if not _is_key(part)]
        owner = inner[-1] if inner and inner[-1] else _owner(target, error["loc"])
        return f"unknown key{did_you_mean(str(error['loc'][-1]), keys_of(owner))}"
    if "missing" in kind:
        return "this key is missing"
    got = "true" if error["input"] is True else "false" if error["input"] is False else json.dumps(error["input"])
    if kind == "literal_error":
        return f"got {got}; {error['ctx']['expected']} would do"
    wanted = error["msg"].removeprefix("Input should be ").replace("a valid i", "an i").replace("a valid ", "a ")
    wanted = wanted.replace("an object", "a table").replace("dictionary", "table").replace("a array", "a list")
    return f"got {got}; {wanted} would do"


def _owner(target: Any, place: Sequence[object]) -> Any:
    """The table that a key stands in, by the keys that lead there; ``target`` where they do not say."""
    found = target
    for part in place[:-1]:
        if get_args(found) and (isinstance(part, int) or get_origin(found) is dict):
            found = get_args(found)[-1 if get_origin(found) is dict else 0]
        else:
            found = _key_hints(found).get(str(part))
        members = [member for member in get_args(found) if is_dataclass(member)]
        if len(members) == 1 and get_origin(found) not in (tuple, dict):
            found = members[0]  # a table or nothing
        if found is None:
            return target
    return found if is_dataclass(found) or inspect.isfunction(found) else target


def keys_of(target: Any) -> list[str]:
    """Names that a signature accepts, those of an unpacked TypedDict included."""
    keys: list[str] = []
    for name, parameter in signature(target).parameters.items():
        keys += _unpacked(target, name) if parameter.kind is Parameter.VAR_KEYWORD else [name]
    return keys


def _key_hints(target: Any) -> dict[str, Any]:
    """Annotations of the keys that a table for it may have, those of an unpacked TypedDict included."""
    hints = _hints(target)
    if inspect.isfunction(target):
        for name, parameter in signature(target).parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                hints |= _unpacked(target, name)
    return hints


def _unpacked(target: Any, name: str) -> dict[str, Any]:
    """What the TypedDict holds that the keywords ``name`` of a function are."""
    tables = get_args(_hints(target).get(name))
    return {key: hint for table in tables for key, hint in get_type_hints(table).items()}


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of the keys that a function or a class takes."""
    if is_dataclass(target) and isinstance(target, type):  # fields may come from a parent in another module
        return get_type_hints(target)
    return get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]


def _dataclasses(target: Any) -> dict[str, Any]:
    """Every dataclass that the annotations of a type or function lead to, by name."""
    found: dict[str, Any] = {}
    waiting = [target]
    while waiting:
        item = waiting.pop()
        if args := get_args(item):
            waiting += args
        elif callable(item) and (item is target or is_dataclass(item)) and getattr(item, "__name__", "") not in found:
            found[getattr(item, "__name__", "")] = item
            waiting += _key_hints(item).values()
    return found


def _is_key(part: object) -> bool:
    """And not the name of a union's branch."""
    return isinstance(part, int) or not (
        str(part)[:1].isupper() or str(part) in ("int", "float", "str") or "[" in str(part)
    )


def _demand_kinds(target: Any, value: object, place: str) -> None:
    """Every table that one of several dataclasses could read must say which: ``kind = "..."``."""
    if get_origin(target) is tuple and isinstance(value, list):
        for index, item in enumerate(value):
            _demand_kinds(get_args(target)[0], item, f"{place}.{index}")
        return
    if not isinstance(value, dict):
        return
    members = [member for member in get_args(target) if is_dataclass(member)]
    if len(members) == 1 and "kind" not in _hints(members[0]):  # a table or nothing
        target, members = members[0], []
    kinds = {_kind(member): member for member in members}
    if kinds:
        if value.get("kind") not in kinds:
            got = f"got {json.dumps(value['kind'])}" if "kind" in value else "this key is missing"
            raise StudyError(f"{place}.kind: {got}; {', '.join(map(repr, kinds))} would do")
        target = kinds[value["kind"]]
    if callable(target) and get_origin(target) is None:
        hints = _key_hints(target)
        for key, item in value.items():
            if key in hints:
                _demand_kinds(hints[key], item, f"{place}.{key}")


def _kind(member: Any) -> str:
    return str(get_args(get_type_hints(member)["kind"])[0])


def _without_other_kinds(errors: Sequence[Any]) -> list[Any]:
    """A table is reported once for each member of a union: keep what concerns the kind it names, no number or text."""
    other = {error["loc"][:-1] for error in errors if error["type"] == "literal_error" and error["loc"][-1] == "kind"}
    found = [e for e in errors if not any(e["loc"][: len(branch)] == branch for branch in other)] or list(errors)
    scalars = [(name,) for name in ("int", "float", "str")]
    return [e for e in found if not (e["loc"][-1:] in scalars and isinstance(e["input"], dict))] or found
