"""A user's own module: workloads and a strategy that study files name by their dotted path.

The fixture ``folder`` copies it into the working directory of a test.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedasync.aggregation.model import Contribution, Form, Model
from fedasync.aggregation.update import Inputs
from fedasync.core import Concurrency, Strategy, Tumbling
from fedasync.workloads import Quadratic, Task

CLIENT = 3
"""The one that goes wrong."""


@dataclass(frozen=True)
class Median:
    """A server step along the median of K deltas."""

    wants: Form = "delta"

    def init(self, values: torch.Tensor) -> None:
        return None

    def apply(self, values: torch.Tensor, state: None, inputs: Inputs) -> None:
        values += torch.stack([i.values for i in inputs.entering]).median(0).values


def median(*, concurrency: int, buffer_size: int = 3) -> Strategy:
    """A row of one's own."""
    return Strategy("median", Concurrency(concurrency), Tumbling(buffer_size), Median())


def no_strategy(*, concurrency: int) -> int:
    return concurrency


def verbose(*, concurrency: int) -> Strategy:
    raise ValueError(f"{concurrency} is too much;\n  less would do")


def bankrupt(*, concurrency: int) -> Strategy:
    raise KeyError("funds")


class Steps:
    """Written from nothing: every client returns w + ``size`` in every coordinate."""

    def __init__(self, clients: int, size: float = 1.0) -> None:
        self.clients, self.size = clients, size

    def client_samples(self) -> Sequence[int]:
        return [1] * self.clients

    def initial_model(self, seed: int) -> Model:
        return Model.from_tensors({"w": torch.zeros(2)})

    def train(self, task: Task) -> Contribution:
        return Contribution(task.model.values + self.size, "parameters", 1)

    def evaluate(self, model: Model) -> dict[str, float]:
        return {"w": float(model.values.mean())}


class RaisesInTrain(Quadratic):
    def train(self, task: Task) -> Contribution:
        if task.client == CLIENT:
            raise KeyError("pixel")
        return super().train(task)


class RaisesInEvaluate(Quadratic):
    def evaluate(self, model: Model) -> dict[str, float]:
        raise KeyError("no test data")


class RaisesInInitialModel(Quadratic):
    def initial_model(self, seed: int) -> Model:
        raise KeyError("no weights")


class RaisesInClientSamples(Quadratic):
    def client_samples(self) -> Sequence[int]:
        raise KeyError("no clients")


class RaisesWhenMade(Quadratic):
    def __init__(self, clients: int) -> None:
        raise KeyError("no such data set")


class Quits(Quadratic):
    def train(self, task: Task) -> Contribution:
        sys.exit("I quit")


class Empty(Quadratic):
    def client_samples(self) -> Sequence[int]:
        return [0 if client == CLIENT else 1 for client in range(8)]


class NotAWorkload:
    def __init__(self, clients: int) -> None:
        pass

    def train(self, task: Task) -> Contribution:
        raise AssertionError


class _OneIsIll(Quadratic):
    def train(self, task: Task) -> Contribution:
        good = super().train(task)
        return replace(good, values=self.spoil(good.values)) if task.client == CLIENT else good

    def spoil(self, values: torch.Tensor) -> Any:
        return values


class SendsNaN(_OneIsIll):
    def spoil(self, values: torch.Tensor) -> Any:
        return values * float("nan")


class SendsAnotherShape(_OneIsIll):
    def spoil(self, values: torch.Tensor) -> Any:
        return torch.zeros(5, dtype=values.dtype)


class SendsAnotherType(_OneIsIll):
    def spoil(self, values: torch.Tensor) -> Any:
        return values.to(torch.float16)


class SendsAnArray(_OneIsIll):
    def spoil(self, values: torch.Tensor) -> Any:
        return values.numpy()


class SendsNothing(Quadratic):
    def train(self, task: Task) -> Any:
        return None if task.client == CLIENT else super().train(task)


class AllSendNaN(Quadratic):
    def train(self, task: Task) -> Contribution:
        return replace(super().train(task), values=task.model.values * float("nan"))


class Diverges(Quadratic):
    """The metric is no number after a while, like the loss of a model whose learning rate is too large."""

    def evaluate(self, model: Model) -> dict[str, float]:
        good = super().evaluate(model)
        return {**good, "loss": float("nan") if good["w"] > 1 else good["loss"]}


class Slow(Quadratic):
    """Takes its time while a file ``slow`` lies in the working directory, and leaves a trace of who is at work."""

    def train(self, task: Task) -> Contribution:
        if Path("slow").exists():
            Path(f"at_work_{os.getpid()}").touch()
            time.sleep(0.04)
        return super().train(task)
