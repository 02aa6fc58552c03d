"""One run of fedasync through its public API: W1-sync, W1-async, or W2 (timing only)."""

from __future__ import annotations

import argparse
import hashlib

from protocol import (
    BATCH_SIZE,
    CLIENTS,
    COHORT,
    HIDDEN,
    LAWS,
    LEARNING_RATE,
    MEAN_S,
    NEAR_CONSTANT_SIGMA,
    STEPS,
    UPDATES,
    mark,
)

import fedasync as fa
from fedasync.workloads import Digits, Iid, LocalTraining


def learn(strategy: fa.Strategy, population: fa.Population) -> None:
    local = LocalTraining(steps=STEPS, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE)
    workload = Digits(CLIENTS, Iid(), hidden=HIDDEN, local=local)
    fa.simulate(strategy, population, workload, updates=COHORT)
    mark("start")
    model = fa.simulate(strategy, population, workload, updates=UPDATES).model
    mark("end", updates=UPDATES)
    digest = hashlib.sha256(model.values.numpy().tobytes()).hexdigest()
    mark("result", accuracy=workload.evaluate(model)["accuracy"], sha256=digest)


def time_only(clients: int, in_flight: int, completions: int) -> None:
    population = fa.Population(clients=clients, duration_s=fa.laws.Exponential(MEAN_S))
    strategy = fa.strategies.fedbuff(concurrency=in_flight, buffer_size=COHORT)
    fa.simulate(strategy, population, updates=COHORT)
    mark("start")
    fa.simulate(strategy, population, updates=completions)
    mark("end", updates=completions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["W1-sync", "W1-async", "W2"])
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--law", choices=LAWS, default=LAWS[0])
    parser.add_argument("--completions", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=10_000)
    options = parser.parse_args()
    near_constant = fa.laws.Lognormal(mean=MEAN_S, sigma=NEAR_CONSTANT_SIGMA)
    population = fa.Population(
        duration_s=near_constant if options.law == "near-constant" else fa.laws.Exponential(MEAN_S)
    )
    if options.workload == "W2":
        time_only(options.clients, options.in_flight or 1_000, options.completions)
    elif options.workload == "W1-sync":
        learn(fa.strategies.fedavg(cohort=COHORT), population)
    else:
        learn(fa.strategies.fedbuff(concurrency=options.in_flight or COHORT, buffer_size=COHORT), population)


if __name__ == "__main__":
    main()
