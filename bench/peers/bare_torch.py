"""The floor of W1: FedAvg as a plain serial loop, no framework and no clock."""

from __future__ import annotations

import torch
import w1
from protocol import CLIENTS, COHORT, ROUNDS, UPDATES, mark


def fedavg(rounds: int) -> torch.nn.Module:
    net, rng = w1.module(), torch.Generator().manual_seed(1)
    for _ in range(rounds):
        base = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in base.items()}
        for index in torch.randperm(CLIENTS, generator=rng)[:COHORT].tolist():
            net.load_state_dict(base)
            w1.train(net, index)
            for name, tensor in net.state_dict().items():
                total[name] += tensor
        net.load_state_dict({name: tensor / COHORT for name, tensor in total.items()})
    return net


if __name__ == "__main__":
    fedavg(1)
    mark("start")
    final = fedavg(ROUNDS)
    mark("end", updates=UPDATES)
    mark("result", **w1.outcome(final))
