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

from fedasync.aggregation.model import Contribution, Model
from fedasync.workloads import BatchedWorkload, Classification, LocalTraining, Task


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
    subject: BatchedWorkload = workload()
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


def test_a_batch_is_what_the_tasks_bring_alone_over_several_workloads() -> None:
    one, other = workload(), workload(partition=[np.arange(20), np.arange(20, 27), np.arange(27, 30)])
    assert one.not_batched is None
    assert one.batch_key == other.batch_key
    models = [one.initial_model(seed) for seed in range(3)]
    work = [(one, Task(0, models[0], 5)), (other, Task(2, models[1], 6)), (one, Task(1, models[2], 7, 0.1))]
    work += [(other, Task(client, models[client], 8 + client)) for client in range(3)]
    found = one.train_batch(work, 2**30)
    for (owner, task), each in zip(work, found, strict=True):
        assert each.samples == owner.client_samples()[task.client]
        torch.testing.assert_close(each.values, owner.train(task).values, rtol=1e-5, atol=1e-7)
        # Whoever is asked, and whatever is beside it.
        assert torch.equal(other.train_batch([(owner, task)], 0)[0].values, each.values)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))


def test_what_cannot_be_batched_trains_one_by_one() -> None:
    subject = workload(module=dropping)
    assert subject.batch_key is None
    assert subject.not_batched is not None
    assert "random" in subject.not_batched
    task = Task(1, subject.initial_model(0), 3)
    assert torch.equal(subject.train_batch([(subject, task)], 2**30)[0].values, subject.train(task).values)


def test_a_subclass_that_trains_in_its_own_way_is_not_bypassed() -> None:
    class Lazy(Classification):
        def train(self, task: Task) -> Contribution:
            return Contribution(task.model.values.clone(), "parameters", 1)

    features, labels = arrays(30)
    subject = Lazy(features, labels, features, labels, [np.arange(30)], linear)
    assert subject.not_batched == "Lazy trains in its own way"
    model = subject.initial_model(0)
    assert torch.equal(subject.train_batch([(subject, Task(0, model, 1))], 2**30)[0].values, model.values)


def test_the_key_tells_modules_and_settings_apart() -> None:
    def made(outputs: int) -> Classification:
        return workload(module=partial(nn.Linear, 4, outputs))

    key = made(3).batch_key
    assert key is not None
    assert key == made(3).batch_key
    hash(key)
    of_a_list = partial(lambda sizes: nn.Linear(*sizes), [4, 3])  # cannot be compared
    assert workload(module=of_a_list).batch_key != workload(module=of_a_list).batch_key
    others = [
        made(4),
        workload(),
        workload(local=LocalTraining(epochs=2)),
        workload(module=partial(linear, torch.float64)),
    ]
    assert len({key, *(each.batch_key for each in others)}) == 5
    with pytest.raises(ValueError, match="Classification has another batch_key than Classification"):
        made(3).train_batch([(made(4), Task(0, made(4).initial_model(0), 0))], 2**30)


def test_a_follower_shares_the_lanes_of_its_leader_where_they_fit() -> None:
    """Made in the same way but for the seed, which only the caller can know: each call makes a new function."""
    leader, follower, other = (workload(module=lambda: nn.Linear(4, 3)) for _ in range(3))
    assert leader.batch_key != follower.batch_key
    follower.follow(leader)
    assert leader.batch_key == follower.batch_key
    other.local = LocalTraining(epochs=3)
    other.follow(leader)
    assert other.batch_key != leader.batch_key
    task = Task(1, follower.initial_model(0), 3)
    together = leader.train_batch([(leader, task), (follower, task)], 2**30)
    assert torch.equal(together[0].values, together[1].values)


@pytest.mark.parametrize("client", [-1, 2])
def test_an_unknown_client_is_refused_in_a_batch(client: int) -> None:
    subject = workload()
    with pytest.raises(ValueError, match=f"client must be between 0 and 1, got {client}"):
        subject.train_batch([(subject, Task(client, subject.initial_model(0), 0))], 2**30)


def test_the_loss_of_training_is_cross_entropy() -> None:
    subject = workload()
    model = subject.initial_model(0)
    moved = subject.train(Task(0, model, 0)).values - model.values  # one batch of everything
    weight, bias = (t.clone().requires_grad_() for t in model.tensors().values())
    x = torch.tensor(subject._train[0][:5], dtype=torch.float32)
    y = torch.tensor(subject._train[1][:5])
    nn.functional.cross_entropy(nn.functional.linear(x, weight, bias), y).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert bias.grad is not None
    torch.testing.assert_close(moved, -0.1 * torch.cat([weight.grad.flatten(), bias.grad]))
