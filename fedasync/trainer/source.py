"""Which fedasync this is: what a controller and workers on other machines must have alike."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

ROOMS = ("core", "rl", "trainer")
"""Of the source, what both ends work with."""


@cache
def fedasync_version() -> str:
    """The package's version and a digest of its source, such as ``0.1.0 (source 3f9c21ab)``."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return f"{metadata.version('fedasync')} (source {digest.hexdigest()[:8]})"
