"""Prompts from a file with a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def rows(path: str, needed: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Where each object of a file stands ("FILE, line 3"), and the object; empty lines count for nothing.

    Raises ValueError with file and line for what is no object with the ``needed`` keys, and for a file without rows.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task: {file} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: this is no JSON: {error}") from None
        missing = [key for key in needed if not isinstance(row, dict) or key not in row]
        if missing:
            raise ValueError(f"{where}: an object with {', '.join(needed)} would do; {missing[0]} is missing")
        found.append((where, row))
    if not found:
        raise ValueError(f"{file}: it has no rows")
    return found
