"""The digits: a real problem that federated averaging solves."""

import subprocess
import sys
from typing import Any, Literal, get_type_hints

import pytest
import torch

from fedasync.aggregation.model import Model
from fedasync.workloads import (
    Classification,
    Digits,
    Dirichlet,
    Iid,
    LabelShards,
    LocalTraining,
    Partition,
    Quadratic,
    Task,
    Workload,
)


def federated_averaging(workload: Workload, rounds: int) -> dict[str, float]:
    """Every client in every round, weighted by its samples."""
    model = workload.initial_model(0)
    counts = workload.client_samples()
    for r in range(rounds):
        mean = torch.zeros_like(model.values)
        for client, count in enumerate(counts):
            result = workload.train(Task(client, model, seed=r * len(counts) + client))
            mean += result.values * (count / sum(counts))
        model = Model(mean, model.layout)
    return workload.evaluate(model)


@pytest.mark.parametrize(
    ("model", "partition", "rounds"),
    [("mlp", Iid(), 6), ("mlp", Dirichlet(0.5), 6), ("cnn", Iid(), 4)],
)
def test_federated_averaging_learns_the_digits(model: Literal["mlp", "cnn"], partition: Partition, rounds: int) -> None:
    workload = Digits(10, partition, model, local=LocalTraining(epochs=2, learning_rate=0.2))
    start = workload.evaluate(workload.initial_model(0))
    end = federated_averaging(workload, rounds=rounds)
    assert start["accuracy"] < 0.4
    assert end["accuracy"] > 0.9
    assert end["loss"] < start["loss"] / 2


def test_sizes_are_those_of_the_data_set() -> None:
    workload = Digits()
    assert len(workload.client_samples()) == 50
    assert sum(workload.client_samples()) == 1500
    assert workload.initial_model(0).layout.parameters == 64 * 32 + 32 + 32 * 10 + 10
    assert Digits(model="cnn").initial_model(0).layout.parameters == 9930
    assert Digits(hidden=7).initial_model(0).layout.parameters == 64 * 7 + 7 + 7 * 10 + 10


def test_the_seed_deals_the_samples_and_the_test_set_stays() -> None:
    one, same, other = Digits(seed=1), Digits(seed=1), Digits(seed=2)
    assert one.client_samples() == same.client_samples() != other.client_samples()
    model = one.initial_model(0)
    assert one.evaluate(model) == other.evaluate(model)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clients": 0}, "Digits: clients must be an integer ≥ 1, got 0"),
        ({"clients": 1501, "partition": Iid()}, "clients must be at most the number of samples, 1500"),
        ({"clients": 800, "partition": LabelShards()}, "need 1600 shards and there are 1500 samples"),
        ({"clients": 900}, r"none of 1000 draws with alpha=0\.5 over 900 clients"),
        ({"hidden": 0}, "Digits: hidden must be an integer ≥ 1, got 0"),
        ({"model": "rnn"}, "Digits: model must be 'mlp' or 'cnn', got 'rnn'"),
        ({"seed": -1}, "Digits: seed must be an integer ≥ 0, got -1"),
    ],
)
def test_parameters_out_of_range_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        Digits(**parameters)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("missing", ["torch", "sklearn"])
def test_what_is_missing_is_named_with_the_remedy(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'fedasync\[torch\]'") as info:
        Digits()
    assert "\n" not in str(info.value)


def test_importing_the_workloads_and_reading_their_signatures_needs_no_torch() -> None:
    program = (
        "import sys, typing, fedasync.workloads as w\n"
        "for c in (w.Digits, w.Quadratic, w.Classification): typing.get_type_hints(c.__init__)\n"
        "w.Quadratic(3), w.LocalTraining(), w.Dirichlet(0.5)\n"
        "heavy = {'torch', 'sklearn', 'scipy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_signatures_resolve_at_runtime() -> None:
    assert get_type_hints(Digits.__init__)["partition"] == Partition
    assert get_type_hints(Quadratic.__init__)["centres"] == tuple[float, ...] | None
    assert get_type_hints(Classification.__init__)["local"] is LocalTraining
