"""The study that several threads look at, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ..studies.running import apart
from .study import SOUND_AND_ILL, Made

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Stopped, and failed, if it should hang."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(HERE / "mine.py", folder)
    (folder / "s.toml").write_text(SOUND_AND_ILL)
    return Made(folder, apart("sim", "s.toml", "--jobs", "2", cwd=folder, timeout_s=400))
