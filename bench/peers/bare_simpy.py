"""The floor of W2: SimPy schedules one timeout a completion, draws its duration, and does nothing else."""

from __future__ import annotations

import argparse
import random

import simpy
from protocol import MEAN_S, mark


def run(in_flight: int, completions: int) -> None:
    env, draw = simpy.Environment(), random.Random(0).expovariate
    done = 0

    def again(_: simpy.Event) -> None:
        nonlocal done
        done += 1
        start()

    def start() -> None:
        env.timeout(draw(1 / MEAN_S)).callbacks.append(again)

    for _ in range(in_flight):
        start()
    while done < completions:
        env.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=1_000)
    options = parser.parse_args()
    run(10, 10)
    mark("start")
    run(options.in_flight, options.completions)
    mark("end", updates=options.completions)
