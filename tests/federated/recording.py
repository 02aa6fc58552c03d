"""Simulated runs whose contributions are recorded, with all that a replay needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedasync.aggregation.model import Contribution, Model
from fedasync.aggregation.update import Inputs
from fedasync.core import KINDS, Strategy, Tiers
from fedasync.core.log import COLUMNS, NONE, Row
from fedasync.federated.arrays import Arrays
from fedasync.runs.run import Run
from fedasync.simulation import Population, simulate
from fedasync.simulation.population import Clients
from fedasync.streams import Stream
from fedasync.workloads import Quadratic
from fedasync.workloads.protocol import Task

CLIENTS = 8


class Recording(Quadratic):
    """Keeps what was trained, by the task's seed; now and then it is not fit for use."""

    def __init__(self, unfit: float = 0.0) -> None:
        super().__init__(CLIENTS, dimensions=3, contraction=0.8, start=5.0, seed=2, samples=tuple(range(1, 9)))
        self.brought: dict[int, Contribution] = {}
        self.unfit = unfit

    def train(self, task: Task) -> Contribution:
        found = super().train(task)
        if self.unfit and task.seed % 97 < 97 * self.unfit:
            found.values[1] = float("nan")
        self.brought[task.seed] = replace(found, values=found.values.clone())
        return found

    def compare(self, published: Model, current: Model) -> dict[str, float]:
        return {"disagreement": float((published.values - current.values).abs().max()) % 1.0}


@dataclass
class Kept:
    """An update rule that keeps the bytes of every version it makes, in place always."""

    rule: Any
    versions: list[bytes] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name == "rule":
            raise AttributeError(name)
        return getattr(self.rule, name)

    def init(self, values: Tensor) -> Any:
        return self.rule.init(values)

    def apply(self, values: Tensor, state: Any, inputs: Inputs) -> Any:
        state = self.rule.apply(values, state, inputs)
        self.versions.append(values.numpy().tobytes())
        return state


@dataclass
class Recorded:
    """A run, and what it takes to make it again."""

    strategy: Strategy
    run: Run
    versions: list[bytes]
    rows: list[Row]
    reasons: list[str]
    contributions: dict[int, Contribution]
    profile: list[float] | None
    seed: int

    def contribution(self, lease_id: int) -> Contribution | None:
        found = self.contributions.get(lease_id)
        return None if found is None else replace(found, values=found.values.clone())

    def arrays(self) -> Arrays:
        return Arrays(self.strategy, Recording(), self.seed)


def record(strategy: Strategy, population: Population, *, seed: int = 0, unfit: float = 0.0, **limits: Any) -> Recorded:
    workload, kept = Recording(unfit), Kept(strategy.update)
    run = simulate(replace(strategy, update=kept), population, workload, seed=seed, config={}, **limits)
    assert run.record is not None
    reasons = list(run.record.reasons)
    rows = rows_of(run, reasons)
    seeds, turns, contributions = Stream(seed, "training"), [0] * CLIENTS, {}
    for _, kind, lease, worker, *_ in rows:
        if KINDS[kind] == "admitted":
            found = workload.brought.get(seeds.seed(worker, turns[worker]))
            turns[worker] += 1
            if found is not None:
                contributions[lease] = found
    clients = Clients(population, seed, workload.client_samples())
    profile = [clients.mean_work_s(c) for c in range(CLIENTS)] if isinstance(strategy.admission, Tiers) else None
    return Recorded(strategy, run, kept.versions, rows, reasons, contributions, profile, seed)


def rows_of(run: Run, reasons: list[str]) -> list[Row]:
    """The events table as rows of the core."""
    columns = [run.events[name].to_list() for name in COLUMNS]
    found = []
    for time_s, kind, *numbers, reason in zip(*columns, strict=True):
        code = NONE if reason is None else reasons.index(reason)
        found.append((time_s, KINDS.index(kind), *(NONE if n is None else n for n in numbers), code))
    return found  # type: ignore[return-value]


def same(a: Tensor, b: Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


def bits(model: Model) -> bytes:
    return bytes(model.values.view(torch.uint8).numpy().tobytes())
