"""Client updates per CPU-second: one by one, through Accelerate and in lanes, beside a bare torch loop in the same run.

    python bench/local_training.py --model mlp cnn --repeats 3

A client makes five steps of SGD in batches of 10 on its 15 images of handwritten digits; MLP 64-32-10, or two
convolutions. Lanes are clients that train in one call, each from its own version. The bare loop does the same steps
with ``torch.optim`` and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

from fedasync.aggregation.model import Model
from fedasync.workloads import Digits, Iid, LocalTraining, Task, Workload
from fedasync.workloads.accelerated import through_accelerate

LANES = (1, 2, 12, 50, 100, 250)
CLIENTS, STEPS, UPDATES = 100, 5, 600
MEMORY_BYTES = 1 << 30
FLOOR = "bare torch loop"


def tasks(model: Model, count: int) -> list[Task]:
    """Of different clients, from different versions."""
    return [Task(i % CLIENTS, replace(model, values=model.values * (1 + i / 1000)), seed=i) for i in range(count)]


def bare(workload: Digits, count: int) -> None:
    """The floor: the module's own loop."""
    module = workload._new_module(0)
    for client in range(count):
        x, y = workload._data().of(client % CLIENTS)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(STEPS):
            rows = torch.randperm(len(x))[:10] if step % 2 == 0 else torch.randperm(len(x))[10:]
            optimiser.zero_grad()
            cross_entropy(module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def ways(workload: Digits) -> dict[str, Callable[[int], None]]:
    """Name → a function that makes so many client updates."""
    model = workload.initial_model(0)

    def one_by_one(trained: Workload) -> Callable[[int], None]:
        def train(count: int) -> None:
            for task in tasks(model, count):
                trained.train(task)

        return train

    def in_lanes(lanes: int) -> Callable[[int], None]:
        def train(count: int) -> None:
            work = [(workload, task) for task in tasks(model, count)]
            for first in range(0, count, lanes):
                workload.train_batch(work[first : first + lanes], MEMORY_BYTES)

        return train

    return {
        FLOOR: lambda count: bare(workload, count),
        "one by one": one_by_one(workload),
        "through Accelerate": one_by_one(through_accelerate(workload, device="cpu")),
        **{f"{lanes} lanes" if lanes > 1 else "1 lane": in_lanes(lanes) for lanes in LANES},
    }


def measure(model: str, repeats: int, names: Sequence[str]) -> list[tuple[str, float, float]]:
    """(way, median updates per CPU-second, ratio to the floor); ways in turn, so that drift meets all alike."""
    local = LocalTraining(steps=STEPS, batch_size=10)
    workload = Digits(CLIENTS, Iid(), model=model, hidden=32, local=local)  # type: ignore[arg-type]
    found = {name: way for name, way in ways(workload).items() if name == FLOOR or not names or name in names}
    for way in found.values():
        way(UPDATES)  # trials and recordings are start-up
    rates: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(repeats):
        for name, way in found.items():
            start = time.process_time()
            way(UPDATES)
            rates[name].append(UPDATES / (time.process_time() - start))
    floor = statistics.median(rates[FLOOR])
    return [(name, statistics.median(each), statistics.median(each) / floor) for name, each in rates.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=["mlp", "cnn"], default=["mlp", "cnn"])
    parser.add_argument("--ways", nargs="+", default=[], help="rows of the table beside the bare loop; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for model in options.model:
        table = Table(model, "client updates per CPU-s", "× bare loop")
        for name, rate, ratio in measure(model, options.repeats, options.ways):
            table.add_row(name, f"{rate:,.0f}", f"{ratio:.1f}")
        Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
