"""What one side sends is what the other reads, to the bit; and whatever a client sends, the server does not raise."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.aggregation.check import Defect, alone
from fedasync.aggregation.model import Contribution, Layout, Model
from fedasync.core import Lease
from fedasync.flower.messages import (
    ClientFailure,
    Reply,
    error_record,
    hello_record,
    read_hello,
    read_reply,
    read_task,
    reply_record,
    task_record,
)
from fedasync.workloads import Task

Wire = Callable[[RecordDict], RecordDict]
LEASE = Lease(7, 3, 5, 0.0)
MEASURED = {"train_s": 0.5, "wall_s": 0.75}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INT64 = st.integers(-(2**63), 2**63 - 1)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Equal to the bit, NaN included."""
    if one is None or other is None:
        return one is other
    bits = [t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@st.composite
def vectors(draw: st.DrawFn, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Any bits at all, and any place in memory: whole, an excerpt, or every other element."""
    step = draw(st.sampled_from([1, 2]))
    held = draw(st.binary(min_size=(n := (size * step + 1) * dtype.itemsize), max_size=n))
    return torch.frombuffer(bytearray(held), dtype=dtype)[1::step][:size]


@st.composite
def models(draw: st.DrawFn) -> Model:
    dtype = draw(st.sampled_from(DTYPES))
    shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=4)
    floats = {f"layer.{i}.w": torch.empty(shape, dtype=dtype) for i, shape in enumerate(draw(shapes))}
    counts = {f"π{i}": torch.empty(shape, dtype=torch.int64) for i, shape in enumerate(draw(shapes))}
    layout = Layout.of({**floats, **counts}, draw(st.sets(st.sampled_from(sorted(floats)))) if floats else ())
    integers = draw(vectors(torch.int64, layout.carried)) if counts else None
    return Model(draw(vectors(dtype, layout.parameters)), layout, integers)


@settings(max_examples=60)
@given(data=st.data())
def test_a_task_arrives_as_it_was_sent(data: st.DataObject, over_the_wire: Wire) -> None:
    model = data.draw(models())
    control = data.draw(st.none() | vectors(model.values.dtype, model.layout.parameters))
    seed, client = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 10**6))
    steps, mu = data.draw(st.none() | st.integers(1, 10**6)), data.draw(st.just(0.0) | st.floats(0, 1e9))
    lease = Lease(data.draw(st.integers(0, 2**40)), client, data.draw(st.integers(0, 2**40)), 0.0)
    task, lease_id, version = read_task(
        over_the_wire(task_record(Task(client, model, seed, mu, control, steps), lease))
    )
    assert (lease_id, version) == (lease.id, lease.base_version)
    assert (task.client, task.seed, task.proximal_mu, task.steps) == (client, seed, mu, steps)
    assert task.model.layout == model.layout
    assert [e.statistic for e in task.model.layout.entries] == [e.statistic for e in model.layout.entries]
    assert same(task.model.values, model.values)
    assert same(task.model.integers, model.integers)
    assert same(task.control, control)


@settings(max_examples=60)
@given(data=st.data())
def test_a_contribution_arrives_as_it_was_sent_and_in_memory_that_the_server_can_take(
    data: st.DataObject, over_the_wire: Wire
) -> None:
    model = data.draw(models())
    most = data.draw(st.integers(1, 2**40))
    sent = Contribution(
        model.values,
        data.draw(st.sampled_from(["parameters", "delta"])),
        data.draw(st.integers(1, most)),
        model.integers,
        data.draw(st.none() | st.floats(0, exclude_min=True, allow_infinity=False)),
    )
    content = over_the_wire(reply_record(sent, 7, 3, 5, {**MEASURED, "loss": -1.5}))
    reply = read_reply(content, LEASE, model.layout, model.values.dtype, most)
    got = reply.contribution
    assert isinstance(got, Contribution)
    assert (got.form, got.samples, got.step_size_sum) == (sent.form, sent.samples, sent.step_size_sum)
    assert same(got.values, sent.values)
    assert same(got.integers, sent.integers)
    assert alone(got.values, ())
    assert reply.measured == {**MEASURED, "loss": -1.5}


def test_sending_leaves_a_tensor_as_it_was() -> None:
    values = torch.arange(4.0)
    reply_record(Contribution(values, "delta", 1), 7, 3, 5, MEASURED)
    assert alone(values, ())
    assert values.tolist() == [0, 1, 2, 3]


def test_a_model_of_50_mb_takes_one_copy_of_python_memory_to_send_and_none_to_read(over_the_wire: Wire) -> None:
    model = Model.from_tensors({"w": torch.randn(12_500_000)})
    tracemalloc.start()
    content = task_record(Task(3, model, 0), LEASE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * model.values.nbytes
    received = over_the_wire(content)
    tracemalloc.start()
    task, _, _ = read_task(received)
    _, peak = tracemalloc.get_traced_memory()  # torch's memory, one copy, is not traced
    tracemalloc.stop()
    assert peak < 0.1 * model.values.nbytes
    assert same(task.model.values, model.values)


# What is no task

LAYOUT = Layout.of({"w": torch.zeros(2, 2), "steps": torch.zeros((), dtype=torch.int64)})
GOOD = Contribution(torch.arange(4.0), "parameters", 10, torch.tensor([9]), 0.5)


def good_task() -> RecordDict:
    return task_record(Task(3, Model(GOOD.values, LAYOUT, GOOD.integers), 1, 0.5, torch.ones(4), 2), LEASE)


@pytest.mark.parametrize(
    ("where", "key", "value", "said"),
    [
        ("task", None, None, "task: got nothing"),
        ("task", "lease", "7", "lease: got str '7'"),
        ("task", "seed", True, "seed: got bool True"),
        ("task", "layout", "[[", "layout cannot be read"),
        ("task", "layout", '[["w",[-1],0,true,false]]', "negative"),
        ("task", "layout", '[["w",[Infinity],0,true,false]]', "layout cannot be read"),
        ("task", "layout", '[["w",[9],0,true,false]]', r"shape \[4\], the model has \[9\]"),
        ("task", "proximal_mu", 1, "proximal_mu: got int 1"),
        ("model", None, None, "model: got nothing"),
        ("model", "values", Array("int8", (4,), "fedasync.raw", b"abcd"), "values of 'int8'"),
        ("model", "more", Array("int8", (4,), "fedasync.raw", b"abcd"), "unexpected arrays"),
        ("control", "values", Array("float64", (4,), "fedasync.raw", bytes(32)), "dtype 'float64'"),
    ],
)
def test_what_is_no_task_is_refused_in_one_line(where: str, key: str | None, value: Any, said: str) -> None:
    content = good_task()
    if key is None:
        del content[where]
    else:
        content[where][key] = value  # type: ignore[index]
    with pytest.raises(ValueError, match=said) as caught:
        read_task(content)
    assert "\n" not in str(caught.value)


# Replies that are no good


def good_reply() -> RecordDict:
    return reply_record(GOOD, 7, 3, 5, MEASURED)


def read(content: RecordDict) -> Reply:
    return read_reply(content, LEASE, LAYOUT, torch.float32, 20)


def raw(dtype: str, shape: tuple[int, ...], size: int, stype: str = "fedasync.raw") -> Array:
    return Array(dtype, shape, stype, bytes(size))


DEFECTS: list[tuple[str, str | None, Any, str, str]] = [
    ("contribution", None, None, "not a reply", "contribution: got nothing"),
    ("result", None, None, "not a reply", "result: got nothing"),
    ("measured", None, None, "not a reply", "measured: got nothing"),
    ("contribution", None, ConfigRecord(), "not a reply", "contribution: got ConfigRecord"),
    ("result", None, MetricRecord(), "not a reply", "result: got MetricRecord"),
    ("more", None, ConfigRecord(), "not a reply", "'more'"),
    ("result", "lease", 8, "wrong lease", "lease 8"),
    ("result", "lease", 7.0, "not a reply", "float 7.0"),
    ("result", "client", 2, "wrong client", "client 2"),
    ("result", "version", 4, "wrong version", "version 4"),
    ("result", "version", True, "not a reply", "bool True"),
    ("result", "form", "gradient", "unknown form", "'gradient'"),
    ("result", "form", ["delta"], "unknown form", "['delta']"),
    ("result", "samples", nan, "no samples", "nan"),
    ("result", "samples", 0, "no samples", "0"),
    ("result", "samples", -3, "no samples", "-3"),
    ("result", "samples", True, "no samples", "True"),
    ("result", "samples", [1], "no samples", "[1]"),
    ("result", "samples", 21, "too many samples", "client 3 has 20"),
    ("result", "step_size_sum", nan, "wrong step sizes", "nan"),
    ("result", "step_size_sum", inf, "wrong step sizes", "inf"),
    ("result", "step_size_sum", 0.0, "wrong step sizes", "0.0"),
    ("result", "step_size_sum", "1", "wrong step sizes", "'1'"),
    ("measured", "train_s", -1.0, "wrong measurements", "train_s = -1.0"),
    ("measured", "wall_s", nan, "wrong measurements", "nan"),
    ("measured", "losses", [1.0, 2.0], "wrong measurements", "'losses'"),
    ("contribution", "more", raw("float32", (1,), 4), "wrong layout", "'more'"),
    ("contribution", "values", raw("float64", (4,), 32), "wrong dtype", "the model has float32"),
    ("contribution", "values", raw("float32", (4,), 16, "numpy.ndarray"), "wrong encoding", "'numpy.ndarray'"),
    ("contribution", "values", raw("float32", (2, 2), 16), "wrong size", "shape [2, 2]"),
    ("contribution", "values", raw("float32", (10**15,), 16), "wrong size", "[1000000000000000]"),
    ("contribution", "values", raw("float32", (-4,), 16), "wrong size", "[-4]"),
    ("contribution", "values", raw("float32", (4,), 17), "wrong size", "17 bytes, [4] of float32 are 16"),
    ("contribution", "integers", raw("int32", (1,), 4), "wrong dtype", "int64"),
    ("contribution", "integers", raw("int64", (2,), 16), "wrong size", "[2]"),
    ("error", None, ConfigRecord(), "not a reply", "unexpected"),
]


@pytest.mark.parametrize(("where", "key", "value", "reason", "said"), DEFECTS)
def test_each_fault_of_a_reply_is_a_defect_found_before_memory_is_made(
    where: str, key: str | None, value: Any, reason: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = good_reply()
    if key is not None:
        content[where][key] = value  # type: ignore[index]
    else:
        content.pop(where, None)
        if value is not None:
            content[where] = value
    monkeypatch.setattr(torch, "empty", None)
    found = read(content).contribution
    assert isinstance(found, Defect)
    assert found.reason == reason
    assert said in found.detail
    assert "\n" not in found.detail


def test_missing_arrays_are_a_wrong_layout() -> None:
    for name in ("values", "integers"):
        content = good_reply()
        del content["contribution"][name]  # type: ignore[arg-type]
        found = read(content).contribution
        assert isinstance(found, Defect)
        assert (found.reason, name in found.detail) == ("wrong layout", True)


def test_a_client_cannot_fill_the_server_with_measurements() -> None:
    content = good_reply()
    content["measured"].update({f"m{i}": 1.0 for i in range(1000)})  # type: ignore[call-overload]
    assert read(content).contribution == Defect("wrong measurements", "1002 measurements; at most 64 would do")


SCALARS = st.none() | INT64 | st.floats() | st.text(max_size=5) | st.booleans() | st.lists(INT64, max_size=2)
ARRAYS = st.builds(
    Array,
    st.sampled_from(["float32", "int64", "object", "", "\x00"]),
    st.lists(INT64 | st.sampled_from([1, 4]), max_size=2).map(tuple),
    st.sampled_from(["fedasync.raw", "numpy.ndarray"]),
    st.binary(max_size=40),
)


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_a_client_sends_reading_it_does_not_raise(data: st.DataObject) -> None:
    content = data.draw(st.sampled_from([good_reply(), error_record(3, ValueError("x")), RecordDict()]))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(["contribution", "result", "measured", "error", "more"]))
        record = content.get(name)
        if record is None or data.draw(st.booleans()):
            record = content[name] = data.draw(st.sampled_from([ArrayRecord, ConfigRecord, MetricRecord]))()
        key = data.draw(st.sampled_from([*record, "values", "lease", "samples", "client", "train_s"]))
        value = data.draw(ARRAYS if isinstance(record, ArrayRecord) else SCALARS)
        try:
            record[key] = value
        except TypeError:  # Flower itself does not carry it
            content.pop(name)
    found = read(content).contribution
    assert isinstance(found, Contribution | Defect | ClientFailure)
    if not isinstance(found, Contribution):
        assert "\n" not in str(found)


def test_what_does_not_travel_is_said_where_it_is_sent() -> None:
    for broken, said in (
        (replace(GOOD, values=torch.zeros(4, dtype=torch.complex64)), "complex64"),
        (replace(GOOD, values=[0.0] * 4), "got list"),  # type: ignore[arg-type]
        (replace(GOOD, samples=2**70), "more than 64 bits"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            reply_record(broken, 7, 3, 5, MEASURED)


# What a client raised


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  handed back
        return caught


def test_an_error_arrives_with_its_place_and_the_end_of_its_traceback(over_the_wire: Wire) -> None:
    found = read(over_the_wire(error_record(3, raised(ValueError("a\nb"))))).contribution
    assert isinstance(found, ClientFailure)
    assert (found.client, found.type, found.message, found.file) == (3, "ValueError", "a\nb", __file__)
    assert str(found) == f"client 3: ValueError: a b (test_messages.py, line {found.line})"
    assert f'File "{__file__}", line {found.line}' in found.traceback


class _WithoutWordsError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@given(text=st.text(st.characters(), max_size=300).map(lambda text: text * 20) | st.just("\ud800\x1b[31m"))
def test_any_error_travels_and_is_one_printable_line(text: str, over_the_wire: Wire) -> None:
    for error in (RuntimeError(text), SystemExit(text), raised(KeyError(text)), _WithoutWordsError(text)):
        found = read(over_the_wire(error_record(3, error))).contribution
        assert isinstance(found, ClientFailure)
        assert str(found).isprintable()
        assert max(len(found.message), len(found.traceback)) <= 2000


def test_an_error_of_another_client_is_a_defect() -> None:
    found = read(error_record(2, ValueError("x"))).contribution
    assert isinstance(found, Defect)
    assert found.reason == "wrong client"


# Hello


def test_a_hello_arrives(over_the_wire: Wire) -> None:
    hello = read_hello(over_the_wire(hello_record(3, 10, "fedasync 0.1.0", "a\x1bhost")))
    assert (hello.client, hello.samples, hello.software, hello.host) == (3, 10, "fedasync 0.1.0", "a host")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (RecordDict(), "hello: hello: got nothing"),
        (hello_record(-1, 10, "", ""), "client -1"),
        (hello_record(3, 0, "", ""), "0 samples"),
        (error_record(-1, ValueError("no data\nhere")), "hello: a client without number: ValueError: no data here"),
        (RecordDict({"error": ConfigRecord({"client": "x"})}), "hello: type: got nothing"),
    ],
)
def test_what_is_no_hello_is_refused_in_one_line(content: RecordDict, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read_hello(content)
    assert "\n" not in str(caught.value)
