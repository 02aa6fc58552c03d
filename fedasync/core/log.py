"""The event log: rows of eight machine numbers, packed in chunks, no Python object kept for an event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from struct import Struct

KINDS = (
    "admitted",
    "delivered",
    "rejected",
    "failed",
    "cancelled",
    "consumed",
    "ignored",
    "committed",
    "published",
)
ADMITTED, DELIVERED, REJECTED, FAILED, CANCELLED, CONSUMED, IGNORED, COMMITTED, PUBLISHED = range(len(KINDS))

NONE = -1
"""Stands for "no lease", "no worker", "no version", "no staleness", "no reason" in an integer column."""

COLUMNS = {
    "time_s": "d",
    "kind": "b",
    "lease": "q",
    "worker": "q",
    "base_version": "i",
    "version": "i",
    "staleness": "i",
    "reason": "i",
}
"""Column → type code of the struct module: a packed row is these, little-endian, without gaps (41 bytes)."""

CHUNK = 4096
"""Rows gathered before they are packed."""

Row = tuple[float, int, int, int, int, int, int, int]
"""time_s, kind, lease, worker, base_version, version, staleness, reason's code."""

_FORMAT = "".join(COLUMNS.values())
_ROW, _CHUNK = Struct("<" + _FORMAT), Struct("<" + _FORMAT * CHUNK)


class EventLog:
    """Rows in the order in which things happened.

    ``sink`` receives them packed, some thousands at a time; without one they stay in ``packed``. ``reasons`` holds the
    texts that the reason column indexes.
    """

    def __init__(self, sink: Callable[[bytes], object] | None = None) -> None:
        self.reasons: list[str] = []
        self.packed: list[bytes] = []
        self._sink = self.packed.append if sink is None else sink
        self._codes: dict[str, int] = {}
        self._rows: list[Row] = []
        self._cut = 0
        self.append = self._rows.append
        """Add a row. Whoever adds many calls ``pack`` now and then."""

    def __len__(self) -> int:
        return self._cut + len(self._rows)

    def pack(self) -> None:
        """Pack what was gathered, if that is much."""
        if len(self._rows) >= CHUNK:
            self._hand_over(CHUNK, _CHUNK)

    def flush(self) -> None:
        """Pack all that was gathered."""
        self.pack()
        if self._rows:
            self._hand_over(len(self._rows), Struct("<" + _FORMAT * len(self._rows)))

    def _hand_over(self, count: int, struct: Struct) -> None:
        for first in range(0, len(self._rows) - count + 1, count):
            self._sink(struct.pack(*chain.from_iterable(self._rows[first : first + count])))
            self._cut += count
        del self._rows[: len(self._rows) // count * count]

    def code(self, reason: str) -> int:
        """The number that stands for a reason."""
        found = self._codes.get(reason)
        if found is None:
            found = self._codes[reason] = len(self.reasons)
            self.reasons.append(reason)
        return found

    def rows(self) -> Iterator[Row]:
        """Every row that was kept, in order (none when a sink took them)."""
        self.flush()
        for chunk in self.packed:
            yield from _ROW.iter_unpack(chunk)
