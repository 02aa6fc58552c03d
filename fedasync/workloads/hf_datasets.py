"""Any Hugging Face ``datasets`` folder on disk, dealt to clients by a partitioner of Flower Datasets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer, check_real
from fedasync.workloads.classification import Classification
from fedasync.workloads.columns import BYTES, Column, Kind, raw_column, read_column
from fedasync.workloads.modules import image_module, sequence_module, vector_module
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.samples import classes_of, need_torch, standardised, subset

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module

MODELS: dict[Kind, tuple[str, ...]] = {
    "image": ("mlp", "cnn"),
    "text": ("gru", "lstm", "transformer"),
    "vector": ("mlp", "linear"),
}
"""Kind of features → the models for it, the default first."""
EMBEDDING = 16
ROW = "row of the data set"


@dataclass(frozen=True, slots=True)
class FlowerPartitioner:
    """A class of ``flwr_datasets.partitioner`` by its ``name``, and the ``parameters`` that it is made with.

    A partitioner that takes a ``seed`` gets the workload's unless ``parameters`` set it.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)

    def split(self, dataset: Dataset, seed: int) -> list[NDArray[np.int64]]:
        """Rows of ``dataset`` for each client, ascending.

        Raises ValueError for a partitioner that there is not, or that refuses its parameters or the data set;
        ImportError without Flower Datasets.
        """
        flower = _flower()
        # Left out: those that split columns, one that takes a function, and the class above them all.
        known = [n for n in flower.__all__ if not n.startswith(("Vertical", "IdToSizeFnc")) and n != "Partitioner"]
        if self.name not in known:
            raise ValueError(f"FlowerPartitioner: name must be one of {', '.join(known)}, got {self.name!r}")
        make = getattr(flower, self.name)
        parameters = dict(self.parameters)
        if "seed" in inspect.signature(make).parameters:
            parameters.setdefault("seed", seed)
        try:
            partitioner = make(**parameters)
            partitioner.dataset = _with_rows(dataset, [p for p in parameters.values() if isinstance(p, str)])
            parts = [partitioner.load_partition(i)[ROW] for i in range(partitioner.num_partitions)]
        except (TypeError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"FlowerPartitioner: {self.name}: {type(error).__name__}: {why}") from error
        return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


class DatasetFolder(Classification):
    """Classification of a data set that ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote.

    Parameters
    ----------
    path : the folder.
    features : columns: one of images, one of text, or any number of numbers and arrays of numbers, each of one length.
        Pixels are scaled to 0 … 1; of a text the last ``sequence_length`` bytes are read; numbers are standardised with
        the mean and standard deviation of the training rows (all of the split, whoever holds them).
    label : column of class labels, integers or texts.
    partitioner : how the training rows are dealt to clients. It may leave some out.
    train_split, test_split : names in a ``DatasetDict``. A ``Dataset`` alone has no splits, and ``test_split`` None
        means that there is none: then ``test_share`` of the training rows are the test set, the same in every run.
    train_samples, test_samples : how many rows of each are used, the same in every run; None: all.
    model : "mlp" or "cnn" for images, "gru", "lstm" or "transformer" for text, "mlp" or "linear" for numbers; None:
        the first of these. ``hidden`` is the width of its layers.
    local : what a client does.
    seed : of the partitioner.

    Nothing is downloaded. Raises ValueError for parameters, folders and columns that cannot be used, ImportError
    without torch, datasets or Flower Datasets.
    """

    def __init__(
        self,
        path: str,
        features: tuple[str, ...],
        label: str,
        partitioner: FlowerPartitioner,
        train_split: str = "train",
        test_split: str | None = "test",
        test_share: float = 0.2,
        train_samples: int | None = None,
        test_samples: int | None = None,
        sequence_length: int = 80,
        model: Literal["mlp", "cnn", "linear", "gru", "lstm", "transformer"] | None = None,
        hidden: int = 64,
        local: LocalTraining = LocalTraining(),
        seed: int = 0,
    ) -> None:
        need_torch("hf_datasets")
        check_real("DatasetFolder: test_share", test_share, 0, 1, above=True, below=True)
        check_integer("DatasetFolder: sequence_length", sequence_length, 1)
        check_integer("DatasetFolder: hidden", hidden, 1)
        check_integer("DatasetFolder: seed", seed, 0)
        states = sorted(Path(path).rglob("state.json"))
        if not states:
            raise ValueError(f"DatasetFolder: path: {path} is no folder that save_to_disk of datasets wrote")
        read = _read(
            Path(path),
            tuple(state.stat().st_mtime_ns for state in states),
            tuple(features),
            label,
            (train_split, test_split),
            test_share,
            (train_samples, test_samples),
            sequence_length,
        )
        super().__init__(
            read.features,
            read.labels,
            read.test_features,
            read.test_labels,
            partitioner.split(read.dataset, seed),
            _module(model, read.kind, read.shape, hidden, read.classes),
            local,
        )


