"""What is not needed is not imported: help and timing-only studies start without torch and its like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .running import TIMING

HEAVY = {"torch", "torchvision", "flwr", "transformers", "accelerate", "sklearn"}

PROGRAM = """
import sys
from fedasync import cli
sys.argv[0] = "fedasync"
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def imported(*words: str, cwd: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("words", [("--help",), ("list",)])
def test_help_and_list(tmp_path: Path, words: tuple[str, ...]) -> None:
    found = imported(*words, cwd=tmp_path)
    assert not found & HEAVY
    if words == ("--help",):
        assert not found & {"matplotlib", "polars", "pydantic", "joblib"}


def test_a_timing_only_study(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(TIMING)
    found = imported("sim", "s.toml", "--jobs", "1", cwd=tmp_path)
    assert "simpy" in found
    assert not found & HEAVY
