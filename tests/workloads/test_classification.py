"""A user's own arrays and module as a workload."""

import copy
import pickle
from functools import partial
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedasync.aggregation.model import Model
from fedasync.workloads import Classification, Task, Workload


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(4, 3, dtype=dtype)


def arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 4)), rng.integers(0, 3, count)


def workload(**changed: Any) -> Classification:
    features, labels = arrays(30)
    given: dict[str, Any] = {
        "features": features,
        "labels": labels,
        "test_features": features[:7],
        "test_labels": labels[:7],
        "partition": [np.arange(0, 5), np.arange(5, 30)],
        "module": linear,
    }
    return Classification(**(given | changed))


def test_it_is_a_workload() -> None:
    subject: Workload = workload()
    assert list(subject.client_samples()) == [5, 25]
    assert subject.train(Task(1, subject.initial_model(0), 0)).samples == 25


def test_the_initial_model_is_that_of_manual_seed_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    model = workload().initial_model(12)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(12)
        expected = Model.from_tensors(linear().state_dict())
    assert torch.equal(model.values, expected.values)
    assert model.layout == expected.layout


def test_training_and_evaluation_leave_the_generator_alone() -> None:
    subject = workload()
    model = subject.initial_model(0)
    before = torch.get_rng_state()
    subject.train(Task(0, model, 0))
    subject.evaluate(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_metrics_of_a_model_without_an_opinion() -> None:
    subject = workload()
    model = subject.initial_model(0)
    model.values.zero_()
    metrics = subject.evaluate(model)
    assert metrics["loss"] == pytest.approx(log(3))
    assert metrics["accuracy"] == pytest.approx(float(np.mean(arrays(30)[1][:7] == 0)))


def test_a_test_set_of_many_batches_is_averaged_over_samples() -> None:
    features, labels = arrays(2500)
    subject = workload(test_features=features, test_labels=labels)
    model = subject.initial_model(3)
    logits = nn.functional.linear(torch.tensor(features, dtype=torch.float32), *model.tensors().values())
    metrics = subject.evaluate(model)
    targets = torch.from_numpy(labels)
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert metrics["accuracy"] == (logits.argmax(1) == targets).double().mean().item()


def test_features_follow_the_dtype_of_the_module() -> None:
    subject = workload(module=partial(linear, torch.float64))
    model = subject.initial_model(0)
    assert subject.train(Task(0, model, 0)).values.dtype == torch.float64


def test_integer_features_are_token_ids() -> None:
    tokens = np.arange(30, dtype=np.int32)[:, None] % 6
    subject = workload(
        features=tokens,
        test_features=tokens[:7],
        module=lambda: nn.Sequential(nn.Embedding(6, 3), nn.Flatten()),
    )
    assert subject.train(Task(1, subject.initial_model(0), 0)).samples == 25


def test_a_copy_trains_alike_and_apart() -> None:
    subject = workload()
    model = subject.initial_model(0)
    expected = subject.train(Task(0, model, 9))
    for other in (pickle.loads(pickle.dumps(subject)), copy.deepcopy(subject)):
        assert torch.equal(other.train(Task(0, model, 9)).values, expected.values)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": np.zeros(29, dtype=int)}, "features and labels must be as many, got 30 and 29"),
        ({"test_labels": np.zeros(8, dtype=int)}, "test_features and test_labels must be as many, got 7 and 8"),
        ({"labels": np.zeros(30)}, "labels must be integers ≥ 0, got float64"),
        ({"labels": np.arange(30) - 1}, "labels must be integers ≥ 0, got int64 with smallest -1"),
        (
            {"test_features": np.zeros((0, 4)), "test_labels": np.zeros(0, dtype=int)},
            r"test_labels must have shape \[N\]",
        ),
        ({"partition": []}, "partition must hold an index array for at least one client"),
        ({"partition": [np.arange(3), np.arange(0)]}, "client 1 has no samples"),
        ({"partition": [np.array([2, 30])]}, "client 0 has rows 2 to 30; rows of features are 0 to 29"),
        ({"partition": [np.array([-1, 3])]}, "client 0 has rows -1 to 3"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        workload(**changed)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("client", [-1, 2])
def test_an_unknown_client_is_refused(client: int) -> None:
    subject = workload()
    with pytest.raises(ValueError, match=f"client must be between 0 and 1, got {client}"):
        subject.train(Task(client, subject.initial_model(0), 0))
