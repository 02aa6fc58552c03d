"""The key that a controller and its processes prove to each other: from a file, or from the environment."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

KEY_VARIABLE = "FEDASYNC_AUTHKEY"
"""The key of the controller's listener, in hexadecimal; never an argument, which everybody can see."""
KEY_FILE = "worker-key"
LEAST_BYTES = 16


def key_of_environment() -> bytes | None:
    """None where it has none. Raises ValueError for what is no key."""
    told = os.environ.get(KEY_VARIABLE)
    return None if told is None else _key(told, f"the environment variable {KEY_VARIABLE}")


def key_of_file(path: Path) -> bytes:
    """Raises ValueError for what is no key, OSError where nothing can be read."""
    return _key(path.read_text("ascii", "replace"), str(path))


def kept_key(path: Path) -> bytes:
    """The file's key; where there is no file, a new one is drawn and written, for its owner alone."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return key_of_file(path)
    key = secrets.token_bytes(32)
    with os.fdopen(file, "w") as opened:
        opened.write(f"{key.hex()}\n")
    return key


def _key(told: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(told)
    except ValueError:
        key = b""
    if len(key) < LEAST_BYTES:
        raise ValueError(f"{where} holds no key; at least {LEAST_BYTES} bytes in hexadecimal would do")
    return key
