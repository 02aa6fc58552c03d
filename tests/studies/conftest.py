"""A working directory with a user's modules in it, and the command run there."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedasync import cli

from .running import Command, Ended

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, where ``own_code`` and ``slow_module`` can be imported."""
    for name in ("own_code.py", "slow_module.py"):
        shutil.copy(HERE / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(HERE)])  # for worker processes that an earlier test has started
    monkeypatch.setenv("COLUMNS", "200")
    importlib.invalidate_caches()
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def fedasync(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command line, in this process: one process for the runs unless told otherwise, since they are short."""

    def command(*words: str) -> Ended:
        jobs = ["--jobs", "1"] if words[0] == "sim" and "--jobs" not in words else []
        monkeypatch.setattr(sys, "argv", ["fedasync", *words, *jobs])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Ended(int(end.value.code or 0), *capfd.readouterr())

    return command


@pytest.fixture
def study(folder: Path) -> Path:
    """Where a test writes its study."""
    return folder / "s.toml"
