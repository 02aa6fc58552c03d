"""APPFL's virtual-time drivers with its own schedulers and aggregators, and a plain torch trainer.

``appfl.algorithm`` imports the whole package's dependencies; only its sub-modules are loaded here. Agents are thin:
what the drivers call, and nothing else. Durations are drawn for each piece of work by a ``ClientProfile`` of our own.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import types
from pathlib import Path
from typing import Any

from protocol import CLIENTS, COHORT, LAWS, MEAN_S, NEAR_CONSTANT_SIGMA, ROUNDS, UPDATES, mark


def _without_init(package: str) -> None:
    """Let sub-modules of a package be imported without running its ``__init__``."""
    root = Path(importlib.util.find_spec("appfl").origin).parent
    stub = types.ModuleType(package)
    stub.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
    sys.modules[package] = stub


for name in ("appfl.algorithm", "appfl.logger", "appfl.misc", "appfl.privacy"):
    _without_init(name)

from appfl import vsim  # noqa: E402


class Silent:
    """A logger that keeps nothing: the drivers print a table row an event."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None

    def log_content(self, contents: Any) -> None:
        pass


class Drawn(vsim.ClientProfile):
    """A duration drawn for each piece of work; the network takes no time."""

    law = LAWS[0]
    rng = random.Random(0)

    def compute_time(self, compute_second_per_step: float, num_steps: int, **kwargs: Any) -> float:
        if self.law == "near-constant":
            return MEAN_S * self.rng.lognormvariate(-(NEAR_CONSTANT_SIGMA**2) / 2, NEAR_CONSTANT_SIGMA)
        return self.rng.expovariate(1 / MEAN_S)


def profiles(count: int) -> dict[str, Drawn]:
    return {str(index): Drawn(bandwidth=0.0) for index in range(count)}


class Server:
    """What the drivers ask of a ServerAgent, around a real scheduler and aggregator."""

    def __init__(self, scheduler: Any, updates: int) -> None:
        self.scheduler = scheduler
        self._left = updates

    def get_parameters(self, **keywords: Any) -> Any:
        return self.scheduler.get_parameters(**keywords)

    def global_update(self, client_id: str, local_model: Any, blocking: bool = False, **meta: Any) -> Any:
        result = self.scheduler.schedule(client_id, local_model, **meta)
        self._left -= 1
        return result.result() if blocking and hasattr(result, "result") else result

    def training_finished(self) -> bool:
        return self._left <= 0


def learn(asynchronous: bool) -> None:
    import w1
    from appfl.algorithm.aggregator.fedavg_aggregator import FedAvgAggregator
    from omegaconf import DictConfig

    class Client:
        def __init__(self, index: int) -> None:
            self.index, self.net = index, w1.module()

        def get_id(self) -> str:
            return str(self.index)

        def load_parameters(self, state: Any) -> None:
            self.net.load_state_dict(state)

        def train(self) -> None:
            w1.train(self.net, self.index)

        def get_parameters(self) -> tuple[Any, dict[str, Any]]:
            return {name: tensor.clone() for name, tensor in self.net.state_dict().items()}, {"current_local_steps": 6}

    def run(updates: int) -> Any:
        net, clients = w1.module(), [Client(index) for index in range(CLIENTS)]
        common = {"optimize_memory": False, "client_weights_mode": "equal"}
        if asynchronous:
            from appfl.algorithm.aggregator.fedbuff_aggregator import FedBuffAggregator
            from appfl.algorithm.scheduler.async_scheduler import AsyncScheduler

            # num_clients is only the divisor of its step here: K, as in FedBuff's mean.
            buffer = {"K": COHORT, "num_clients": COHORT, "alpha": 1.0}
            decay = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}
            aggregator = FedBuffAggregator(net, DictConfig({**common, **buffer, **decay}), None)
            server = Server(AsyncScheduler(DictConfig({"optimize_memory": False}), aggregator, None), updates)
            vsim.AsyncSimDriver(server, clients, profiles(CLIENTS), COHORT, Silent(), base_step_time=1.0).run()
        else:
            from appfl.algorithm.scheduler.sync_scheduler import SyncScheduler

            aggregator = FedAvgAggregator(net, DictConfig(common), None)
            settings = DictConfig({"num_clients": COHORT, "optimize_memory": False})
            server = Server(SyncScheduler(settings, aggregator, None), updates)
            rounds = updates // COHORT
            vsim.SyncSimDriver(
                server, clients, profiles(CLIENTS), COHORT, Silent(), base_step_time=1.0, target_rounds=rounds
            ).run()
        return net

    run(COHORT)
    mark("start")
    net = run(ROUNDS * COHORT)
    mark("end", updates=UPDATES)
    mark("result", **w1.outcome(net))


def time_only(clients: int, in_flight: int, completions: int) -> None:
    """Dummy agents: the driver alone."""

    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        def get_id(self) -> str:
            return self.name

        def load_parameters(self, state: Any) -> None:
            pass

        def train(self) -> None:
            pass

        def get_parameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
            return {}, {"current_local_steps": 1}

    class Versions:
        """The scheduler of a server that only counts."""

        version = 0

        def get_parameters(self, **keywords: Any) -> dict[str, Any]:
            return {}

        def schedule(self, client_id: str, local_model: Any, **meta: Any) -> dict[str, Any]:
            self.version += 1
            return {}

        def get_num_global_epochs(self) -> int:
            return self.version

    def run(updates: int) -> None:
        agents = [Client(str(index)) for index in range(clients)]
        server = Server(Versions(), updates)
        vsim.AsyncSimDriver(server, agents, profiles(clients), in_flight, Silent(), base_step_time=1.0).run()

    run(COHORT)
    mark("start")
    run(completions)
    mark("end", updates=completions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["W1-sync", "W1-async", "W2"])
    parser.add_argument("--law", choices=LAWS, default=LAWS[0])
    parser.add_argument("--completions", type=int, default=10_000)
    options = parser.parse_args()
    Drawn.law = "exponential" if options.workload == "W2" else options.law
    if options.workload == "W2":
        time_only(10_000, 1_000, options.completions)
    else:
        learn(options.workload == "W1-async")
