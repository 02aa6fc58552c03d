"""A log of many million rows takes no more memory than its leases and its figures need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "long_log.py"


@pytest.mark.slow
def test_a_long_log_is_audited_saved_and_published_in_bounded_memory(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    out = tmp_path / "out.json"
    asked = ["--completions", "3000000", "--in-flight", "30000", "--out", out]
    subprocess.run([sys.executable, BENCH, *asked], check=True, capture_output=True)
    peaks = {one["stage"]: one["peak_mb"] for one in json.loads(out.read_text())["stages"]}
    assert peaks["save"] - peaks["start"] < 64 + 9 * 3 + 150
    assert peaks["publish"] < 700
