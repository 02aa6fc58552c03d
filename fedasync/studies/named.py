"""What a table names: a built-in, or the user's own by its dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from fedasync.studies.errors import StudyError, did_you_mean


def without(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def named(name: object, known: Mapping[str, Callable[..., Any]], where: str) -> Callable[..., Any]:
    """A built-in by its name, or the user's own by its dotted path. Raises StudyError."""
    if not isinstance(name, str):
        got = "this key is missing" if name is None else f"got {name!r}"
        raise StudyError(f"{where}: {got}; one of {', '.join(known)}, or a dotted path such as my_module.my_name")
    if name in known:
        return known[name]
    module_name, dot, attribute = name.rpartition(".")
    if not (dot and attribute):
        raise StudyError(f"{where}: unknown name {name!r}{did_you_mean(name, known)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise StudyError(f"{where}: {name!r}: importing it raised {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise StudyError(f"{where}: {name!r}: module {module_name} has no {attribute}")
    found = getattr(module, attribute)
    if not callable(found):
        raise StudyError(f"{where}: {name!r} is no class and no function")
    make: Callable[..., Any] = found
    return make
