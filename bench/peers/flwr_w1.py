"""Flower: FedAvg on its simulation engine (ray), which runs in wall-clock time."""

from __future__ import annotations

import os

import torch
import w1
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from protocol import CLIENTS, COHORT, ROUNDS, UPDATES, mark

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    net = w1.module()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    index = int(context.node_config["partition-id"])
    torch.seed()  # the shuffling of batches; module() has set a seed
    w1.train(net, index)
    metrics = MetricRecord({"num-examples": len(w1.client(index)[0])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class Marked(FedAvg):
    """FedAvg that says when the first round is over."""

    def aggregate_train(self, server_round: int, replies: object) -> object:
        replies = list(replies)
        if failures := [reply for reply in replies if reply.has_error()]:
            raise RuntimeError(f"{len(failures)} clients failed, the first with {failures[0].error}")
        found = super().aggregate_train(server_round, replies)
        if server_round == 1:
            mark("start")
        return found


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    net = w1.module()
    strategy = Marked(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    arrays = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=ROUNDS + 1
    ).arrays  # the first round belongs to the start-up
    mark("end", updates=UPDATES)
    net.load_state_dict(arrays.to_torch_state_dict())
    mark("result", **w1.outcome(net))


if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server_app, client_app, CLIENTS, backend_config=resources)
