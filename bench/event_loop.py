"""Lease completions per CPU-second, timing only, beside the floor of bare SimPy in the same run.

    make bench
    python bench/event_loop.py --completions 100000 --repeats 3 --out bench.json

Ours does what a study does: admission, selection, drawn durations, ledger, staleness and the event log. Bare SimPy
schedules one timeout a completion and does nothing else, the least that any simulator on it must do.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import simpy
from rich.console import Console
from rich.table import Table

from fedasync.simulation import Clients, FederatedSimulation, Population, Settings
from fedasync.simulation.laws import Exponential
from fedasync.strategies import fedasync, fedbuff
from fedasync.streams import Stream

IN_FLIGHT = (100, 1_000, 10_000, 100_000)


def ours(strategy: str, in_flight: int, completions: int) -> float:
    """CPU-seconds of a timing-only run, without the making of its population."""
    clients = Clients(Population(clients=10 * in_flight, duration_s=Exponential(100.0)), seed=0)
    make = {"fedasync": fedasync, "fedbuff": fedbuff}[strategy]
    simulation = FederatedSimulation(make(concurrency=in_flight), clients, Settings(updates=completions), seed=0)
    return cpu_s(simulation.run)


def bare(in_flight: int, completions: int) -> float:
    """CPU-seconds of as many SimPy timeouts, with the same drawn durations."""
    env, stream, law = simpy.Environment(), Stream(0, "duration_s"), Exponential(100.0)
    done = 0

    def again(_: simpy.Event) -> None:
        nonlocal done
        done += 1
        start()

    def start() -> None:
        env.timeout(law.quantile(stream.uniform(done))).callbacks.append(again)

    def run() -> None:
        for _ in range(in_flight):
            start()
        while done < completions:
            env.step()

    return cpu_s(run)


def cpu_s(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    options = parser.parse_args()
    rows = []
    for in_flight in IN_FLIGHT:
        n = max(options.completions, 5 * in_flight)
        found: dict[str, list[float]] = {"bare SimPy": [], "fedbuff": [], "fedasync": []}
        for _ in range(options.repeats):  # in turn, so that a change of the machine's speed meets all alike
            found["bare SimPy"].append(bare(in_flight, n))
            for strategy in ("fedbuff", "fedasync"):
                found[strategy].append(ours(strategy, in_flight, n))
        for name, times in found.items():
            ratios = [own / floor for own, floor in zip(times, found["bare SimPy"], strict=True)]
            rows.append(
                {
                    "in_flight": in_flight,
                    "registered_clients": 10 * in_flight,
                    "what": name,
                    "completions_per_cpu_s": n / statistics.median(times),
                    "times_floor": statistics.median(ratios),
                    "least": n / max(times),
                    "most": n / min(times),
                }
            )
    table = Table("in flight", "registered", "what", "completions per CPU-s", "range", "× the floor's CPU-s")
    for row in rows:
        table.add_row(
            f"{row['in_flight']:,}",
            f"{row['registered_clients']:,}",
            str(row["what"]),
            f"{row['completions_per_cpu_s']:,.0f}",
            f"{row['least']:,.0f} – {row['most']:,.0f}",
            f"{row['times_floor']:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.out:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
