"""What the command ``validate`` does: the studies of published numbers, and the page that shows what came of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from fedasync.runs.run import write
from fedasync.studies.command import run_study
from fedasync.studies.errors import StudyError

STUDIES = ("areal_paper", "areal_7b", "rl_published", "rl_no_gain", "rl_ideal")
"""In the page's order."""
PAGE = Path("docs") / "validation-rl.md"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def validate(page: Path | None, processes: int | None, out: Path, names: Sequence[str] = STUDIES) -> int:
    """Run the studies, each into a folder of ``out``, and write their tables between the page's marks.

    Finished runs are not made again. The exit status: 0, or 1 when a run failed. Raises StudyError.
    """
    page = page or PAGE
    _read(page)
    status = 0
    parts = []
    for name in names:
        folder = out / Path(name).stem
        status = max(status, run_study(name, (), processes, None, folder))
        file = folder / "published.md"
        if not file.is_file():
            raise StudyError(f"{folder}: no published.md: the study has no [[published]], or no run that finished")
        parts.append(_section(file.read_text()))
    write(page, _between(_read(page), "\n".join(parts), page).encode())
    print(shlex.quote(str(page)))
    return status


def _read(page: Path) -> str:
    """A page that has a place for the tables."""
    try:
        text = page.read_text()
    except OSError as error:
        raise StudyError(f"{page} cannot be read: {error.strerror or error}") from None
    _between(text, "", page)
    return text


def _between(text: str, section: str, page: Path) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise StudyError(f"{page}: no place for the tables; the lines {BEGIN} and {END} would do")
    return f"{before}{BEGIN}\n\n{section}\n{END}{after}"


def _section(published: str) -> str:
    """A study's page as a section of another."""
    return published.replace("# ", "### ", 1).replace(": predicted beside published\n", "\n", 1)
