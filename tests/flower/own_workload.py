"""A user's own module; some of it goes wrong."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from fedasync.aggregation.model import Contribution
from fedasync.workloads import Quadratic, Task


class Own(Quadratic):
    """Goes wrong in its own ``way``."""

    def __init__(self, clients: int, way: str) -> None:
        if way == "built":
            raise ValueError("no data here")
        super().__init__(clients)
        self.way = way

    def train(self, task: Task) -> Any:
        if self.way == "exit":
            sys.exit("the data is gone")
        if self.way == "library":
            json.loads("no json")
        if self.way == "torch":
            torch.nn.Linear(3, 4)(torch.zeros(2))
        if self.way == "type":
            return 1.0
        if self.way == "list":
            return Contribution([0.0], "parameters", 1)  # type: ignore[arg-type]
        return super().train(task)
