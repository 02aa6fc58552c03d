"""Which fedasync this is: what a controller and workers on other machines must have alike."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path


def _version() -> str:
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return f"{metadata.version('fedasync')} (source {digest.hexdigest()[:8]})"


_THIS = _version()  # when the process begins: an update of the files later is not what runs


def fedasync_version() -> str:
    """The package's version and a digest of its source, such as ``0.1.0 (source 3f9c21ab)``."""
    return _THIS
