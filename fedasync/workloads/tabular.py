"""A table by site: rows of hospitals, schools or machines, each site a client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer, check_real
from fedasync.workloads.classification import Classification
from fedasync.workloads.modules import VectorModel, vector_module
from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.samples import classes_of, need_torch, standardised

if TYPE_CHECKING:
    import polars as pl


class Tabular(Classification):
    """Classification of the rows of a table; a client is a value of its column ``site``.

    Parameters
    ----------
    file : CSV with a header, or Parquet; the name ends in .csv or .parquet.
    site, label : columns.
    features : columns; None: all but ``site`` and ``label``. Numbers are standardised with the mean and standard
        deviation of the training rows; of anything else, each value among the training rows becomes a column of 0
        and 1 (a value that only test rows have is 0 in all of them).
    label_bins : cut a label of numbers into so many classes, at the quantiles of the training rows; None: each value
        is a class. There is no regression: the loss is cross-entropy.
    test_share : share of each site's rows that is kept for the test, at least one; the same rows in every run.
    minimum_rows : sites with fewer rows are left out.
    model : "linear", or "mlp" with one hidden layer of ``hidden``.
    local : what a client does.

    ``client_names`` has the site of each client. Raises ValueError for files, columns and values that cannot be used;
    ImportError without torch.
    """

    def __init__(
        self,
        file: str,
        site: str,
        label: str,
        features: tuple[str, ...] | None = None,
        label_bins: int | None = None,
        test_share: float = 0.2,
        minimum_rows: int = 5,
        model: VectorModel = "mlp",
        hidden: int = 32,
        local: LocalTraining = LocalTraining(),
    ) -> None:
        need_torch("tabular")
        check_real("Tabular: test_share", test_share, 0, 1, above=True, below=True)
        check_integer("Tabular: minimum_rows", minimum_rows, 2)
        if label_bins is not None:
            check_integer("Tabular: label_bins", label_bins, 2)
        table = _read(Path(file))
        if features is None:
            features = tuple(column for column in table.columns if column not in (site, label))
        _check_columns(table, file, [site, label, *features])
        self.client_names, train, test = _by_site(table[site], test_share, minimum_rows)
        rows, kept = np.concatenate(train), np.concatenate(test)
        x, x_test = (
            np.concatenate(blocks, axis=1)
            for blocks in zip(*(_encoded(table[column], rows, kept) for column in features), strict=True)
        )
        y, y_test, classes = _classes(table[label], rows, kept, label_bins)
        super().__init__(
            x,
            y,
            x_test,
            y_test,
            np.split(np.arange(len(rows)), np.cumsum([len(own) for own in train])[:-1]),
            vector_module("Tabular", model, x.shape[1], hidden, classes),
            local,
        )


def _read(file: Path) -> pl.DataFrame:
    import polars as pl

    if file.suffix not in (".csv", ".parquet"):
        raise ValueError(f"Tabular: file: got {file}; a name that ends in .csv or .parquet would do")
    try:
        # Every row is looked at: a column is of numbers only if all of it is.
        return pl.read_csv(file, infer_schema_length=None) if file.suffix == ".csv" else pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"Tabular: file: {file} cannot be read: {why}") from error


def _check_columns(table: pl.DataFrame, file: str, columns: list[str]) -> None:
    if len(columns) < 3:
        raise ValueError(f"Tabular: {file} has no columns for features beside site and label")
    for column in columns:
        if column not in table.columns:
            raise ValueError(f"Tabular: {file} has no column {column!r}; it has {', '.join(table.columns)}")
        if columns.count(column) > 1:
            raise ValueError(f"Tabular: column {column!r} is named twice among site, label and features")
        values = table[column]
        missing = values.null_count()
        if values.dtype.is_numeric():
            missing += len(values) - missing - int(values.is_finite().sum())
        if missing:
            raise ValueError(
                f"Tabular: {file}: column {column!r} has {missing} missing or infinite values: fill or drop them, or"
                " leave the column out of features"
            )


def _by_site(
    sites: pl.Series, test_share: float, minimum_rows: int
) -> tuple[list[str], list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Names, training rows and test rows of the sites that have enough of them, in the order of their names."""
    values, members = np.unique(sites.to_numpy(), return_inverse=True)
    order = np.argsort(members, kind="stable")
    rows_of = np.split(order, np.cumsum(np.bincount(members, minlength=len(values)))[:-1])
    large = [i for i, rows in enumerate(rows_of) if len(rows) >= minimum_rows]
    if not large:
        most = max(map(len, rows_of), default=0)
        raise ValueError(f"Tabular: minimum_rows must be at most {most}, the rows of the largest site: {minimum_rows}")
    rng = np.random.default_rng(0)
    train, test = [], []
    for i in large:
        shuffled = rng.permutation(rows_of[i])
        kept = min(len(shuffled) - 1, max(1, round(test_share * len(shuffled))))
        train.append(np.sort(shuffled[kept:]))
        test.append(np.sort(shuffled[:kept]))
    return [str(values[i]) for i in large], train, test


def _encoded(
    values: pl.Series, train: NDArray[np.int64], test: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[rows, columns] of the training and of the test rows."""
    import polars as pl

    if values.dtype.is_numeric():
        numbers = values.to_numpy().astype(np.float64)[:, None]
        own, other = standardised(numbers[train], numbers[test])
        return own, other
    texts = values.cast(pl.String).to_numpy()
    levels = np.unique(texts[train])
    return (texts[train][:, None] == levels).astype(np.float32), (texts[test][:, None] == levels).astype(np.float32)


def _classes(
    values: pl.Series, train: NDArray[np.int64], test: NDArray[np.int64], bins: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Class of the training and of the test rows, and how many there are."""
    name, labels = values.name, values.to_numpy()
    if bins is not None:
        if not values.dtype.is_numeric():
            raise ValueError(f"Tabular: label_bins cuts numbers, and label {name!r} has {values.dtype}: leave it out")
        edges = np.quantile(labels[train], np.arange(1, bins) / bins)
        if len(np.unique(edges)) < len(edges):
            raise ValueError(f"Tabular: label {name!r} has too few values for label_bins = {bins}: use fewer")
        binned = np.searchsorted(edges, labels, side="right")
        return binned[train], binned[test], bins
    if values.dtype.is_float():
        raise ValueError(
            f"Tabular: label {name!r} has {values.dtype}, and the loss is one of classes: label_bins, such as 3, cuts"
            " it into classes"
        )
    return classes_of(f"Tabular: label {name!r}", labels[train], labels[test])
