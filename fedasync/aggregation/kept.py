"""What a server holds between two calls, a contribution and versions, and both as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedasync.aggregation.model import Entry, Layout, Model
from fedasync.aggregation.state_codec import Pool, Stored, plain, restored
from fedasync.aggregation.update import Input

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {f"{Input.__module__}.{Input.__qualname__}": Input}


@dataclass(slots=True)
class Kept:
    """A checked contribution as the update sees it; staleness and worker are known once it is consumed."""

    input: Input
    integers: Tensor | None
    written: int
    """Count of writes to the values (torch's version counter) when they were taken over."""
    statistics: list[Tensor]
    """The client's own, where the update wants deltas."""

    def plain(self, pool: Pool) -> Any:
        return plain([self.input, self.integers, self.statistics], pool, KINDS)

    @classmethod
    def restored(cls, found: Any, stored: Stored) -> Kept:
        seen, integers, statistics = restored(found, stored, KINDS)
        return cls(seen, integers, seen.values._version, statistics)


def plain_layout(layout: Layout) -> list[list[Any]]:
    return [[e.name, list(e.shape), e.start, e.averaged, e.statistic] for e in layout.entries]


def restored_layout(found: Sequence[Sequence[Any]]) -> Layout:
    return Layout(tuple(Entry(name, tuple(shape), *rest) for name, shape, *rest in found))


class Versions:
    """Versions of one layout as plain data, each once, known by its place."""

    def __init__(self, pool: Pool) -> None:
        self.plain: list[Any] = []
        self._pool = pool
        self._places: dict[int, int] = {}

    def place(self, model: Model) -> int:
        found = self._places.get(id(model))
        if found is None:
            found = self._places[id(model)] = len(self.plain)
            self.plain.append(plain([model.values, model.integers], self._pool, {}))
        return found


def restored_versions(found: Sequence[Any], layout: Layout, stored: Stored) -> list[Model]:
    pairs = [restored(each, stored, {}) for each in found]
    return [Model(values, layout, integers) for values, integers in pairs]


def by_lease(found: Sequence[Sequence[Any]]) -> Mapping[int, Any]:
    """Pairs as JSON keeps them: its keys are texts only."""
    return {int(lease_id): value for lease_id, value in found}
