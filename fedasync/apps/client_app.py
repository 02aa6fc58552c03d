"""The client's entry point: one that Flower starts anew for each message, so nothing is imported that is not needed."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedasync.federated.one_thread import one_thread
from fedasync.flower.client import answered, client_number, handle_hello, handle_train
from fedasync.workloads.protocol import Workload

WHERE = "run configuration"

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do a task's local work on this node's data."""
    started_s = time.monotonic()

    def work() -> Message:
        from fedasync.flower.settings import DeploymentSettings
        from fedasync.studies.errors import parse
        from fedasync.workloads.accelerated import through_accelerate

        config = _configuration(context)
        workload = _workload(config)
        client = client_number(context, len(workload.client_samples()))
        settings = parse(DeploymentSettings, config.get("deployment", {}), f"{WHERE}: deployment")
        return handle_train(
            message,
            context,
            through_accelerate(workload, settings.mixed_precision, settings.gradient_accumulation_steps),
            client=client,
            least_work_s=settings.least_work_s(client),
            most_steps=_most_steps(config),
            started_s=started_s,
        )

    with one_thread():  # as in a simulation: the same task gives the same bits
        return answered(message, context, work)


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Say which client this node is."""

    def work() -> Message:
        workload = _workload(_configuration(context))
        return handle_hello(message, context, workload, client=client_number(context, len(workload.client_samples())))

    return answered(message, context, work)


def _configuration(context: Context) -> dict[str, Any]:
    from fedasync.flower.configuration import unflatten, without_ours

    return without_ours(unflatten(context.run_config))


def _workload(config: dict[str, Any]) -> Workload:
    """Raises StudyError."""
    from fedasync.studies.build import build_workload
    from fedasync.studies.errors import StudyError

    make = build_workload(config, WHERE)
    if make is None:
        raise StudyError(f"{WHERE}: the table [workload] is missing; a deployment's clients train")
    return make()


def _most_steps(config: dict[str, Any]) -> int:
    """The longest task of a strategy that counts local steps."""
    from fedasync.core import Compass

    return int(config.get("strategy", {}).get("most_steps", Compass(limit=1).most_steps))
