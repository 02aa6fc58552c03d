"""The numbers of the protocol, and how a measured script talks to bench/peers.py. Standard library only.

A script prints one line of JSON a mark and waits until the harness, which meanwhile reads the CPU time of the whole
process tree, lets it go on. Run by hand, it just prints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CLIENTS, COHORT, ROUNDS, TEST_SAMPLES = 100, 10, 100, 297
UPDATES = COHORT * ROUNDS
STEPS, BATCH_SIZE, LEARNING_RATE, HIDDEN = 5, 10, 0.1, 32
MEAN_S, NEAR_CONSTANT_SIGMA = 100.0, 0.03
"""Durations of local work: mean, and the sigma of the lognormal law that hardly varies; the other is exponential."""
LAWS = ("near-constant", "exponential")

PREFIX = "BENCH "
WAITS = "FEDASYNC_BENCH"
"""Set by the harness."""


def mark(name: str, **values: Any) -> None:
    """``start``: the first update is done and what follows is counted; ``end``; ``result``: what came out."""
    line = json.dumps({"mark": name, "process_cpu_s": time.process_time(), **values})
    print(f"{PREFIX}{line}", flush=True)
    if WAITS in os.environ:
        sys.stdin.readline()
