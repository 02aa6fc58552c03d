"""The key that a controller and its processes prove to each other: from a file, or from the environment."""

from __future__ import annotations

import os
import secrets
import shlex
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
    """Raises ValueError for what is no key, or one that others may read; OSError where nothing can be read."""
    with path.open(encoding="ascii", errors="replace") as file:
        key, mode = _key(file.read(), str(path)), os.fstat(file.fileno()).st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"{path} is open to others (mode {mode:o}); chmod 600 {shlex.quote(str(path))} would do")
    return key


def kept_key(path: Path) -> bytes:
    """The file's key; where there is no file, a new one is drawn and written, for its owner alone.

    The file is there in full or not at all, whenever this process, or another that does the same, is killed.
    """
    if path.exists():
        return key_of_file(path)
    key = secrets.token_bytes(32)
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{key.hex()}\n")
        os.link(draft, path)
    except FileExistsError:  # another process was faster
        return key_of_file(path)
    finally:
        draft.unlink(missing_ok=True)
    return key


def _key(told: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(told)
    except ValueError:
        key = b""
    if len(key) < LEAST_BYTES:
        raise ValueError(f"{where} holds no key; at least {LEAST_BYTES} bytes in hexadecimal would do")
    return key
