"""How many results are computed in one call, by law of durations and number in flight: a property of the law alone.

    python bench/batch_sizes.py

When a result is due, all in flight that are not yet computed are computed with it. The first of n memoryless durations
leaves none of the others; the mean is about √(πn/2) then, and n for durations that hardly differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import pi, sqrt

from rich.console import Console
from rich.table import Table

from fedasync.aggregation.model import Contribution
from fedasync.simulation import Population, simulate
from fedasync.simulation.laws import Exponential, Law, Lognormal
from fedasync.strategies import fedasync
from fedasync.workloads import Quadratic, Task, Workload

IN_FLIGHT = (10, 100, 1000)
LAWS: dict[str, Law] = {f"lognormal, σ = {s:g}": Lognormal(100.0, s) for s in (0.03, 0.25, 0.6, 1.0)}
LAWS["exponential"] = Exponential(100.0)
ROUNDS = 100
"""Updates for each slot."""


class Counting(Quadratic):
    """Keeps the size of every batch."""

    def __init__(self, clients: int) -> None:
        super().__init__(clients)
        self.sizes: list[int] = []

    def train_batch(self, work: Sequence[tuple[Workload, Task]], memory_bytes: int) -> Sequence[Contribution]:
        self.sizes.append(len(work))
        return super().train_batch(work, memory_bytes)


def mean_batch(law: Law, in_flight: int) -> float:
    """Mean number of results a call, in the run's second half."""
    workload = Counting(10 * in_flight)
    simulate(fedasync(concurrency=in_flight), Population(duration_s=law), workload, updates=ROUNDS * in_flight)
    sizes = workload.sizes[len(workload.sizes) // 2 :]
    return sum(sizes) / len(sizes)


def main() -> None:
    table = Table("durations", *(f"{n} in flight" for n in IN_FLIGHT))
    for name, law in LAWS.items():
        table.add_row(name, *(f"{mean_batch(law, n):.3g}" for n in IN_FLIGHT))
    table.add_row("√(πn/2)", *(f"{sqrt(pi * n / 2):.3g}" for n in IN_FLIGHT))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
