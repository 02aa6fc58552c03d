"""Local training of many clients in one call, from different versions: exact, and each result its task's alone.

Clients are the lanes of stacked tensors. Lanes meet only in one bucket if their batches have the same number of rows,
which is a function of the client alone; within a bucket a lane's arithmetic does not depend on the others (see
``lanes``). So the bytes of a result are the same in any company, and memory only decides how many go at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import isnan, prod
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedasync.aggregation.model import Contribution, Model
from fedasync.workloads.lanes import lane_count, most_lanes, observe
from fedasync.workloads.optimizer import LocalOptimizer, LocalTraining
from fedasync.workloads.protocol import Task
from fedasync.workloads.schedule import filled, padded_rows, schedule, steps_and_passes
from fedasync.workloads.stacked import StackedGradient
from fedasync.workloads.training import ModuleTrainer

TOLERANCE = 1e-4
"""Relative to how far training moves the model: a trial that differs more is not rounding."""
PITCH = 16
"""Elements; each lane's parameters begin at a multiple of it, so that all lanes lie alike to a vector unit."""


SCHEDULE_BYTES = 64
"""For each sample and epoch of a lane: its place in the order, in the batch, among the rows, and its weight."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """Samples, and which of them each client holds."""

    tensors: tuple[Tensor, ...]
    """[samples, ...] each, on the device that trains."""
    rows: NDArray[np.int64]
    """The rows of client 0, then those of client 1, …"""
    starts: NDArray[np.int64]
    """[clients + 1]: where in ``rows`` each client's begin."""

    @classmethod
    def to_clients(cls, tensors: tuple[Tensor, ...], partition: Sequence[NDArray[Any]]) -> Dealt:
        """The rows of ``partition``, one array a client."""
        counts = [len(rows) for rows in partition]
        return cls(tensors, np.concatenate(partition).astype(np.int64), np.cumsum([0, *counts]))

    def count(self, client: int) -> int:
        """Samples of a client."""
        return int(self.starts[client + 1] - self.starts[client])

    def of(self, client: int) -> tuple[Tensor, ...]:
        """The samples of a client, [n, ...] each."""
        rows = torch.from_numpy(self.rows[self.starts[client] : self.starts[client + 1]])
        return tuple(t.index_select(0, rows.to(t.device)) for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Lane:
    """A task, and the data of its client."""

    data: Dealt
    task: Task


class BatchedTrainer:
    """Trains lanes as ``trainer`` would one by one, up to rounding. Ask ``trial`` first.

    It shares the trainer's module, so they serve one thread together. ``loss``, if given, replaces the trainer's: the
    same numbers, by operations that are faster in lanes.
    """

    def __init__(self, trainer: ModuleTrainer, local: LocalTraining, loss: Callable[..., Tensor] | None = None) -> None:
        names = [entry.name for entry in trainer.layout.entries]
        self._trainer = trainer
        self._local = local
        self._trainable = len(trainer.trainable)
        self._gradient = StackedGradient(
            trainer.module, loss or trainer.loss, trainer.trainable, names[self._trainable :]
        )
        self._padded = True
        """Whether short batches may be filled up: not if the samples of a batch see each other (batch norm)."""

    def trial(self, data: Dealt, model: Model) -> str | None:
        """Train two clients both ways, two batches at most; why lanes cannot be trusted here, or None if they can.

        The clients are made up, so that the verdict does not depend on who has how much: one has a full and a short
        batch, the other, where there is one, a number of samples that is filled up to another.
        """
        name = type(self._trainer.module).__name__
        size = self._local.batch_size
        counts = [size + max(2, size // 2), next((n for n in range(2, size) if padded_rows(n, size) > n), size)]
        small = Dealt.to_clients(data.tensors, [np.arange(n) % len(data.tensors[0]) for n in counts])
        bases = [model, replace(model, values=model.values * 0.9)]
        lanes = [Lane(small, Task(i, base, seed=i)) for i, base in enumerate(bases)]
        own, self._local = self._local, replace(self._local, epochs=1, steps=None)
        try:
            expected: list[Contribution] = []
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernel counts as random, with dropout or without
                one_by_one = observe(lambda: expected.extend(self._single(lane) for lane in lanes))
            if one_by_one.random:
                return f"module {name} draws random numbers in training ({one_by_one.random}), which lanes would mix"
            # Normalisation statistics of a batch must not see the rows that only fill it up.
            ways = (False,) if any(self._carries(e, b) for e, b in zip(expected, bases, strict=True)) else (True, False)
            for self._padded in ways:
                found = self.train(lanes, memory_bytes=0)
                off = max(self._off(*each) for each in zip(found, expected, bases, strict=True))
                if off <= 1:
                    return None
        except Exception as error:  # noqa: BLE001 - whatever a module raises here, it can still train one by one
            line = shorten((str(error).splitlines() or [""])[0], 120, placeholder=" …")
            return f"module {name} cannot be vectorised: {type(error).__name__}: {line}"
        finally:
            self._local = own
        return f"module {name} gives other results in lanes than alone ({off * TOLERANCE:.1g} relative)"

    def train(self, lanes: Sequence[Lane], memory_bytes: int) -> list[Contribution]:
        """Train all lanes; contributions in their order, each in its own memory, on the CPU.

        ``memory_bytes`` bounds what a batch of lanes needs, estimated from above; the smallest batch is always
        allowed. Raises ValueError for a model or control variate that does not fit, and what the module raises.
        """
        if not self._trainer.module.training:
            self._trainer.module.train()
        for model in {id(lane.task.model): lane.task.model for lane in lanes}.values():
            self._trainer.check(model)
        buckets: dict[Hashable, list[int]] = {}
        counts = np.array([lane.data.count(lane.task.client) for lane in lanes], dtype=np.int64)
        for i, (lane, count) in enumerate(zip(lanes, counts.tolist(), strict=True)):
            if lane.task.control is not None:
                self._trainer.check_control(lane.task.control)
            rows = padded_rows(count, self._local.batch_size) if self._padded else count
            key = (rows, lane.task.proximal_mu, lane.task.control is None, lane.task.steps)
            buckets.setdefault(key, []).append(i)
        results: dict[int, Contribution] = {}
        for members in buckets.values():
            members.sort(key=lambda i: -counts[i])
            at_most = self._lanes_at_a_time(lanes[members[0]], memory_bytes)
            for start in range(0, len(members), at_most):
                chunk = members[start : start + at_most]
                trained = self._train_chunk([lanes[i] for i in chunk], counts[chunk], memory_bytes)
                results.update(zip(chunk, trained, strict=True))
        return [results[i] for i in range(len(lanes))]

    def _row_counts(self, count: int) -> list[int]:
        """Rows of the batches of a client with ``count`` samples, the largest first."""
        size = self._local.batch_size
        if self._padded:
            return [padded_rows(count, size)]
        return [min(count, size)] + ([count % size] if count > size and count % size else [])

    def _quantum(self, data: Dealt, count: int) -> int:
        return max(self._gradient.traits(rows, data.tensors).quantum for rows in self._row_counts(count))

    def _lanes_at_a_time(self, lane: Lane, memory_bytes: int) -> int:
        """How many lanes like this one fit: stacks of parameters, what a pass allocates, a batch of samples."""
        count = lane.data.count(lane.task.client)
        rows = self._row_counts(count)[0]
        state = self._trainer.layout.parameters * self._trainer.dtype.itemsize
        copies = 5 + bool(lane.task.proximal_mu) + bool(self._local.momentum) + 2 * (self._local.optimizer == "adam")
        needed = copies * state + self._gradient.traits(rows, lane.data.tensors).lane_bytes
        passes = int(steps_and_passes(np.array([count]), self._local_of(lane.task))[1][0])
        needed += rows * _sample_bytes(lane.data) + SCHEDULE_BYTES * passes * count
        # A quarter is left for samples gathered ahead.
        return most_lanes(3 * memory_bytes // (4 * needed), self._quantum(lane.data, count))

    def _train_chunk(self, lanes: Sequence[Lane], counts: NDArray[np.int64], memory_bytes: int) -> list[Contribution]:
        """Lanes of one bucket, the longest first."""
        local, tasks, data = self._local_of(lanes[0].task), [lane.task for lane in lanes], lanes[0].data
        rows = self._row_counts(int(counts[0]))[0]
        quantum = self._quantum(data, int(counts[0]))
        width = lane_count(len(lanes), quantum)
        plan = schedule([t.seed for t in tasks], counts, local, rows, self._padded)
        stack = self._stack([t.model for t in tasks], width)
        x = [t[: len(lanes)] for t in stack[: self._trainable]]
        base = [t.clone() for t in x] if tasks[0].proximal_mu else []
        optimizer = LocalOptimizer.fresh(local, x, self._controls(tasks), tasks[0].proximal_mu, base)
        ahead = max(1, memory_bytes // (4 * width * rows * _sample_bytes(data)))
        weights = torch.from_numpy(filled(plan.weights, width)).to(self._trainer.device, self._trainer.dtype)
        traits = {n: self._gradient.traits(n, data.tensors) for n in set(plan.rows)}
        active, tensors = len(lanes), stack
        for t in range(len(plan.active)):
            step = min(t, len(plan.samples) - 1)
            if plan.active[t] < active:
                active = plan.active[t]
                width = lane_count(active, quantum)
                tensors = [each[:width] for each in stack]
                optimizer = optimizer.prefix(active)
            if step % ahead == 0 and step == t:
                batches = _gather(lanes[:active], filled(plan.samples[step : step + ahead, :active], width))
            n = plan.rows[t]
            # Short batches are copied, so that one shape always lies the same way.
            batch = [each[step % ahead, :width, :n].contiguous() for each in batches]
            gradients = self._gradient(tensors, batch, weights[step, :width, :n].contiguous(), traits[n])
            optimizer.step(gradients if active == width else [gradient[:active] for gradient in gradients])
        return self._contributions(stack, counts, local)

    def _local_of(self, task: Task) -> LocalTraining:
        return self._local if task.steps is None else replace(self._local, steps=task.steps)

    def _stack(self, models: Sequence[Model], width: int) -> list[Tensor]:
        """The tensors of the models [width, ...] in the layout's order, the first model repeated at the end."""
        device = self._trainer.device
        values = torch.stack([m.values.detach() for m in models]).to(device)
        carried = [m.integers for m in models if m.integers is not None]
        integers = torch.stack(carried).to(device) if carried else None
        stack = []
        for i, entry in enumerate(self._trainer.layout.entries):
            flat = values if integers is None or entry.averaged else integers
            # Buffers stand without gaps, because batch norm writes those of all lanes as one vector.
            gap = -entry.size % PITCH if i < self._trainable else 0
            place = flat.new_empty(width, entry.size + gap)[:, : entry.size]
            place[: len(models)] = flat[:, entry.start : entry.start + entry.size]
            if width > len(models):
                place[len(models) :] = place[0]
            stack.append(place.view(width, *entry.shape))
        return stack

    def _controls(self, tasks: Sequence[Task]) -> list[Tensor]:
        controls = [task.control.detach() for task in tasks if task.control is not None]
        if not controls:
            return []
        entries = self._trainer.layout.entries[: self._trainable]
        sizes = [e.size for e in entries]
        pieces = torch.split(torch.stack(controls)[:, : sum(sizes)].to(self._trainer.device), sizes, dim=1)
        return [piece.view(len(tasks), *e.shape) for piece, e in zip(pieces, entries, strict=True)]

    def _contributions(
        self, stack: Sequence[Tensor], counts: NDArray[np.int64], local: LocalTraining
    ) -> list[Contribution]:
        lanes = len(counts)
        moved = [local.step_size_sum(steps) for steps in steps_and_passes(counts, local)[0].tolist()]
        flat: dict[bool, list[Tensor]] = {True: [], False: []}
        for entry, tensor in zip(self._trainer.layout.entries, stack, strict=True):
            flat[entry.averaged].append(tensor[:lanes].reshape(lanes, entry.size))
        values = torch.cat(flat[True], dim=1).cpu().unbind()
        integers = torch.cat(flat[False], dim=1).cpu().unbind() if flat[False] else [None] * lanes
        return [
            Contribution(v.clone(), "parameters", n, None if q is None else q.clone(), far)
            for v, q, n, far in zip(values, integers, counts.tolist(), moved, strict=True)
        ]

    def _single(self, lane: Lane) -> Contribution:
        return self._trainer.train(lane.task, lane.data.of(lane.task.client), self._local)

    def _carries(self, contribution: Contribution, base: Model) -> bool:
        """Whether training wrote buffers."""
        start = sum(entry.size for entry in self._trainer.layout.entries[: self._trainable])
        return not torch.equal(contribution.values[start:], base.values[start:]) or (
            base.integers is not None and not torch.equal(contribution.integers, base.integers)  # type: ignore[arg-type]
        )

    def _off(self, found: Contribution, expected: Contribution, base: Model) -> float:
        """How far a lane's result is from what it should be, in units of what is tolerated; ∞ for NaN."""
        if base.integers is not None and not torch.equal(found.integers, expected.integers):  # type: ignore[arg-type]
            return float("inf")
        start = sum(entry.size for entry in self._trainer.layout.entries[: self._trainable])
        worst = 0.0
        for part in (slice(0, start), slice(start, None)):
            difference = (found.values[part] - expected.values[part]).norm()
            moved = (expected.values[part] - base.values[part]).norm()
            rounding = 16 * torch.finfo(self._trainer.dtype).eps * expected.values[part].norm()
            ratio = float(difference / (TOLERANCE * moved + rounding + torch.finfo(self._trainer.dtype).tiny))
            worst = max(worst, float("inf") if isnan(ratio) else ratio)
        return worst


def _sample_bytes(data: Dealt) -> int:
    return sum(prod(t.shape[1:]) * t.element_size() for t in data.tensors)


def _gather(lanes: Sequence[Lane], places: NDArray[np.int64]) -> list[Tensor]:
    """The samples at ``places`` [steps, width, rows] of the lanes' clients; lanes beyond the last are the first."""
    width = places.shape[1]
    owners = [*lanes, *[lanes[0]] * (width - len(lanes))]
    columns_of: dict[int, list[int]] = {}
    for i, lane in enumerate(owners):
        columns_of.setdefault(id(lane.data), []).append(i)
    out: list[Tensor] = []
    for columns in columns_of.values():
        data = owners[columns[0]].data
        starts = data.starts[[owners[i].task.client for i in columns]]
        mine = places if len(columns) == width else places[:, columns]
        rows = torch.from_numpy(data.rows[mine + starts[:, None]])
        for k, tensor in enumerate(data.tensors):
            taken = tensor.index_select(0, rows.reshape(-1).to(tensor.device)).view(*rows.shape, *tensor.shape[1:])
            if len(columns) == width:
                out.append(taken)
                continue
            if k == len(out):
                out.append(taken.new_empty(places.shape + tensor.shape[1:]))
            out[k][:, columns] = taken
    return out
