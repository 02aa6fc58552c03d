"""A paper-sized run of the RL cluster: 250 steps of 512 prompts × 16 answers on 128 GPUs; CPU-seconds and memory.

    python bench/cluster.py [--versions 250] [--eta 4]

Beside it, in the same process, the floor: a heap that takes and gives as many events as the run has answers.
"""

from __future__ import annotations

import argparse
import resource
import time
from heapq import heappop, heappush

from fedasync.simulation.cluster import Cluster, Prompts, simulate_cluster
from fedasync.simulation.cluster.prompts import TwoLevel
from fedasync.simulation.cluster.training import Trainer
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant
from fedasync.strategies import areal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=250)
    parser.add_argument("--eta", type=int, default=4)
    asked = parser.parse_args()
    cluster = Cluster(
        generation_gpus=96,
        training_gpus=32,
        gpu="h800",
        model="1.5b",
        trainer=Trainer(tokens_per_second_per_gpu=12_500, fixed_s=5.0),
        weights=Weights(load_s=5.0),
    )
    lengths = TwoLevel(median=6900, prompt_sigma=0.70, answer_sigma=0.40)
    prompts = Prompts(answers=16, prompt_tokens=Constant(150), answer_tokens=lengths, most_tokens=27_648)
    before = time.process_time()
    run = simulate_cluster(areal(batch=512, eta=asked.eta), cluster, prompts, versions=asked.versions)
    spent = time.process_time() - before
    answers = run.summary["admitted"] * prompts.answers
    floor = heap_alone(answers)
    print(f"versions {run.summary['versions']}, answers {answers:,}, virtual {run.summary['time_s'] / 3600:.1f} h")
    print(f"CPU-seconds {spent:.1f}, {1e6 * spent / answers:.1f} µs an answer; a heap alone {floor:.1f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def heap_alone(events: int) -> float:
    """CPU-seconds of as many pushes and pops, in a heap of as many entries as answers are in flight."""
    heap: list[tuple[float, int]] = []
    before = time.process_time()
    for number in range(events):
        heappush(heap, (number * 0.618033988749895 % 1.0 + number / events, number))
        if number >= 40_000:
            heappop(heap)
    while heap:
        heappop(heap)
    return time.process_time() - before


if __name__ == "__main__":
    main()
