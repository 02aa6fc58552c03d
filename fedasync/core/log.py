"""The event log, by column: eight machine numbers a row, no Python object kept for an event."""

from __future__ import annotations

from array import array

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

CHUNK = 4096
"""Rows gathered as tuples before they are cut into columns: one append a row instead of eight."""

_TYPES = {
    "time_s": "d",
    "kind": "b",
    "lease": "q",
    "worker": "q",
    "base_version": "q",
    "version": "q",
    "staleness": "q",
    "reason": "q",
}


class EventLog:
    """Rows appended by the coordinator, in the order in which things happened.

    ``columns`` maps each name to its array; ``reasons`` holds the texts that the reason column indexes.
    """

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._codes: dict[str | None, int] = {None: NONE}
        self._columns: dict[str, array[float] | array[int]] = {name: array(code) for name, code in _TYPES.items()}
        self._rows: list[tuple[float, int, int, int, int, int, int, int]] = []

    def __len__(self) -> int:
        return len(self._columns["time_s"]) + len(self._rows)

    def append(
        self,
        time_s: float,
        kind: int,
        lease: int,
        worker: int,
        base_version: int,
        version: int,
        staleness: int,
        reason: str | None = None,
    ) -> None:
        code = NONE if reason is None else self._code(reason)
        self._rows.append((time_s, kind, lease, worker, base_version, version, staleness, code))
        if len(self._rows) >= CHUNK:
            self._cut()

    @property
    def columns(self) -> dict[str, array[float] | array[int]]:
        self._cut()
        return self._columns

    def _code(self, reason: str) -> int:
        if reason not in self._codes:
            self._codes[reason] = len(self.reasons)
            self.reasons.append(reason)
        return self._codes[reason]

    def _cut(self) -> None:
        for column, values in zip(self._columns.values(), zip(*self._rows, strict=True), strict=False):
            column.extend(values)
        self._rows.clear()
