"""A timing-only run loads no learning library."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from fedasync.simulation import Exponential, OnOff, Population, simulate
from fedasync.strategies import {strategy}

run = simulate({strategy}({arguments}), Population(6, Exponential(1.0), availability=OnOff()), time_s=20.0)
assert run.summary["timing_only"] and run.model is None
print(sorted({{"torch", "sklearn", "flwr", "transformers"}} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("strategy", "arguments"), [("fedfa", "concurrency=4"), ("fedavg", "cohort=4, keep=3")], ids=["fedfa", "fedavg"]
)
def test_a_timing_only_run_imports_no_learning_library(strategy: str, arguments: str) -> None:
    script = SCRIPT.format(strategy=strategy, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
