"""A timing-only run loads no learning library."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from fedasync.simulation import Exponential, OnOff, Population, simulate
from fedasync.strategies import fedavg, fedfa

for strategy in (fedfa(concurrency=4), fedavg(cohort=4, keep=3)):
    run = simulate(strategy, Population(6, Exponential(1.0), availability=OnOff()), time_s=20.0)
    assert run.summary["timing_only"] and run.model is None
print(sorted({"torch", "sklearn", "flwr", "transformers"} & set(sys.modules)))
"""


def test_a_timing_only_run_imports_no_learning_library() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
