"""Folders of Hugging Face datasets, dealt by Flower's partitioners: real data sets, written to disk here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedasync as fa
from fedasync.studies.build import build
from fedasync.workloads import DatasetFolder, FlowerPartitioner, LocalTraining, Task

datasets = pytest.importorskip("datasets")
pytest.importorskip("flwr_datasets")
# They warn of what the tests ask for: rows that are left out, draws that are made again.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

WORDS = {"north": "snow ice frost ", "south": "sun sand palm ", "west": "rain wind cloud "}
NATURAL = FlowerPartitioner("NaturalIdPartitioner", {"partition_by": "writer"})
LOCAL = LocalTraining(batch_size=8, learning_rate=0.3)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the hub would fail at once."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def rows(count: int, first: int) -> dict[str, Any]:
    """``number`` says which sample it is; everything else depends on the class."""
    from PIL import Image

    rng = np.random.default_rng(first)
    classes = rng.integers(0, 3, count)
    pixels = rng.integers(0, 80, (count, 8, 6, 3), dtype=np.uint8)
    for image, label in zip(pixels, classes, strict=True):
        image[2 * label : 2 * label + 2] += 150
    texts = ["".join(rng.permutation(WORDS[list(WORDS)[c]].split())) for c in classes]
    return {
        "picture": [Image.fromarray(each) for each in pixels],
        "grey": [Image.fromarray(each[..., 0]) for each in pixels],
        "text": texts,
        "number": [float(i) for i in range(first, first + count)],
        "signal": (rng.normal(size=(count, 4)) + classes[:, None]).tolist(),
        "label": classes.tolist(),
        "wind": [list(WORDS)[c] for c in classes],
        "writer": [f"w{i}" for i in rng.choice(5, count, p=[0.4, 0.3, 0.15, 0.1, 0.05])],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf") / "winds"
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "grey": datasets.Image(),
            "text": datasets.Value("string"),
            "number": datasets.Value("float32"),
            "signal": datasets.List(datasets.Value("float32")),
            "label": datasets.ClassLabel(names=list(WORDS)),
            "wind": datasets.Value("string"),
            "writer": datasets.Value("string"),
        }
    )
    parts = {"train": rows(120, 0), "validation": rows(30, 1000)}
    made = {name: datasets.Dataset.from_dict(each, features) for name, each in parts.items()}
    datasets.DatasetDict(made).save_to_disk(str(path))
    made["train"].save_to_disk(str(path.parent / "one"))
    return str(path)


def made(folder: str, **changed: Any) -> DatasetFolder:
    keys = {"features": ("number",), "label": "label", "partitioner": NATURAL, "test_split": "validation"}
    return DatasetFolder(folder, **{**keys, "local": LOCAL, **changed})


def held(workload: DatasetFolder) -> list[set[bytes]]:
    return [{workload._train[0][row].tobytes() for row in rows} for rows in workload._partition]


def test_natural_ids_are_clients_of_unequal_sizes(folder: str) -> None:
    workload = made(folder)
    writers = datasets.load_from_disk(folder)["train"]["writer"][:]
    counts = sorted(writers.count(writer) for writer in set(writers))
    assert sorted(workload.client_samples()) == counts
    assert len(set(counts)) > 1
    for mine in workload._partition:
        assert len({writers[row] for row in mine}) == 1


@pytest.mark.parametrize(
    ("name", "parameters", "all_rows"),
    [
        ("IidPartitioner", {"num_partitions": 6}, True),
        ("NaturalIdPartitioner", {"partition_by": "writer"}, True),
        (
            "DirichletPartitioner",
            {"num_partitions": 4, "partition_by": "label", "alpha": 0.5, "min_partition_size": 2},
            True,
        ),
        ("ShardPartitioner", {"num_partitions": 4, "partition_by": "label", "num_shards_per_partition": 2}, True),
        (
            "PathologicalPartitioner",
            {"num_partitions": 4, "partition_by": "wind", "num_classes_per_partition": 2},
            False,
        ),
        ("SizePartitioner", {"partition_sizes": [10, 20, 30]}, False),
        ("LinearPartitioner", {"num_partitions": 4}, True),
    ],
)
def test_every_partitioner_gives_each_row_to_one_client_at_most_and_none_of_the_test(
    folder: str, name: str, parameters: dict[str, Any], all_rows: bool
) -> None:
    workload, again = (made(folder, partitioner=FlowerPartitioner(name, parameters), seed=3) for _ in range(2))
    clients, tested = held(workload), {row.tobytes() for row in workload._test[0]}
    assert sum(map(len, clients)) == len(set().union(*clients)) == sum(workload.client_samples())
    assert (sum(map(len, clients)) == 120) or not all_rows
    assert not tested & set().union(*clients)
    assert len(tested) == 30
    assert held(again) == clients


def test_the_seed_is_the_partitioners_unless_its_parameters_set_one(folder: str) -> None:
    def of(workload_seed: int, **more: Any) -> list[set[bytes]]:
        parameters = {"num_partitions": 3, "partition_by": "label", "alpha": 0.5, "min_partition_size": 1, **more}
        return held(made(folder, partitioner=FlowerPartitioner("DirichletPartitioner", parameters), seed=workload_seed))

    assert of(1) == of(1) != of(2)
    assert of(1, seed=7) == of(2, seed=7)


def test_a_data_set_without_splits_keeps_a_share_for_the_test(folder: str) -> None:
    one = made(str(Path(folder).parent / "one"), test_share=0.25)
    assert (sum(one.client_samples()), len(one._test[1])) == (90, 30)
    assert not {row.tobytes() for row in one._test[0]} & set().union(*held(one))
    split = made(folder, test_split=None, test_share=0.25, seed=9)
    assert split._test[0].tobytes() == one._test[0].tobytes()


def test_limits_take_the_same_rows_whatever_the_seed(folder: str) -> None:
    one, other = (made(folder, train_samples=50, test_samples=10, seed=seed) for seed in (1, 2))
    assert (sum(one.client_samples()), len(one._test[1])) == (50, 10)
    assert one._train[0] is other._train[0]  # and they are read once


def test_each_kind_of_column_is_converted_as_it_should_be(folder: str) -> None:
    train = datasets.load_from_disk(folder)["train"]
    picture = made(folder, features=("picture",))._train[0]
    assert picture.shape == (120, 3 * 8 * 6)
    first = np.asarray(train[0]["picture"])
    assert np.allclose(picture[0].reshape(3, 8, 6), first.transpose(2, 0, 1) / 255)
    assert made(folder, features=("grey",))._train[0].shape == (120, 48)
    text = made(folder, features=("text",), sequence_length=30)._train[0]
    assert bytes(int(i) - 1 for i in text[0] if i).decode() == train[0]["text"]
    assert text[0, 0] == 0 != text[0, -1]  # filled up at the front
    short = made(folder, features=("text",), sequence_length=4)._train[0]
    assert bytes(int(i) - 1 for i in short[0]).decode() == train[0]["text"][-4:]
    numbers = made(folder, features=("number", "signal"))._train[0]
    assert numbers.shape == (120, 5)
    assert np.allclose(numbers.mean(0), 0, atol=1e-5)
    assert np.allclose(numbers.std(0), 1, atol=1e-5)


def test_labels_may_be_texts(folder: str) -> None:
    by_class, by_text = made(folder), made(folder, label="wind")
    assert np.array_equal(by_class._train[1], by_text._train[1])  # the names of the classes stand in their order


@pytest.mark.parametrize(
    ("features", "model"),
    [
        (("picture",), "mlp"),
        (("picture",), "cnn"),
        (("text",), "gru"),
        (("text",), "transformer"),
        (("signal", "number"), "linear"),
    ],
)
def test_a_batch_is_what_the_tasks_bring_alone(folder: str, features: tuple[str, ...], model: Any) -> None:
    workload = made(folder, features=features, model=model, sequence_length=10, hidden=8)
    assert workload.not_batched is None
    start = workload.initial_model(0)
    tasks = [Task(client, start, seed=client) for client in range(3)]
    for task, found in zip(tasks, workload.train_batch([(workload, task) for task in tasks], 2**28), strict=True):
        torch.testing.assert_close(found.values, workload.train(task).values, rtol=1e-4, atol=1e-5)


def test_a_study_file_builds_it_and_fedbuff_learns(folder: str) -> None:
    config = {
        "seed": 4,
        "run": {"time_s": 30.0, "evaluate_every_s": 10.0},
        "population": {"duration_s": {"kind": "exponential", "mean": 1.0}},
        "strategy": {"name": "fedbuff", "concurrency": 3, "buffer_size": 2},
        "workload": {
            "kind": "hf_datasets",
            "path": folder,
            "features": ["picture"],
            "label": "label",
            "test_split": "validation",
            "partitioner": {
                "name": "DirichletPartitioner",
                "parameters": {"num_partitions": 6, "partition_by": "label", "alpha": 0.5, "min_partition_size": 3},
            },
            "local": {"learning_rate": 0.3},
        },
    }
    parts = build(config, "study")
    assert parts.workload is not None
    run = fa.simulate(parts.strategy, parts.population, parts.workload(), time_s=30.0, evaluate_every_s=10.0)
    assert run.metrics.filter(name="accuracy")["value"][-1] > 0.9


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train_split": "training"}, "train_split: .* has no split 'training'; it has train, validation"),
        ({"test_split": "test"}, "test_split: .* has no split 'test'; it has train, validation"),
        ({"label": "class"}, "has no column 'class'; it has picture, grey, text, number"),
        ({"features": ()}, "features must name at least one column"),
        (
            {"features": ("picture", "number")},
            r"an image or a text stands alone; got picture \(image\), number \(vector\)",
        ),
        ({"features": ("label",)}, "column 'label' is ClassLabel.*images, texts, numbers"),
        (
            {"features": ("picture",), "model": "gru"},
            "model must be 'mlp' or 'cnn' for features of kind image, got 'gru'",
        ),
        ({"test_share": 0.0}, "test_share must be a finite number > 0 and < 1, got 0.0"),
        ({"train_samples": 121}, "train_samples must be at most 120, the number of samples, got 121"),
        ({"hidden": 0}, "hidden must be an integer ≥ 1, got 0"),
        ({"label": "number"}, "label 'number': 10.. stands in the test samples only".replace("10..", r"10\d\d\.0")),
    ],
)
def test_what_cannot_be_used_is_named(folder: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as info:
        made(folder, **changed)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("Dirichlet", {}, "name must be one of ContinuousPartitioner, DirichletPartitioner, .* got 'Dirichlet'"),
        ("VerticalEvenPartitioner", {"num_partitions": 2}, "name must be one of"),
        ("IidPartitioner", {}, "IidPartitioner: TypeError: .*num_partitions"),
        ("IidPartitioner", {"num_partitions": 0}, "IidPartitioner: ValueError: "),
        ("NaturalIdPartitioner", {"partition_by": "author"}, "NaturalIdPartitioner: .*author"),
        (
            "DirichletPartitioner",
            {"num_partitions": 100, "partition_by": "label", "alpha": 0.5},
            "DirichletPartitioner: ",
        ),
    ],
)
def test_a_partitioner_that_cannot_be_used_is_named(
    folder: str, name: str, parameters: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as info:
        made(folder, partitioner=FlowerPartitioner(name, parameters))
    assert "\n" not in str(info.value)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder that save_to_disk of datasets wrote"):
        made(str(tmp_path))


def test_columns_of_unequal_length_or_shape_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    images = [Image.new("L", (4, 4)), Image.new("L", (5, 4))] * 5
    data = {"ragged": [[1.0], [1.0, 2.0]] * 5, "image": images, "hole": [1.0, None] * 5, "label": [0, 1] * 5}
    made_here = datasets.Dataset.from_dict(data).cast_column("image", datasets.Image())
    made_here.save_to_disk(str(tmp_path / "bad"))
    partitioner = FlowerPartitioner("IidPartitioner", {"num_partitions": 2})
    for column, said in (
        ("ragged", "column 'ragged' is .*of one length"),
        ("image", r"column 'image': row \d is uint8 of shape \[4, .\]; \[4, .\] as before would do"),
        ("hole", r"column 'hole' has missing or infinite numbers in \d places"),
    ):
        with pytest.raises(ValueError, match=said) as info:
            made(str(tmp_path / "bad"), features=(column,), partitioner=partitioner)
        assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("torch", r"needs torch .*pip install 'fedasync\[torch\]'"),
        ("datasets", r"needs datasets .*pip install 'fedasync\[data\]'"),
        ("flwr_datasets", r"needs flwr-datasets .*pip install 'fedasync\[data\]'"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(
    folder: str, missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedasync.workloads.hf_datasets import _read

    _read.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=said) as info:
        made(folder)
    assert "\n" not in str(info.value)
