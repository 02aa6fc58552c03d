"""Small worlds for the tests of the simulation: cheap runs, and workloads known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedasync.aggregation.model import Contribution, Form, Model
from fedasync.aggregation.update import Input, Inputs, Update
from fedasync.core import KINDS, Concurrency, EventLog, Sliding, StalenessBudget, Strategy, Tumbling
from fedasync.core.log import COLUMNS
from fedasync.runs.run import Run
from fedasync.simulation.federated import FederatedSimulation
from fedasync.simulation.laws import (
    Constant,
    Exponential,
    HalfNormal,
    Law,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Values,
)
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.settings import Settings
from fedasync.simulation.simulate import simulate
from fedasync.workloads.protocol import Task

LAWS: dict[str, Law] = {
    "constant": Constant(0.75),
    "ties": Uniform(1.0, 1.0),
    "values_by_lease": Values((1.0, 0.25, 0.5, 0.5, 3.0), by="lease"),
    "uniform": Uniform(0.25, 2.0),
    "exponential": Exponential(1.0),
    "shifted_exponential": ShiftedExponential(0.5, 0.5),
    "half_normal": HalfNormal(1.0, 0.125),
    "lognormal": Lognormal(1.0, 1.0),
    "pareto": Pareto(0.5, 2.5),
    "pareto_cut": Pareto(0.5, 1.0, cap=30.0),
}
"""Means near 1 s; the first three make many leases end at one instant."""

LAW_NAMES = (*LAWS, "empirical")
"""Keys of the fixture ``laws``."""


def play(strategy: Strategy, population: Population, *, seed: int = 0, **limits: Any) -> FederatedSimulation:
    """A timing-only run without the tables of ``simulate``: cheap enough for hundreds of examples."""
    simulation = FederatedSimulation(strategy, Clients(population, seed), Settings(**limits), seed)
    simulation.run()
    return simulation


def column(log: EventLog, name: str, kind: str | None = None) -> np.ndarray:
    """One column of a log, of the rows of one kind if that is given."""
    log.flush()
    dtype = np.dtype([(column, f"<{code}") for column, code in COLUMNS.items()])
    rows = np.frombuffer(b"".join(log.packed), dtype)
    return rows[name] if kind is None else rows[name][rows["kind"] == KINDS.index(kind)]


def total_staleness(simulation: FederatedSimulation) -> int:
    """Staleness of all that arrived plus the ages, in versions, of the leases in flight: the left side of the law."""
    arrived = int(column(simulation.log, "staleness", "delivered").sum())
    coordinator = simulation.coordinator
    return arrived + sum(coordinator.version - lease.base_version for lease in coordinator.leases)


def timing(admission: Concurrency | StalenessBudget, buffer: Tumbling | Sliding, **bounds: Any) -> Strategy:
    """A strategy whose update nobody ever applies."""
    return Strategy("timing", admission, buffer, None, **bounds)


def rows(run: Run, kind: str, *columns: str) -> list[tuple[Any, ...]]:
    """The rows of one kind of a run's log, some columns of them."""
    return run.events.filter(run.events["kind"] == kind).select(columns).rows()


def series(run: Run, name: str = "w") -> dict[float, float]:
    """One metric of a run: time → value."""
    of_name = run.metrics.filter(run.metrics["name"] == name)
    return dict(zip(of_name["time_s"].to_list(), of_name["value"].to_list(), strict=True))


def constant_times(*seconds: float) -> Population:
    """Client i always takes the i-th time."""
    return Population(len(seconds), Values(seconds))


@dataclass
class Mapped:
    """A workload whose clients return ``map(client, w)``, a function of the base version alone."""

    clients: int
    map: Callable[[int, Tensor], Tensor]
    start: Sequence[float] = (0.0,)
    samples: Sequence[int] | None = None
    form: Form = "parameters"
    dtype: torch.dtype = torch.float64

    def client_samples(self) -> Sequence[int]:
        return self.samples or [1] * self.clients

    def initial_model(self, seed: int) -> Model:
        return Model.from_tensors({"w": torch.tensor(self.start, dtype=self.dtype)})

    def train(self, task: Task) -> Contribution:
        values = self.map(task.client, task.model.values.clone())
        return Contribution(values, self.form, self.client_samples()[task.client])

    def evaluate(self, model: Model) -> dict[str, float]:
        return {"w": float(model.values[0])}


def copied(inputs: Sequence[Input]) -> list[Input]:
    return [x._replace(values=x.values.clone()) for x in inputs]


@dataclass
class Watched:
    """An update rule that keeps every version it makes, and copies of what it was given for it."""

    rule: Update
    versions: list[Tensor] = field(default_factory=list)
    given: list[Inputs] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """What the rule has beyond the two functions: the form it wants, what it asks of its clients."""
        if name == "rule":
            raise AttributeError(name)
        return getattr(self.rule, name)

    def init(self, values: Tensor) -> Any:
        self.versions.append(values.clone())
        return self.rule.init(values)

    def apply(self, values: Tensor, state: Any, inputs: Inputs) -> Any:
        entering, window, leaving, undrafted = map(copied, inputs[:4])
        self.given.append(Inputs(entering, window, leaving, undrafted, *inputs[4:]))
        state = self.rule.apply(values, state, inputs)
        self.versions.append(values.clone())
        return state


def watch(strategy: Strategy, population: Population, workload: Any, **arguments: Any) -> tuple[Watched, Run]:
    """Simulate, and keep every version on the way."""
    watched = Watched(strategy.update)
    run = simulate(replace(strategy, update=watched), population, workload, config={}, **arguments)
    return watched, run
