"""The package as a whole: its first example, its layers, what it offers by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedasync

ROOT = Path(fedasync.__file__).parent.parent


def test_the_readmes_first_example_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert blocks, "README.md shows no Python example"
    done = subprocess.run(
        [sys.executable, "-c", blocks[0]],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the machine is shared with other tests
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_imports_go_down_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlinter.cli import lint_imports

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_every_public_name_is_there() -> None:
    for name in fedasync.__all__:
        assert getattr(fedasync, name) is not None
