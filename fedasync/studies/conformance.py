"""``fedasync conformance``: what the core computes for known inputs, beside what it must be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isclose
from pathlib import Path

from fedasync.studies import scenario
from fedasync.studies.errors import StudyError
from fedasync.studies.vectors import SECTIONS, Evidence, Result, Section, Vector


@dataclass(frozen=True)
class Line:
    """A vector, what the core made of it, and whether that agrees (to 12 digits)."""

    section: str
    case: str
    convention: str
    whose: str
    evidence: Evidence
    result: Result
    expected: Result
    agrees: bool


def lines(sections: Sequence[Section] = SECTIONS) -> list[Line]:
    """Every vector, computed."""
    return [_line(section.title, vector) for section in sections for vector in section.vectors]


def _line(section: str, vector: Vector) -> Line:
    result, expected = vector.compute(), vector.expected
    if isinstance(result, str) or isinstance(expected, str):
        agrees = result == expected
    else:
        agrees = isclose(result, expected, rel_tol=1e-12, abs_tol=1e-12)
    return Line(section, vector.case, vector.convention, vector.whose, vector.evidence, result, expected, agrees)


def show(file: Path | None, *, as_json: bool) -> int:
    """Print the vectors, computed, or a scenario's events; the exit status: 0, or 1 when a vector disagrees.

    Raises StudyError for a scenario that cannot be played, and without torch.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise StudyError(f"conformance needs torch ({error}): pip install 'fedasync[torch]'", 1) from None
    if file is not None:
        scenario.show(file, as_json=as_json)
        return 0
    return _show_vectors(as_json=as_json)


def _show_vectors(*, as_json: bool) -> int:
    found = lines()
    agree = all(line.agrees for line in found)
    if as_json:
        told = {
            "agrees": agree,
            "given": {section.title: section.given for section in SECTIONS},
            "vectors": [asdict(line) for line in found],
        }
        print(json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        _print(found)
    return 0 if agree else 1


def _print(found: Sequence[Line]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console = console if console.is_terminal else Console(width=140)
    table = Table()
    for name in ("vector", "convention", "whose", "result", "expected", "agrees"):
        table.add_column(name, justify="right" if name in ("result", "expected") else "left")
    for section in SECTIONS:
        table.add_section()
        table.add_row(Text(section.title, style="bold"))
        for line in found:
            if line.section == section.title:
                cells = (line.case, line.convention, credited(line), rounded(line.result), rounded(line.expected))
                table.add_row(*map(Text, cells), "yes" if line.agrees else "[red]NO[/red]")
    console.print(table)
    for text in footer(found):
        console.print(text, markup=False, highlight=False)


def credited(line: Line) -> str:
    """Whose convention it is, with a star where the framework itself was executed on the input."""
    return f"{line.whose} *" if line.evidence == "executed" else line.whose


def rounded(value: Result) -> str:
    """Six digits behind the point, without trailing zeros."""
    return value if isinstance(value, str) else f"{value:.6f}".rstrip("0").rstrip(".")


def footer(found: Sequence[Line]) -> list[str]:
    """What the inputs are, whose numbers were met by executing the framework, and how many agree."""
    executed: dict[str, list[str]] = {}
    for line in found:
        if line.evidence == "executed":
            executed.setdefault(line.whose, []).append(rounded(line.result))
    met = [f"{whose} ({', '.join(values)})" for whose, values in executed.items()]
    read = dict.fromkeys(
        f"{line.whose} ({line.section})" if line.whose in executed else line.whose
        for line in found
        if line.evidence == "source"
    )
    return [
        *(f"{section.title}: {section.given}" for section in SECTIONS),
        f"* also confirmed by executing the released package: {'; '.join(met)}.",
        f"Read in the source, not executed: {'; '.join(read)}.",
        "paper: the formula as public re-implementations attribute it to the paper; ours: a rule of this simulator.",
        f"{sum(line.agrees for line in found)} of {len(found)} agree.",
    ]
