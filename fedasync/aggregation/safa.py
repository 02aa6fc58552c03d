"""SAFA (Wu et al., IEEE TC 2021): the model is the mean of a cache with one model a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Input, Inputs
from fedasync.core.bounds import check_integer

if TYPE_CHECKING:
    from torch import Tensor


class Cached(NamedTuple):
    """A client's model [P], its samples, and the version that it started from."""

    values: Tensor
    samples: int
    base_version: int


class Cache(NamedTuple):
    """The models of the clients that have delivered, and one model [P] for all others: w_0 at first; its version."""

    entries: dict[int, Cached]
    start: Tensor
    start_version: int


@dataclass(frozen=True, slots=True)
class CacheMean:
    """w ← Σ_all (n_k/n)·cache_k, after drafted models entered the cache and deprecated entries became w.

    The undrafted enter it afterwards.
    An entry is deprecated whose base is more than ``lag`` versions old. A client that has never delivered has w_0 for
    its entry, and counts with the mean of the known sample counts (ours: the authors know all counts beforehand).
    """

    lag: int
    wants: Form = "parameters"

    def __post_init__(self) -> None:
        check_integer("safa: lag", self.lag, 0)

    def init(self, values: Tensor) -> Cache:
        return Cache({}, values.clone(), 0)

    def apply(self, values: Tensor, state: Cache, inputs: Inputs) -> Cache:
        entries, version = state.entries, inputs.version
        for x in inputs.entering:
            _enter(entries, x, version)
        former = values.clone()
        if version - state.start_version > self.lag:
            state = state._replace(start=former, start_version=version)
        known = sum(entry.samples for entry in entries.values())
        missing = inputs.clients - len(entries)
        total = known + missing * known / len(entries)
        values.copy_(state.start).mul_(missing * known / len(entries) / total)
        for entry in entries.values():
            deprecated = version - entry.base_version > self.lag
            values.add_(former if deprecated else entry.values, alpha=entry.samples / total)
        for worker, entry in entries.items():
            if version - entry.base_version > self.lag:
                entries[worker] = Cached(former, entry.samples, version)
        for x in inputs.undrafted:
            _enter(entries, x, version)
        return state


def _enter(entries: dict[int, Cached], x: Input, version: int) -> None:
    entries[x.worker] = Cached(x.values.clone(), x.samples, version - x.staleness)
