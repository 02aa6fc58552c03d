"""A client's reply is its workload's, to the bit; what goes wrong comes with its place; who a node is, it must know."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict

import fedasync.apps.client_app
import fedasync.flower.client
import fedasync.workloads.accelerated
from fedasync.aggregation.model import Contribution
from fedasync.apps.client_app import app
from fedasync.core import Lease
from fedasync.flower.client import client_number, handle_hello, handle_train
from fedasync.flower.messages import ClientFailure, Reply, read_hello, read_reply, task_record
from fedasync.workloads import Digits, LocalTraining, Quadratic, Task, Workload

Node = Callable[..., Context]
CLIENT = 2
LEASE = Lease(7, CLIENT, 5, 0.0)
HERE = Path(__file__).parent


def task_of(workload: Workload, **more: Any) -> Task:
    return Task(CLIENT, workload.initial_model(1), 11, **more)


def asked(content: RecordDict, kind: str = MessageType.TRAIN) -> Message:
    return Message(content, dst_node_id=1, message_type=kind)


def read(workload: Workload, reply: Message) -> Reply:
    model = workload.initial_model(1)
    return read_reply(reply.content, LEASE, model.layout, model.values.dtype, workload.client_samples()[CLIENT])


def failure(reply: Message) -> ClientFailure:
    found = read(Quadratic(4), reply).contribution
    assert isinstance(found, ClientFailure)
    return found


@pytest.fixture(scope="module")
def own() -> Iterator[ModuleType]:
    """The user's module, known by its dotted name."""
    spec = spec_from_file_location("own_flower_workload", HERE / "own_workload.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        yield module


@pytest.mark.parametrize(
    "workload",
    [
        Quadratic(4, dimensions=3, drift=0.1),
        Quadratic(4, dimensions=3, dtype="float32"),
        Digits(clients=4, local=LocalTraining(epochs=1)),
    ],
)
@pytest.mark.parametrize("more", [{}, {"proximal_mu": 0.3, "steps": 2}, {"control": True}])
def test_the_reply_is_what_the_workload_brings_to_the_bit(
    workload: Workload, more: dict[str, Any], node: Node, over_the_wire: Callable[[RecordDict], RecordDict]
) -> None:
    if "control" in more:
        more = {"control": torch.full_like(workload.initial_model(1).values, 0.01)}
    task = task_of(workload, **more)
    message = asked(over_the_wire(task_record(task, LEASE)))
    reply = handle_train(message, node({}), workload, client=CLIENT)
    reply = Message(over_the_wire(reply.content), reply_to=message)
    found, expected = read(workload, reply), workload.train(task)
    assert isinstance(found.contribution, Contribution)
    assert found.contribution.values.numpy().tobytes() == expected.values.numpy().tobytes()
    assert found.contribution.integers is expected.integers is None
    assert found.contribution.samples == expected.samples
    assert found.contribution.step_size_sum == expected.step_size_sum
    assert 0 <= found.measured["train_s"] <= found.measured["wall_s"]


@pytest.mark.parametrize(("steps", "share"), [(None, 1.0), (25, 0.25)])
def test_a_client_that_is_to_be_slow_sleeps_for_the_rest(
    steps: int | None, share: float, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    class Busy(Quadratic):
        def train(self, task: Task) -> Contribution:
            clock.now += 1.5
            return super().train(task)

    monkeypatch.setattr(fedasync.flower.client, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    workload = Busy(4)
    content = task_record(task_of(workload, steps=steps), LEASE)
    for least_work_s, lasts_s in ((8.0, 8.0 * share), (1.0, 1.5 + 2.0)):
        reply = handle_train(
            asked(content),
            node({}),
            workload,
            client=CLIENT,
            least_work_s=least_work_s,
            most_steps=100,
            started_s=clock.now - 2.0 if least_work_s == 1.0 else None,
        )
        assert read(workload, reply).measured == {"train_s": 1.5, "wall_s": pytest.approx(lasts_s)}


@pytest.mark.parametrize(
    ("way", "raised", "text", "source"),
    [
        ("exit", "SystemExit", "the data is gone", "sys.exit"),
        ("library", "JSONDecodeError", "Expecting value", "json.loads"),
        ("torch", "RuntimeError", "", "torch.nn.Linear"),
    ],
)
def test_what_a_workload_raises_comes_with_the_line_of_the_users_own_code(
    way: str, raised: str, text: str, source: str, own: ModuleType, node: Node
) -> None:
    workload = own.Own(4, way)
    found = failure(handle_train(asked(task_record(task_of(workload), LEASE)), node({}), workload, client=CLIENT))
    lines = (HERE / "own_workload.py").read_text().splitlines()
    assert (found.client, found.type) == (CLIENT, raised)
    assert text in found.message
    assert found.file == str(HERE / "own_workload.py")
    assert source in lines[found.line - 1]
    assert raised in found.traceback


@pytest.mark.parametrize(("way", "said"), [("type", "train returned float"), ("list", "values: got list")])
def test_a_workload_that_brings_no_contribution_has_failed(way: str, said: str, own: ModuleType, node: Node) -> None:
    workload = own.Own(4, way)
    found = failure(handle_train(asked(task_record(task_of(workload), LEASE)), node({}), workload, client=CLIENT))
    assert found.type == "TypeError"
    assert said in found.message


def test_a_task_of_another_client_and_what_is_no_task_are_answered_with_an_error(node: Node) -> None:
    workload = Quadratic(4)
    content = task_record(task_of(workload), LEASE)
    found = failure(handle_train(asked(content), node({}), workload, client=1))
    assert "this node is client 1 and was sent a task of client 2" in found.message
    del content["model"]
    found = failure(handle_train(asked(content), node({}), workload, client=CLIENT))
    assert found.message.startswith("task: model: got nothing")


@pytest.mark.parametrize(
    ("node_config", "said"),
    [
        ({}, "partition-id is missing"),
        ({"partition-id": "2"}, "got '2'"),
        ({"partition-id": True}, "got True"),
        ({"partition-id": -1}, "got -1"),
        ({"partition-id": 4}, "got 4, the workload has 4 clients"),
    ],
)
def test_a_node_that_is_no_client_says_so_in_one_line(node_config: dict[str, Any], said: str, node: Node) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        client_number(node(node_config), 4)
    assert "an integer from 0 to 3 would do" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert client_number(node({"partition-id": 3}), 4) == 3


def test_a_hello_says_who_is_there(node: Node) -> None:
    workload = Quadratic(4, samples=(5, 6, 7, 8))
    hello = read_hello(handle_hello(asked(RecordDict(), MessageType.QUERY), node({}), workload, client=2).content)
    assert (hello.client, hello.samples) == (2, 7)
    assert f"torch {torch.__version__}" in hello.software


# The app, as Flower calls it

DIGITS = {"workload.kind": "digits", "workload.clients": 4, "workload.local.epochs": 1, "seed": 3, "out": "runs/x"}


def test_the_app_trains_what_the_run_configuration_says(node: Node) -> None:
    workload = Digits(clients=4, local=LocalTraining(epochs=1), seed=3)
    task, threads = task_of(workload), torch.get_num_threads()
    found = read(workload, app(asked(task_record(task, LEASE)), node({"partition-id": CLIENT}, DIGITS)))
    assert isinstance(found.contribution, Contribution)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)  # as ``simulate`` has it
    try:
        expected = workload.train(task)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found.contribution.values, expected.values)


def test_the_app_trains_in_the_precision_that_the_run_configuration_says(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = []

    def through_accelerate(workload: Workload, mixed_precision: str, gradient_accumulation_steps: int) -> Workload:
        asked_for.append((mixed_precision, gradient_accumulation_steps))
        return workload

    monkeypatch.setattr(fedasync.workloads.accelerated, "through_accelerate", through_accelerate)
    config = {**DIGITS, "deployment.mixed_precision": "bf16", "deployment.gradient_accumulation_steps": 2}
    workload = Digits(clients=4)
    found = read(workload, app(asked(task_record(task_of(workload), LEASE)), node({"partition-id": CLIENT}, config)))
    assert not isinstance(found.contribution, ClientFailure)
    assert asked_for == [("bf16", 2)]


def test_each_client_is_as_slow_as_the_run_configuration_says(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(fedasync.flower.client, "time", clock)
    monkeypatch.setattr(fedasync.apps.client_app, "time", clock)
    quadratic = {"workload.kind": "quadratic", "workload.clients": 4, "seed": 0}
    config = {**quadratic, "strategy.most_steps": 50, "deployment.work_s_by_client": "json:[0, 1, 4, 9]"}
    workload = Quadratic(4)
    message = asked(task_record(task_of(workload, steps=25), LEASE))
    found = read(workload, app(message, node({"partition-id": CLIENT}, config)))
    assert isinstance(found.contribution, Contribution)
    assert slept == [2.0]


def test_the_app_says_who_is_there(node: Node) -> None:
    reply = app(asked(RecordDict(), MessageType.QUERY), node({"partition-id": 1}, DIGITS))
    assert read_hello(reply.content).samples == Digits(clients=4, seed=3).client_samples()[1]


@pytest.mark.parametrize(
    ("node_config", "config", "said"),
    [
        ({"partition-id": 4}, DIGITS, "got 4, the workload has 4 clients"),
        ({}, DIGITS, "partition-id is missing"),
        ({"partition-id": 2}, {"seed": 0}, r"the table \[workload\] is missing"),
        ({"partition-id": 2}, {"workload.kind": "digits"}, "seed: this key is missing"),
        ({"partition-id": 2}, {**DIGITS, "workload.hiden": 3}, "did you mean 'hidden'"),
        ({"partition-id": 2}, {**DIGITS, "deployment.poll": 3}, "unknown key; did you mean 'poll_s'"),
        ({"partition-id": 2}, {"workload": 3, "seed": 0}, "workload: got 3; a table would do"),
    ],
)
def test_what_cannot_be_built_is_answered_with_one_line(
    node_config: dict[str, Any], config: dict[str, Any], said: str, node: Node
) -> None:
    context = node(node_config, config)
    message = asked(task_record(task_of(Quadratic(4)), LEASE))
    found = failure(app(message, context))
    assert found.client == CLIENT
    assert re.search(said, str(found))


def test_a_users_workload_that_cannot_be_built_is_answered_with_its_line(own: ModuleType, node: Node) -> None:
    config = {"workload.kind": "own_flower_workload.Own", "workload.clients": 4, "workload.way": "built", "seed": 0}
    found = failure(app(asked(task_record(task_of(Quadratic(4)), LEASE)), node({"partition-id": CLIENT}, config)))
    lines = (HERE / "own_workload.py").read_text().splitlines()
    assert "no data here" in found.message
    assert (found.file, "raise ValueError" in lines[found.line - 1]) == (str(HERE / "own_workload.py"), True)
    with pytest.raises(ValueError, match=r"client 2: StudyError: .*no data here"):
        read_hello(app(asked(RecordDict(), MessageType.QUERY), node({"partition-id": 2}, config)).content)
