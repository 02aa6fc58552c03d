"""Tables as TOML text, in the order in which they stand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Any], under: str = "") -> str:
    """Tables of texts, numbers, truths, lists and tables; a None is left out, since TOML has none.

    Raises TypeError for a value of another type.
    """
    plain, parts = [], []
    for key, value in tables.items():
        name = f"{under}{_key(key)}"
        if value is None:
            continue
        if isinstance(value, Mapping) and not under:
            parts.append(f"[{name}]\n{toml_text(value, f'{name}.')}")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value) and under:
            for item in value:
                parts.append(f"[[{name}]]\n" + "".join(f"{_key(k)} = {_value(v)}\n" for k, v in item.items()))
        else:
            plain.append(f"{_key(key)} = {_value(value)}\n")
    return "\n".join(["".join(plain), *parts] if plain else parts)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            inside = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
            return f"{{ {inside} }}" if inside else "{}"
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
