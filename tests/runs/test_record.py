"""A record holds the same rows in memory and in a file, hands them out as often as asked, and fails aloud."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import numpy as np
import polars as pl
import pytest

from fedasync.runs.record import Record
from fedasync.runs.rows import ROW

from .logs import SCHEMA, STORY, Story, record, table

LONG = Story(1, steps=4000).rows


@pytest.mark.parametrize("memory", [1, 1000, 2**30])
def test_memory_and_file_hold_the_same_rows(memory: int) -> None:
    made = record(LONG, memory)
    assert len(made) == len(LONG)
    assert made.table().equals(table(LONG))
    assert np.array_equal(np.concatenate(list(made.chunks(777))), next(record(LONG).chunks()))


@pytest.mark.parametrize("memory", [1, 2**30])
def test_readers_do_not_disturb_each_other_nor_the_writer(memory: int) -> None:
    made = record(LONG, memory)
    for one, other in zip_longest(made.chunks(500), made.chunks(500)):
        assert np.array_equal(one, other)
    reader = made.chunks(500)
    first = next(reader)
    made.write(first.tobytes())
    assert np.array_equal(np.concatenate([first, *reader]), next(record(LONG).chunks()))
    assert len(made) == len(LONG) + 500
    assert np.array_equal(list(made.chunks())[-1][-500:], first)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: np.concatenate(list(made.chunks(100))), range(8)))
    assert all(np.array_equal(one, found[0]) for one in found)


def test_an_empty_record_is_an_empty_table_of_the_columns_of_the_contract() -> None:
    made = record([])
    assert list(made.chunks()) == []
    assert dict(made.table().schema) == dict(made.scan().collect_schema()) == SCHEMA
    assert made.scan().collect().equals(made.table())


@pytest.mark.parametrize("memory", [1, 2**30])
@pytest.mark.parametrize("engine", ["streaming", "in-memory"])
def test_a_scan_answers_as_the_table_does(memory: int, engine: str) -> None:
    made, events = record(LONG, memory), table(LONG)
    queries = (
        lambda t: t,
        lambda t: t.head(5),
        lambda t: t.slice(3000, 700),
        lambda t: t.filter(pl.col("kind") == "consumed").select("time_s"),
        lambda t: t.select("version", "reason").head(400),
        lambda t: t.filter(pl.col("reason").is_not_null()).head(3),
        lambda t: t.head(300).filter(pl.col("lease") < 20),
    )
    for query in queries:
        assert query(made.scan()).collect(engine=engine).equals(query(events))


def test_a_record_goes_to_another_process_with_its_rows() -> None:
    for memory in (1, 2**30):
        again = pickle.loads(pickle.dumps(record(STORY, memory)))
        assert again.table().equals(table(STORY))
        again.write(next(record(STORY).chunks()).tobytes())
        assert len(again) == 2 * len(STORY)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where Linux lists them")
def test_the_file_goes_when_the_record_does() -> None:
    before = open_files()
    made = record(LONG, memory=1)
    assert open_files() == before + 1
    del made
    assert open_files() == before


FULL = """
import resource
from fedasync.core.log import EventLog
from fedasync.runs.record import Record
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
log = EventLog(Record(memory=1000).write)
try:
    for i in range(100_000):
        log.append((float(i), 0, i, 0, 0, 0, -1, -1))
        log.pack()
except OSError as error:
    print(error.strerror)
"""


def test_no_room_for_the_file_is_an_error() -> None:
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"


def test_a_row_has_no_gaps() -> None:
    assert ROW.itemsize == 41
    assert Record().table().is_empty()
