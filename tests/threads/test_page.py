"""The page of threads names every test of this folder, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "threads.md"


def test_the_page_and_the_folder_name_the_same_tests() -> None:
    files = [file for file in HERE.glob("test_*.py") if file != Path(__file__)]
    written = [name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)]
    named = re.findall(r"`(test_\w+)`", PAGE.read_text())
    assert sorted(named) == sorted(written)
