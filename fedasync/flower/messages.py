"""What server and clients send each other: tasks and replies as Flower's records, and back.

Sizes are checked before memory is made, a vector is copied once on each side, and nothing is unpickled. Values are
looked at where a contribution is taken over (``aggregation.check``), not here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from numbers import Integral
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedasync.aggregation.check import Defect
from fedasync.aggregation.model import Contribution, Entry, Form, Layout, Model
from fedasync.core import Lease
from fedasync.flower.failures import ClientFailure, UnfitError, one_line
from fedasync.flower.vectors import FLOATS, dtype_name, packed, unpacked
from fedasync.workloads.protocol import Task

if TYPE_CHECKING:
    import torch

__all__ = [
    "ClientFailure",
    "Hello",
    "Reply",
    "Sent",
    "error_record",
    "hello_record",
    "read_hello",
    "read_reply",
    "read_task",
    "reply_record",
    "task_record",
]

MOST_MEASURES = 64
"""What a reply may tell of its work."""
MOST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Sent:
    """What the server remembers of a task under way."""

    lease: Lease
    node_id: int
    message_id: str
    sent_s: float
    layout: Layout
    """Of the model that was sent, as is ``dtype``."""
    dtype: torch.dtype
    most_samples: int
    """Training samples that the client may claim."""
    sent_bytes: int = 0
    """Of all arrays."""


@dataclass(frozen=True)
class Reply:
    """What came back: a contribution, or why there is none that could be used."""

    contribution: Contribution | Defect | ClientFailure
    measured: Mapping[str, float]
    """``train_s``, ``wall_s`` and what else the client measured; empty without a contribution."""


@dataclass(frozen=True)
class Hello:
    """Who a node is, in its own words."""

    client: int
    samples: int
    """Training samples of the client."""
    software: str
    host: str


# Tasks


def task_record(task: Task, lease: Lease) -> RecordDict:
    """A task as it is sent. Raises TypeError for a model whose dtype does not travel."""
    model = task.model
    content = RecordDict({"model": packed(model.values, model.integers)})
    if task.control is not None:
        content["control"] = packed(task.control)
    told: dict[str, Any] = {
        "lease": lease.id,
        "client": task.client,
        "version": lease.base_version,
        "seed": task.seed,
        "layout": json.dumps(
            [(e.name, e.shape, e.start, e.averaged, e.statistic) for e in model.layout.entries], separators=(",", ":")
        ),
    }
    if task.proximal_mu:
        told["proximal_mu"] = float(task.proximal_mu)
    if task.steps is not None:
        told["steps"] = task.steps
    content["task"] = ConfigRecord(told)
    return content


def read_task(content: RecordDict) -> tuple[Task, int, int]:
    """A task, its lease's number and its version. Raises ValueError for what is no task."""
    try:
        _only(content, {"model", "control", "task"})
        told = _record(content, "task", ConfigRecord)
        client, seed = _value(told, "client", int), _value(told, "seed", int)
        layout = _layout(_value(told, "layout", str))
        arrays = _record(content, "model", ArrayRecord)
        dtype = arrays["values"].dtype if "values" in arrays else ""
        if dtype not in FLOATS:
            raise UnfitError("wrong dtype", f"values of {short(dtype)}; one of {', '.join(FLOATS)} would do")
        values, integers = unpacked(arrays, dtype, layout.parameters, layout.carried)
        control = None
        if "control" in content:
            control, _ = unpacked(_record(content, "control", ArrayRecord), dtype, layout.parameters, 0)
        mu = _value(told, "proximal_mu", float) if "proximal_mu" in told else 0.0
        steps = _value(told, "steps", int) if "steps" in told else None
        task = Task(client, Model(values, layout, integers), seed, mu, control, steps)
        return task, _value(told, "lease", int), _value(told, "version", int)
    except UnfitError as error:
        raise ValueError(f"task: {error}") from None


def _layout(text: str) -> Layout:
    try:
        entries = [
            Entry(str(name), tuple(map(int, shape)), int(start), bool(averaged), bool(statistic))
            for name, shape, start, averaged, statistic in json.loads(text)
        ]
    except (ValueError, TypeError, OverflowError) as error:
        raise UnfitError("wrong layout", f"the layout cannot be read: {error}") from None
    if any(size < 0 for entry in entries for size in (*entry.shape, entry.start)):
        raise UnfitError("wrong layout", "the layout has a negative size")
    return Layout(tuple(entries))


# Replies


def reply_record(
    contribution: Contribution, lease_id: int, client: int, version: int, measured: Mapping[str, float]
) -> RecordDict:
    """A contribution as it is sent, whatever its numbers are worth. Raises TypeError and ValueError for what cannot."""
    size = contribution.step_size_sum
    told: dict[str, Any] = {"lease": lease_id, "client": client, "version": version, "form": contribution.form}
    told["samples"] = _number("samples", contribution.samples)
    if size is not None:
        told["step_size_sum"] = _number("step_size_sum", size)
    return RecordDict(
        {
            "contribution": packed(contribution.values, contribution.integers),
            "result": ConfigRecord(told),
            "measured": MetricRecord({name: float(value) for name, value in measured.items()}),
        }
    )


def error_record(client: int, error: BaseException) -> RecordDict:
    """What a client raised, as it is sent."""
    return RecordDict({"error": ConfigRecord(asdict(ClientFailure.of(client, error)))})


