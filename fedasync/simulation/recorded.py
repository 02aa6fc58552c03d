"""Recorded clients as files: how fast each is, and when it is online, in CSV or Parquet.

The contents are those of FedScale's ``client_device_capacity`` and ``client_behave_trace``, which come as pickles.
A pickle can run code when it is read, so none is read here; docs/populations.md has the script that converts one.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedasync.core.bounds import check_integer, check_real

if TYPE_CHECKING:
    import polars as pl

CAPACITY = ("computation", "communication")
AVAILABILITY = ("client", "active_s", "inactive_s", "finish_time_s")


@dataclass(frozen=True)
class Capacity:
    """Speed and bandwidth of recorded clients, and FedScale's rule for the time of a lease.

    ``file`` has the columns ``computation`` (milliseconds that the model's forward pass takes a sample) and
    ``communication`` (kbit/s, of 1024 bits), a row for each client. A lease computes ``augmentation_factor`` ×
    ``batch_size`` × ``local_steps`` × computation/1000 seconds (FedScale's factor 3: the backward pass takes about
    twice as long as the forward pass) and moves the model down and up at ``communication``. Row i belongs to client i,
    again from the first when there are more clients than rows.

    Raises ValueError for a file that cannot be read so.
    """

    file: str
    batch_size: int
    local_steps: int
    augmentation_factor: float = 3.0

    def __post_init__(self) -> None:
        check_integer("capacity: batch_size", self.batch_size, 1)
        check_integer("capacity: local_steps", self.local_steps, 1)
        check_real("capacity: augmentation_factor", self.augmentation_factor, 0, above=True)
        read_capacity(self.file)  # an unreadable file is an error now, not in the middle of a run

    @property
    def rows(self) -> int:
        return len(read_capacity(self.file)[0])

    def compute_s(self, clients: int) -> array[float]:
        """Seconds that a lease of each client computes."""
        computation = read_capacity(self.file)[0]
        work = self.augmentation_factor * self.batch_size * self.local_steps
        return array("d", (work * computation[client % len(computation)] / 1000 for client in range(clients)))

    def bytes_per_second(self, clients: int) -> array[float]:
        """Bandwidth of each client, up and down."""
        communication = read_capacity(self.file)[1]
        return array("d", (communication[client % len(communication)] * 1024 / 8 for client in range(clients)))


@lru_cache(maxsize=8)
def _capacity(file: str, _changed_ns: int) -> tuple[list[float], list[float]]:
    table = _table(file, CAPACITY, "capacity")
    for name in CAPACITY:
        for row, value in enumerate(table[name].to_list(), 1):
            if value is None or not 0 < value < float("inf"):
                raise ValueError(
                    f"capacity: {file}, row {row}, column {name!r}: got {value}; a finite number > 0 would do"
                )
    return table["computation"].to_list(), table["communication"].to_list()


def read_capacity(file: str) -> tuple[list[float], list[float]]:
    """Milliseconds a sample and kbit/s of each recorded client. Raises ValueError."""
    return _capacity(file, _changed_ns(file, "capacity"))


@lru_cache(maxsize=4)
def _availability(file: str, _changed_ns: int) -> tuple[list[list[tuple[float, float]]], list[float | None]]:
    table = _table(file, AVAILABILITY, "availability")
    intervals: dict[int, list[tuple[float, float]]] = {}
    cycles_s: dict[int, float] = {}
    for row, (client, start, end, finish) in enumerate(table.iter_rows(), 1):
        where = f"availability: {file}, row {row}"
        if any(value is None for value in (client, start, end, finish)):
            raise ValueError(f"{where}: a value is missing")
        own = intervals.setdefault(client, [])
        last = own[-1][1] if own else 0.0
        if not 0 <= last <= start <= end < float("inf"):
            raise ValueError(
                f"{where}: [{start:g}, {end:g}] must have 0 ≤ active_s ≤ inactive_s and come after {last:g}"
            )
        if not 0 < finish < float("inf") or cycles_s.setdefault(client, finish) != finish:
            raise ValueError(f"{where}: finish_time_s = {finish:g}; one number > 0 for all rows of a client would do")
        seen_until = min(end, finish)  # FedScale's clock turns at the finish, so what lies beyond is never seen
        if start < seen_until:
            own.append((start, seen_until))
    clients = sorted(intervals)
    return [intervals[client] for client in clients], [cycles_s[client] for client in clients]


def read_availability(file: str) -> tuple[list[list[tuple[float, float]]], list[float | None]]:
    """Times online, and the period, of each recorded client, ordered by ``client``. Raises ValueError."""
    return _availability(file, _changed_ns(file, "availability"))


def _changed_ns(file: str, what: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError as error:
        raise ValueError(f"{what}: {file} cannot be read: {error.strerror}") from None


def _table(file: str, columns: tuple[str, ...], what: str) -> pl.DataFrame:
    """The columns as numbers. Raises ValueError for anything but CSV and Parquet that has them."""
    import polars as pl

    path = Path(file)
    try:
        with path.open("rb") as content:
            start = content.read(4)
        if start[:1] in (b"\x80", b"(") or path.suffix in (".pkl", ".pickle"):
            raise ValueError(
                f"{what}: {file} is a pickle, which can run code when it is read; the script in docs/populations.md "
                "converts one that you trust to CSV"
            )
        table = pl.read_parquet(path) if start == b"PAR1" else pl.read_csv(path)
    except OSError as error:
        raise ValueError(f"{what}: {file} cannot be read: {error.strerror or error}") from None
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{what}: {file} is neither CSV nor Parquet: {str(error).splitlines()[0]}") from None
    missing = [name for name in columns if name not in table.columns]
    if missing:
        has, needs = ", ".join(table.columns), ", ".join(columns)
        raise ValueError(f"{what}: {file} has no column {missing[0]!r}; it has {has}, and needs {needs}")
    if table.height == 0:
        raise ValueError(f"{what}: {file} has no rows")
    for name in columns:
        if not table[name].dtype.is_numeric():
            raise ValueError(f"{what}: {file}, column {name!r} does not hold numbers alone")
    return table.select(columns).with_columns(
        pl.col(name).cast(pl.Int64 if name == "client" else pl.Float64) for name in columns
    )
