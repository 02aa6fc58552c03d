"""A user's own module: what a study names by its dotted path."""

from __future__ import annotations

import time
from pathlib import Path

from fedasync.aggregation.model import Contribution
from fedasync.core import Strategy
from fedasync.strategies import fedbuff
from fedasync.workloads import Quadratic, Task

CLIENT = 3
"""The one that goes wrong."""


class Broken(Quadratic):
    """One of its clients reads a key that is not there."""

    def train(self, task: Task) -> Contribution:
        if task.client == CLIENT:
            return lookup({})
        return super().train(task)


def lookup(batch: dict[str, Contribution]) -> Contribution:
    return batch["pixel"]  # raises


def waits(*, concurrency: int) -> Strategy:
    """FedBuff, but as long as there is a file ``wait``, only the first run of a study comes to an end."""
    while Path("wait").exists() and list(Path("results").rglob("summary.json")):
        Path("at_work").touch()
        time.sleep(0.01)
    return fedbuff(concurrency=concurrency, buffer_size=2)
