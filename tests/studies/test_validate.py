"""The page of validation: its tables are those of the studies, and what stands around them stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedasync.studies.errors import StudyError
from fedasync.studies.validate import BEGIN, END, validate

from .running import moments
from .test_calibration import IDEAL


def test_tables_are_written_between_the_marks_and_the_rest_stays(folder: Path, study: Path) -> None:
    study.write_text(IDEAL)
    page = folder / "page.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    assert validate(page, 1, Path("out"), ["s.toml"]) == 0
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{BEGIN}\n\n### small\n\n| runs | metric |")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "old" not in text
    assert "| in turns | step_s |" in text
    assert "* Fitted: cluster.decoding.tokens_per_second" in text
    before = moments(Path("out/s"))
    assert validate(page, 1, Path("out"), ["s.toml"]) == 0
    assert page.read_text() == text
    assert moments(Path("out/s")) == before  # finished runs are not made again


def test_a_page_without_marks_is_refused_before_any_run(folder: Path, study: Path) -> None:
    study.write_text(IDEAL)
    (folder / "page.md").write_text("nothing")
    with pytest.raises(StudyError, match="no place for the tables"):
        validate(folder / "page.md", 1, Path("out"), ["s.toml"])
    with pytest.raises(StudyError, match="cannot be read"):
        validate(folder / "none.md", 1, Path("out"), ["s.toml"])
    assert not Path("out").exists()
