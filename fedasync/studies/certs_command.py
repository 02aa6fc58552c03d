"""What the command ``certs`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedasync.studies.errors import StudyError


def write_certificates(
    folder: Path, clients: int, names: Sequence[str], addresses: Sequence[str], days: int, *, overwrite: bool
) -> None:
    """Write a deployment's certificates and keys, and print the commands that use them. Raises StudyError."""
    try:
        from fedasync.flower.certificates import commands, make
    except ImportError as error:
        raise StudyError(f"certs: {error.name} is not installed; pip install 'fedasync[flower]' would do") from None

    chosen = (names or ("localhost",), addresses or ("127.0.0.1",))
    try:
        made = make(folder, *chosen, clients, days, overwrite=overwrite)
    except ValueError as error:
        raise StudyError(str(error)) from None
    hosts = [*names, *addresses, "localhost"]
    print(f"# {folder}: valid for {days} days; each private file goes to the machine that needs it, and to no other")
    print(commands(made, hosts[0]))
