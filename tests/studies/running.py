"""Studies small enough to be run many times, and ways to run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = str(Path(sys.executable).with_name("fedasync"))
"""The command as installed."""

TIMING = """
[study]
title = "small"
seeds = 1

[run]
updates = 40

[population]
clients = 8
duration_s = { kind = "exponential", mean = 10.0 }

[strategy]
name = "fedbuff"
concurrency = 4
buffer_size = 2

[report]
figures = []
"""

LEARNING = """
[study]
title = "small"
seeds = 1

[run]
updates = 40
evaluate_every_s = 20

[workload]
kind = "quadratic"
clients = 8

[population]
duration_s = { kind = "exponential", mean = 10.0 }

[strategy]
name = "fedbuff"
concurrency = 4
buffer_size = 2

[report]
figures = []
"""

STRATEGIES = """
[[axis]]
name = "strategy"
points = [
  { label = "FedAvg", strategy = { name = "fedavg", cohort = 4 } },
  { label = "FedProx", strategy = { name = "fedprox", cohort = 4, keep = 3 } },
  { label = "FedAsync", strategy = { name = "fedasync", concurrency = 4 } },
  { label = "FedBuff", strategy = { name = "fedbuff", concurrency = 4, buffer_size = 2 } },
  { label = "FedFa", strategy = { name = "fedfa", concurrency = 4, window = 3 } },
]
"""


def changed(text: str, *changes: tuple[str, str]) -> str:
    """A study with other words in it."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on stderr."""
        assert "Traceback" not in self.err
        (line,) = self.err.splitlines()
        assert line.startswith("fedasync: ")
        return line


Command = Callable[..., Ended]


def apart(*words: str, cwd: Path, timeout_s: float = 120) -> Ended:
    """Run the installed command in a process of its own."""
    done = subprocess.run([PROGRAM, *words], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def runs(folder: Path) -> dict[str, Path]:
    """The finished runs of a study's folder by name."""
    found = [path.parent for path in sorted((folder / "runs").glob("*/summary.json"))]
    return {path.name: path for path in found if not path.name.startswith(".")}


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones as well."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def moments(folder: Path) -> dict[str, int]:
    """When every file of the finished runs was written."""
    return {str(p): p.stat().st_mtime_ns for run in runs(folder).values() for p in run.iterdir()}
