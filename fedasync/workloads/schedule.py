"""Which of its samples each lane takes at each step, for many lanes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.workloads.optimizer import LocalTraining
from fedasync.workloads.order import orders


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of lanes that are sorted by their number of steps, most first."""

    samples: NDArray[np.int64]
    """[steps, lanes, rows]: places among the lane's own samples. One step stands for all if all take the same."""
    weights: NDArray[np.float64]
    """[steps, lanes, rows]: 1/n for the n samples of a batch, 0 for a row that only fills it up."""
    active: Sequence[int]
    """Lanes that still train, for each step."""
    rows: Sequence[int]
    """Leading rows that hold the batch, for each step."""


def steps_and_passes(counts: NDArray[np.int64], local: LocalTraining) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Optimiser steps of clients with ``counts`` samples, and passes over the samples, the last maybe cut short."""
    a_pass = -(-counts // local.batch_size)
    steps = np.full_like(counts, local.steps) if local.steps is not None else local.epochs * a_pass
    return steps, -(-steps // a_pass)


def padded_rows(samples: int, batch_size: int) -> int:
    """Rows of the batches of a client: a power of two for one that could not fill half a batch, else a full batch.

    A function of the client alone, because the number of rows changes the rounding.
    """
    return batch_size if 2 * samples > batch_size else 1 << (samples - 1).bit_length()


def schedule(
    seeds: Sequence[int], counts: NDArray[np.int64], local: LocalTraining, rows: int, padded: bool
) -> Schedule:
    """The schedule of lanes with ``seeds`` and ``counts`` [lanes], the counts descending.

    Batches are cut from the orders of ``orders``, the last of an epoch may be short; a client with one batch takes
    it as it lies. With ``padded`` every batch has ``rows`` rows, short ones are filled up with their first sample.
    Without, all counts must be equal, and short batches are short.
    """
    batch_size = local.batch_size
    everything = bool(counts[0] <= batch_size)
    an_epoch = -(-counts // batch_size)
    total, passes = steps_and_passes(counts, local)
    t = np.arange(1 if everything else total[0])
    start = t % an_epoch[:, None] * batch_size
    place = start[:, :, None] + np.arange(rows)
    real = place < counts[:, None, None]
    place = np.where(real, place, start[:, :, None])
    if not everything:
        epochs = int(passes.max())
        order = orders(np.array(seeds, dtype=np.uint64), epochs, counts)
        order[counts <= batch_size] = np.arange(order.shape[2])
        epoch = np.minimum(t // an_epoch[:, None], epochs - 1)
        place = order[np.arange(len(counts))[:, None, None], epoch[:, :, None], place]
    weights = real / real.sum(axis=2, keepdims=True)
    return Schedule(
        place.transpose(1, 0, 2),
        weights.transpose(1, 0, 2),
        np.searchsorted(-total, -np.arange(total[0]), side="left").tolist(),
        [rows] * int(total[0]) if padded else (real[0].sum(axis=1).tolist() * (int(total[0]) if everything else 1)),
    )


def filled(lanes: NDArray[Any], count: int) -> NDArray[Any]:
    """[steps, count, rows]: repeats the first of the lanes [steps, lanes, rows] up to ``count``."""
    missing = count - lanes.shape[1]
    if missing == 0:
        return lanes
    return np.concatenate([lanes, np.repeat(lanes[:, :1], missing, axis=1)], axis=1)