def read_reply(content: RecordDict, lease: Lease, layout: Layout, dtype: torch.dtype, most_samples: int) -> Reply:
    """What a client sent for a lease from a model of ``layout`` and ``dtype``; it may claim 1 … ``most_samples``.

    Whatever was sent, nothing is raised: a Defect says what is wrong. Finite values are not checked here.
    """
    try:
        if "error" in content:
            failure = _failure(content)
            if failure.client != lease.worker:
                raise UnfitError("wrong client", f"an error of client {failure.client}, not of {lease.worker}")
            return Reply(failure, {})
        _only(content, {"contribution", "result", "measured"})
        arrays = _record(content, "contribution", ArrayRecord)
        result = _record(content, "result", ConfigRecord)
        measured = _measured(_record(content, "measured", MetricRecord))
        for name, expected in (("lease", lease.id), ("client", lease.worker), ("version", lease.base_version)):
            if (got := _value(result, name, int)) != expected:
                raise UnfitError(f"wrong {name}", f"{name} {got} in the reply to lease {lease.id}, not {expected}")
        form, samples, size = result.get("form"), result.get("samples"), result.get("step_size_sum")
        if form not in ("parameters", "delta"):
            raise UnfitError("unknown form", f"form {short(form)}; 'parameters' or 'delta' would do")
        if type(samples) is not int or samples < 1:
            raise UnfitError("no samples", f"samples = {short(samples)}; an integer ≥ 1 would do")
        if samples > most_samples:
            raise UnfitError("too many samples", f"samples = {samples}; client {lease.worker} has {most_samples}")
        if size is not None and not (_finite(size) and size > 0):
            raise UnfitError(
                "wrong step sizes", f"step_size_sum = {short(size)}; a finite number > 0, or none, would do"
            )
        values, integers = unpacked(arrays, dtype_name(dtype), layout.parameters, layout.carried)
    except UnfitError as found:
        return Reply(found.defect, {})
    return Reply(Contribution(values, cast(Form, form), samples, integers, size), measured)


def _failure(content: RecordDict) -> ClientFailure:
    _only(content, {"error"})
    told = _record(content, "error", ConfigRecord)
    texts = {name: _value(told, name, str) for name in ("type", "message", "file", "traceback")}
    return ClientFailure(_value(told, "client", int), line=_value(told, "line", int), **texts).cut()


def _measured(record: MetricRecord) -> dict[str, float]:
    if len(record) > MOST_MEASURES:
        raise UnfitError("wrong measurements", f"{len(record)} measurements; at most {MOST_MEASURES} would do")
    found: dict[str, float] = {}
    for name, value in record.items():
        if not _finite(value):
            raise UnfitError("wrong measurements", f"{short(name)} = {short(value)}; a finite number would do")
        found[name] = float(value)
    for name in ("train_s", "wall_s"):
        if found.get(name, -1.0) < 0:
            raise UnfitError("wrong measurements", f"{name} = {found.get(name)}; a number ≥ 0 would do")
    return found


# Who is there


def hello_record(client: int, samples: int, software: str, host: str) -> RecordDict:
    """What a node says of itself."""
    return RecordDict({"hello": ConfigRecord(asdict(Hello(client, samples, one_line(software), one_line(host))))})


def read_hello(content: RecordDict) -> Hello:
    """What a node said of itself. Raises ValueError, also when it says what went wrong instead."""
    try:
        if "error" in content:
            raise UnfitError("", str(_failure(content)))
        _only(content, {"hello"})
        told = _record(content, "hello", ConfigRecord)
        client, samples = _value(told, "client", int), _value(told, "samples", int)
        if client < 0 or samples < 1:
            raise UnfitError("", f"client {client} with {samples} samples; a client ≥ 0 with samples ≥ 1 would do")
        return Hello(client, samples, one_line(_value(told, "software", str)), one_line(_value(told, "host", str)))
    except UnfitError as error:
        raise ValueError(f"hello: {error}") from None


# Records and what lies in them

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
Value = TypeVar("Value", int, float, str)


def _only(names: Iterable[str], known: set[str]) -> None:
    if strange := sorted(set(names) - known):
        raise UnfitError("not a reply", f"unexpected {short(strange)}; {', '.join(sorted(known))} would do")


def _record(content: RecordDict, name: str, kind: type[Record]) -> Record:
    found = content.get(name)
    if not isinstance(found, kind):
        got = "nothing" if found is None else type(found).__name__
        raise UnfitError("not a reply", f"{name}: got {got}; of type {kind.__name__} it would do")
    return found


def _value(record: ConfigRecord, name: str, kind: type[Value]) -> Value:
    found = record.get(name)
    if type(found) is not kind:  # True is no integer here
        got = "nothing" if found is None else f"{type(found).__name__} {short(found)}"
        raise UnfitError("not a reply", f"{name}: got {got}; of type {kind.__name__} it would do")
    return found


def _finite(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -inf < value < inf


def _number(name: str, value: Any) -> int | float | bool:
    """A number as Flower carries it: numpy's become Python's."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        if not -MOST_INTEGER <= int(value) <= MOST_INTEGER:
            raise ValueError(f"{name} = {short(value)} has more than 64 bits")
        return int(value)
    return float(value)
