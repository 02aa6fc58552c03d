"""Tables by site: each site a client with its own test rows, encoded by what the training rows hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedasync as fa
from fedasync.workloads import LocalTraining, Tabular, Task

LOCAL = LocalTraining(batch_size=8, learning_rate=0.3)


def table(counts: tuple[int, ...] = (40, 25, 9, 3)) -> pl.DataFrame:
    """Sites of these sizes; ``age`` is another number in every row, the outcome depends on age, dose and ward."""
    rng = np.random.default_rng(2)
    rows = sum(counts)
    sites = rng.permutation(np.repeat([f"site {i}" for i in range(len(counts))], counts))
    age = rng.permutation(rows) + 30.0
    dose, ward = rng.normal(5, 2, rows), rng.choice(["east", "north", "west"], rows)
    score = (age - age.mean()) / age.std() + dose / 2 - 2.5 + 2.0 * (ward == "north")
    return pl.DataFrame(
        {
            "site": sites,
            "age": age,
            "dose": dose,
            "ward": ward,
            "score": score,
            "ill": np.where(score > 0.5, "yes", "no"),
        }
    )


def written(path: Path, frame: pl.DataFrame) -> str:
    frame.write_csv(path / "table.csv")
    return str(path / "table.csv")


def made(file: str, **changed: Any) -> Tabular:
    keys = {"site": "site", "label": "ill", "features": ("age", "dose", "ward"), "local": LOCAL}
    return Tabular(file, **{**keys, **changed})


@settings(max_examples=25)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=6).map(tuple), st.floats(0.05, 0.95), st.integers(2, 12))
def test_each_site_keeps_its_share_for_the_test(
    tmp_path_factory: Any, counts: tuple[int, ...], test_share: float, minimum: int
) -> None:
    frame = table(counts).with_columns(ill=pl.lit("no"))
    file = written(tmp_path_factory.mktemp("table"), frame)
    large = [(f"site {i}", count) for i, count in enumerate(counts) if count >= minimum]
    if not large:
        with pytest.raises(ValueError, match=f"minimum_rows must be at most {max(counts)}, the rows of the largest"):
            made(file, features=("age",), test_share=test_share, minimum_rows=minimum)
        return
    workload = made(file, features=("age",), test_share=test_share, minimum_rows=minimum)
    kept = [min(count - 1, max(1, round(test_share * count))) for _, count in large]
    assert workload.client_names == [site for site, _ in large]
    assert list(workload.client_samples()) == [count - k for (_, count), k in zip(large, kept, strict=True)]
    assert len(workload._test[1]) == sum(kept)
    if len(workload._train[1]) > 1:  # ages differ, so a row is known by its age
        trained, tested = ({row.tobytes() for row in part} for part in (workload._train[0], workload._test[0]))
        assert not trained & tested
        assert len(trained) + len(tested) == sum(count for _, count in large)


def test_a_client_holds_the_rows_of_its_site(tmp_path: Path) -> None:
    frame = table()
    workload = made(written(tmp_path, frame), features=("age",))
    used = frame.filter(pl.col("site") != "site 3")["age"].to_numpy()  # 3 rows are too few
    ages = {site: set(frame.filter(site=site)["age"]) for site in workload.client_names}
    x, tested = workload._train[0][:, 0].astype(float), workload._test[0][:, 0].astype(float)
    # Undo the standardisation: the ages of all rows are known.
    scale = (used.max() - used.min()) / (max(x.max(), tested.max()) - min(x.min(), tested.min()))
    restored = np.rint(used.min() + (x - min(x.min(), tested.min())) * scale)
    for site, rows in zip(workload.client_names, workload._partition, strict=True):
        assert set(restored[rows]) < ages[site]


def test_numbers_are_standardised_by_the_training_rows_and_texts_become_columns(tmp_path: Path) -> None:
    workload = made(written(tmp_path, table()))
    x, tested = workload._train[0], workload._test[0]
    assert x.shape[1] == tested.shape[1] == 2 + 3
    assert np.allclose(x[:, :2].mean(0), 0, atol=1e-5)
    assert np.allclose(x[:, :2].std(0), 1, atol=1e-5)
    assert not np.allclose(tested[:, :2].mean(0), 0, atol=1e-5)
    for part in (x, tested):
        assert set(np.unique(part[:, 2:])) == {0.0, 1.0}
        assert (part[:, 2:].sum(1) == 1).all()


def test_a_value_that_only_test_rows_have_is_none_of_the_columns(tmp_path: Path) -> None:
    frame = table()
    workload = made(written(tmp_path, frame), features=("age",))
    ages = np.sort(frame.filter(pl.col("site") != "site 3")["age"].to_numpy())
    whole = np.concatenate([workload._train[0], workload._test[0]])[:, 0]
    of_test = ages[np.argsort(np.argsort(whole))][-len(workload._test[0]) :]
    rare = frame.with_columns(ward=pl.when(pl.col("age") == of_test[0]).then(pl.lit("attic")).otherwise("ward"))
    tested = made(written(tmp_path, rare))._test[0]
    assert tested.shape[1] == 5
    assert (tested[:, 2:].sum(1) == 0).tolist() == [True] + [False] * (len(tested) - 1)


def test_a_constant_column_becomes_zeros(tmp_path: Path) -> None:
    workload = made(written(tmp_path, table().with_columns(age=pl.lit(7.0))))
    assert (workload._train[0][:, 0] == 0).all()


def test_parquet_and_csv_are_the_same_table_and_the_same_arguments_the_same_bytes(tmp_path: Path) -> None:
    frame = table()
    frame.write_parquet(tmp_path / "table.parquet")
    one, other, again = (
        made(f) for f in (written(tmp_path, frame), str(tmp_path / "table.parquet"), str(tmp_path / "table.csv"))
    )
    for each in (other, again):
        for a, b in zip((*one._train, *one._test), (*each._train, *each._test), strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_label_of_numbers_is_cut_at_quantiles(tmp_path: Path) -> None:
    workload = made(written(tmp_path, table((60, 60))), label="score", label_bins=3)
    counts = np.bincount(workload._train[1])
    assert len(counts) == 3
    assert counts.max() - counts.min() <= 1
    assert set(workload._test[1]) <= {0, 1, 2}


def test_integers_and_truth_values_are_classes(tmp_path: Path) -> None:
    frame = table((60, 60)).with_columns(grade=(pl.col("age") % 3).cast(pl.Int64) * 5, old=pl.col("age") > 80)
    graded = made(written(tmp_path, frame), label="grade")
    assert set(graded._train[1]) == {0, 1, 2}
    assert made(str(tmp_path / "table.csv"), label="old").initial_model(0).tensors()["2.bias"].shape == (2,)
    assert made(str(tmp_path / "table.csv"), features=("old", "age"))._train[0].shape[1] == 3


def test_all_other_columns_are_features_by_default(tmp_path: Path) -> None:
    assert (
        made(written(tmp_path, table()), features=None, model="linear").initial_model(0).layout.parameters == 2 * 6 + 2
    )


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_a_batch_is_what_the_tasks_bring_alone(tmp_path: Path, model: Any) -> None:
    workload = made(written(tmp_path, table()), model=model)
    assert workload.not_batched is None
    start = workload.initial_model(0)
    tasks = [Task(client, start, seed=client) for client in range(3)]
    for task, found in zip(tasks, workload.train_batch([(workload, task) for task in tasks], 2**28), strict=True):
        torch.testing.assert_close(found.values, workload.train(task).values, rtol=1e-4, atol=1e-6)


def test_fedbuff_learns_the_outcome(tmp_path: Path) -> None:
    run = fa.simulate(
        fa.strategies.fedbuff(concurrency=3, buffer_size=2),
        fa.Population(duration_s=fa.laws.Exponential(1.0)),
        made(written(tmp_path, table((80, 120, 40))), model="linear"),
        time_s=30.0,
        evaluate_every_s=10.0,
    )
    assert run.metrics.filter(name="accuracy")["value"][-1] > 0.9


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"site": "hospital"}, "has no column 'hospital'; it has site, age, dose, ward, score, ill"),
        ({"features": ("age", "weight")}, "has no column 'weight'"),
        ({"features": ()}, "has no columns for features beside site and label"),
        ({"features": ("age", "ill")}, "column 'ill' is named twice among site, label and features"),
        ({"label": "score"}, "label 'score' has Float64, .*label_bins, such as 3"),
        ({"label_bins": 3}, "label_bins cuts numbers, and label 'ill' has String"),
        ({"label_bins": 1}, "Tabular: label_bins must be an integer ≥ 2, got 1"),
        ({"test_share": 0.0}, "Tabular: test_share must be a finite number > 0 and < 1, got 0.0"),
        ({"minimum_rows": 1}, "Tabular: minimum_rows must be an integer ≥ 2, got 1"),
        ({"model": "cnn"}, "Tabular: model must be 'linear' or 'mlp', got 'cnn'"),
        ({"hidden": 0}, "Tabular: hidden must be an integer ≥ 1, got 0"),
    ],
)
def test_parameters_that_cannot_be_used_are_named(tmp_path: Path, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as info:
        made(written(tmp_path, table()), **parameters)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("hole", [None, float("nan"), float("inf")])
def test_missing_and_infinite_values_are_refused(tmp_path: Path, hole: float | None) -> None:
    frame = table().with_columns(dose=pl.when(pl.col("age") < 33).then(pl.lit(hole)).otherwise("dose"))
    with pytest.raises(ValueError, match="column 'dose' has 3 missing or infinite values: fill or drop them"):
        made(written(tmp_path, frame))


def test_a_label_that_only_the_test_has_is_refused(tmp_path: Path) -> None:
    frame = table((2, 2)).with_columns(ill=pl.arange(4))
    with pytest.raises(ValueError, match=r"label 'ill': \d stands in the test samples only"):
        made(written(tmp_path, frame), minimum_rows=2)


@pytest.mark.parametrize("name", ["table.txt", "absent.csv", "broken.parquet"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=f"Tabular: file: .*{name}") as info:
        made(str(tmp_path / name))
    assert "\n" not in str(info.value)


def test_without_torch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"needs torch .*pip install 'fedasync\[torch\]'"):
        made("any.csv")
