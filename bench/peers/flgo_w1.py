"""FLGo: FedAvg, or FedBuff on its clock of integer ticks, in a scratch folder."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import w1
from protocol import BATCH_SIZE, COHORT, LAWS, LEARNING_RATE, MEAN_S, NEAR_CONSTANT_SIGMA, ROUNDS, STEPS, mark

CONFIG = """
import torch, w1
x, y, test_x, test_y = w1.data()
train_data = torch.utils.data.TensorDataset(x, y)
test_data = torch.utils.data.TensorDataset(test_x, test_y)
def get_model():
    return w1.module()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["W1-sync", "W1-async"])
    parser.add_argument("--law", choices=LAWS, default=LAWS[0])
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # FLGo parses the command line as well
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        run(options.workload == "W1-async", options.law)


def run(asynchronous: bool, law: str) -> None:
    import flgo
    import flgo.benchmark.partition
    from flgo.algorithm import fedavg, fedbuff
    from flgo.benchmark.toolkits.cv import classification

    # torch >= 2.13 refuses a Subset that overrides __getitem__ alone.
    subset = classification.FromDatasetPipe.TaskDataset
    subset.__getitems__ = lambda self, indices: [self[i] for i in indices]

    class Given(flgo.benchmark.partition.BasicPartitioner):
        num_clients = w1.CLIENTS

        def __call__(self, data: Any) -> list[list[int]]:
            return w1.partition()

    class Ticks(flgo.simulator.DefaultSimulator):
        """A duration drawn for each piece of work; its own modes draw one for each client."""

        def update_client_responsiveness(self, client_ids: list[Any], *args: Any, **kwargs: Any) -> None:
            if law == "near-constant":
                mu = np.log(MEAN_S) - NEAR_CONSTANT_SIGMA**2 / 2
                drawn = np.random.lognormal(mu, NEAR_CONSTANT_SIGMA, len(client_ids))
            else:
                drawn = np.random.exponential(MEAN_S, len(client_ids))
            self.set_variable(client_ids, "latency", [max(1, round(d)) for d in drawn])

    algorithm = fedbuff if asynchronous else fedavg
    counts = SimpleNamespace(steps=0, updates=0)

    class Server(algorithm.Server):
        def iterate(self) -> Any:
            updated = super().iterate()
            counts.updates += len(self.received_clients)
            if updated is not False:
                counts.steps += 1
                if counts.steps == 1:
                    counts.updates = 0
                    mark("start")
            return updated

    Path("config_source.py").write_text(CONFIG)
    flgo.gen_benchmark_from_file("digits", "config_source.py", target_path=".")
    importlib.import_module("digits").visualize = lambda *arguments: None  # it draws the split for minutes
    flgo.gen_task({"benchmark": {"name": "digits"}, "partitioner": Given()}, task_path="task")
    settings = {
        "num_rounds": ROUNDS + 1,  # the first belongs to the start-up
        "num_steps": STEPS,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "proportion": COHORT / w1.CLIENTS,
        "sample": "uniform",
        "train_holdout": 0.0,
        "eval_interval": -1,
        "no_log_console": True,
        "no_tqdm": True,
        "log_level": "ERROR",
        "torch_num_threads": 1,
    }
    chosen = SimpleNamespace(Server=Server, Client=algorithm.Client, __name__=algorithm.__name__)
    runner = flgo.init(
        "task", chosen, option=settings, Simulator=Ticks if asynchronous else flgo.simulator.DefaultSimulator
    )
    runner.run()
    mark("end", updates=counts.updates)
    found = w1.module()
    found.load_state_dict(dict(zip(found.state_dict(), runner.model.state_dict().values(), strict=True)))
    mark("result", **w1.outcome(found))


if __name__ == "__main__":
    main()