@dataclass(frozen=True, slots=True)
class _Read:
    dataset: Dataset
    """The training rows."""
    features: NDArray[Any]
    labels: NDArray[np.int64]
    test_features: NDArray[Any]
    test_labels: NDArray[np.int64]
    kind: Kind
    shape: tuple[int, ...]
    classes: int


@lru_cache(maxsize=2)  # a study makes the workload once a run
def _read(
    path: Path,
    _stamps: tuple[int, ...],
    features: tuple[str, ...],
    label: str,
    names: tuple[str, str | None],
    test_share: float,
    limits: tuple[int | None, int | None],
    sequence_length: int,
) -> _Read:
    train, test = (
        split.select(subset(f"DatasetFolder: {key}", limit, len(split)))
        for key, limit, split in zip(
            ("train_samples", "test_samples"), limits, _splits(path, *names, test_share), strict=True
        )
    )
    if not features:
        raise ValueError("DatasetFolder: features must name at least one column, got none")
    for split in (train, test):
        for column in (label, *features):
            if column not in split.column_names:
                has = ", ".join(split.column_names)
                raise ValueError(f"DatasetFolder: {path} has no column {column!r}; it has {has}")
    try:
        own, other = ([read_column(split, name, sequence_length) for name in features] for split in (train, test))
    except ValueError as error:
        raise ValueError(f"DatasetFolder: {path}: {error}") from error
    if any(a.shape != b.shape for a, b in zip(own, other, strict=True)):
        raise ValueError(f"DatasetFolder: {path}: samples of training and test have different shapes")
    if len(own) > 1 and any(column.kind != "vector" for column in own):
        kinds = ", ".join(f"{name} ({column.kind})" for name, column in zip(features, own, strict=True))
        raise ValueError(f"DatasetFolder: features: an image or a text stands alone; got {kinds}")
    x, x_test = _joined(own), _joined(other)
    if own[0].kind == "vector":
        x, x_test = standardised(x, x_test)
    y, y_test, classes = classes_of(
        f"DatasetFolder: label {label!r}", *(raw_column(each, label) for each in (train, test))
    )
    shape = own[0].shape if len(own) == 1 else x.shape[1:]
    return _Read(train, x, y, x_test, y_test, own[0].kind, shape, classes)


def _splits(path: Path, train: str, test: str | None, test_share: float) -> tuple[Dataset, Dataset]:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError as error:
        raise ImportError(f"the hf_datasets workload needs datasets ({error}): pip install 'fedasync[data]'") from error
    found = load_from_disk(path)
    if not isinstance(found, Dataset):
        for key, name in (("train_split", train), ("test_split", test)):
            if name is not None and name not in found:
                raise ValueError(f"DatasetFolder: {key}: {path} has no split {name!r}; it has {', '.join(found)}")
        if test is not None:
            return found[train], found[test]
        found = found[train]
    shuffled = np.random.default_rng(0).permutation(len(found))
    kept = max(1, round(test_share * len(found)))
    if kept >= len(found):
        raise ValueError(f"DatasetFolder: {path} has {len(found)} rows: too few to keep {test_share:g} of them")
    return found.select(np.sort(shuffled[kept:])), found.select(np.sort(shuffled[:kept]))


def _joined(columns: list[Column]) -> NDArray[Any]:
    return columns[0].values if len(columns) == 1 else np.concatenate([column.values for column in columns], axis=1)


def _module(model: str | None, kind: Kind, shape: tuple[int, ...], hidden: int, classes: int) -> partial[Module]:
    name = "DatasetFolder"
    model = model or MODELS[kind][0]
    if model not in MODELS[kind]:
        would = " or ".join(map(repr, MODELS[kind]))
        raise ValueError(f"{name}: model must be {would} for features of kind {kind}, got {model!r}")
    if kind == "image":
        return image_module(name, cast(Any, model), cast(Any, shape), hidden, classes)
    if kind == "text":
        return sequence_module(name, cast(Any, model), shape[0], EMBEDDING, hidden, 1, BYTES, classes)
    return vector_module(name, cast(Any, model), shape[0], hidden, classes)


def _flower() -> Any:
    try:
        from flwr_datasets import partitioner
    except ImportError as error:
        raise ImportError(
            f"the hf_datasets workload needs flwr-datasets ({error}): pip install 'fedasync[data]'"
        ) from error
    return partitioner


def _with_rows(dataset: Dataset, columns: list[str]) -> Dataset:
    """What a partitioner needs to see: the columns that it was told of, and which row is which."""
    from datasets import Dataset

    rows = np.arange(len(dataset))
    named = [column for column in dataset.column_names if column in columns]
    return dataset.select_columns(named).add_column(ROW, rows) if named else Dataset.from_dict({ROW: rows})
