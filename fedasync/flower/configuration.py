"""A study's configuration as Flower's run configuration, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, NoReturn

OUT, RESUME, EXPERIMENT = "out", "resume", "experiment"
OURS = (OUT, RESUME, EXPERIMENT)
"""Keys that say where a deployment's run is written, whether it goes on from there, and what it belongs to."""

MARK = "json:"
"""What a text begins with that stands for a JSON value."""
LARGEST = 2**63 - 1
"""Flower's integers have 64 bits."""

Value = str | int | float | bool


def flatten(config: Mapping[str, Any]) -> dict[str, Value]:
    """The configuration with one dotted key for each value, as Flower flattens nested tables.

    Flower carries texts, numbers and truth values. Anything else that JSON has becomes a text, ``json:`` and the
    JSON: a list, null, an empty table, an integer of more than 64 bits, a table with a key that is empty or has a dot,
    and a text that itself begins with ``json:``. Raises ValueError for what JSON does not have.
    """
    for key, value in config.items():
        _check(value, _place("", key))
        if not _splits(key):
            raise ValueError(f"configuration: key {key!r}: Flower reads it as tables; a key without a dot would do")
    return dict(_flat(config, ""))


def unflatten(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration whose ``flatten`` is ``run_config``.

    Raises ValueError for two keys that collide, and for a text that begins with ``json:`` and is none.
    """
    config: dict[str, Any] = {}
    given: dict[tuple[str, ...], str] = {}
    """Where each value stands → the key that put it there."""
    for key, value in run_config.items():
        *path, last = key.split(".")
        table = config
        for depth, part in enumerate(path, 1):
            if (above := given.get(tuple(path[:depth]))) is not None:
                _collide(above, key)
            table = table.setdefault(part, {})
        if last in table:
            _collide(key, next(other for place, other in given.items() if place[: len(path) + 1] == (*path, last)))
        table[last] = _read(value, key)
        given[(*path, last)] = key
    return config


def without_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the keys of a deployment's own."""
    return {key: value for key, value in config.items() if key not in OURS}


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Value]]:
    flat: list[tuple[str, Value]] = []
    for key, value in table.items():
        if isinstance(value, dict) and value and all(map(_splits, value)):
            flat += _flat(value, f"{prefix}{key}.")
        else:
            flat.append((prefix + key, value if _is_plain(value) else MARK + json.dumps(value, ensure_ascii=False)))
    return flat


def _splits(key: str) -> bool:
    """Whether a dotted key that it is part of is split there and nowhere else."""
    return key != "" and "." not in key


def _is_plain(value: object) -> bool:
    """Whether Flower carries it as it is."""
    if isinstance(value, str):
        return not value.startswith(MARK)
    if isinstance(value, int):  # a bool is one
        return -LARGEST - 1 <= value <= LARGEST
    return isinstance(value, float)


def _check(value: object, place: str) -> None:
    """Raise ValueError for what JSON does not have."""
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"configuration: {place}: got {value}; a finite number would do")
    if isinstance(value, dict):
        for key, item in value.items():
            _check(item, _place(f"{place}.", key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{place}.{index}")
    elif value is not None and not isinstance(value, Value):
        raise ValueError(
            f"configuration: {place}: got {type(value).__name__} {str(value)[:80]!r}, which Flower cannot carry; "
            "a text, a number, true, false, null, a list or a table would do"
        )


def _place(prefix: str, key: object) -> str:
    if not isinstance(key, str):
        raise ValueError(f"configuration: {prefix}{key!r}: got a key of {type(key).__name__}; a text would do")
    return prefix + key


def _read(value: Any, key: str) -> Any:
    if not (isinstance(value, str) and value.startswith(MARK)):
        return value
    try:
        return json.loads(value.removeprefix(MARK), parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"run configuration: {key}: after {MARK!r} stands no JSON: {error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no finite number")


def _collide(one: str, other: str) -> NoReturn:
    raise ValueError(f"run configuration: {one} and {other} collide: one is in the other's place; either would do")
