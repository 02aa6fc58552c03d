"""The event log as a trace that Perfetto (https://ui.perfetto.dev) opens.

Source: Trace Event Format, "JSON Object Format": complete events ``X``, instants ``i``, counters ``C``, metadata
``M``; times in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.report.measures import leases
from fedasync.runs.run import write

if TYPE_CHECKING:
    import polars as pl

_PROCESS = 1
_SERVER = 0


def trace_events(events: pl.DataFrame) -> dict[str, Any]:
    """The Trace Event Format of a run's ``events`` table: ``{"displayTimeUnit": ..., "traceEvents": [...]}``.

    Every admitted lease is one slice on its worker's track, from admission to when its work stopped, with lease,
    base version, staleness, outcome and reason as arguments; work still in flight ends at the log's last time. A
    worker with several leases at a time has as many tracks. Versions are instants on the server's track; a counter
    holds the leases in flight and buffered. Times are whole microseconds of virtual time; the order is a function
    of the log alone.
    """
    table = leases(events)
    places = sorted(set(zip(table["worker"], table["track"], strict=True)))
    threads = {place: i for i, place in enumerate(places, start=_SERVER + 1)}

    out: list[dict[str, Any]] = [_named("process_name", _SERVER, name="fedasync")]
    names = {
        _SERVER: "server",
        **{i: f"worker {w}" + (f" ({t + 1})" if t else "") for (w, t), i in threads.items()},
    }
    for thread, name in names.items():
        out.append(_named("thread_name", thread, name=name))
        out.append(_named("thread_sort_index", thread, sort_index=thread))
    for row in table.iter_rows(named=True):
        begin = _us(row["start_s"])
        arguments = {
            "lease": row["lease"],
            "base_version": row["base_version"],
            "staleness": row["staleness"],
            "outcome": row["outcome"],
            "reason": row["reason"],
        }
        out.append(
            {
                "ph": "X",
                "name": f"lease {row['lease']}",
                "cat": row["outcome"],
                "pid": _PROCESS,
                "tid": threads[row["worker"], row["track"]],
                "ts": begin,
                # The difference of rounded times: neighbours that touch still touch, and never overlap.
                "dur": _us(row["end_s"]) - begin,
                "args": {name: value for name, value in arguments.items() if value is not None},
            }
        )
    out.extend(_versions_and_counts(events))
    return {"displayTimeUnit": "ms", "traceEvents": out}


def write_trace(events: pl.DataFrame, path: Path) -> Path:
    """Write `trace_events` as JSON and return the path."""
    write(path, json.dumps(trace_events(events), allow_nan=False, separators=(",", ":")).encode())
    return path


def _versions_and_counts(events: pl.DataFrame) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    in_flight = buffered = 0
    delivered: set[int] = set()
    counts: dict[int, tuple[int, int]] = {}
    for time_s, kind, lease, version in events.select("time_s", "kind", "lease", "version").iter_rows():
        match kind:
            case "admitted":
                in_flight += 1
            case "delivered":
                in_flight, buffered = in_flight - 1, buffered + 1
                delivered.add(lease)
            case "consumed" | "rejected" | "failed" | "cancelled":
                if lease in delivered:
                    delivered.remove(lease)
                    buffered -= 1
                elif kind != "consumed":
                    in_flight -= 1
            case "committed":
                out.append(
                    {
                        "ph": "i",
                        "s": "t",
                        "name": f"version {version}",
                        "cat": "committed",
                        "pid": _PROCESS,
                        "tid": _SERVER,
                        "ts": _us(time_s),
                        "args": {"version": version},
                    }
                )
        # One value an instant: what holds after all that happens in it.
        counts[_us(time_s)] = (in_flight, buffered)
    for time, (flying, waiting) in counts.items():
        out.append(
            {
                "ph": "C",
                "name": "leases",
                "pid": _PROCESS,
                "tid": _SERVER,
                "ts": time,
                "args": {"in flight": flying, "buffered": waiting},
            }
        )
    return out


def _named(kind: str, thread: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": arguments}


def _us(time_s: float) -> int:
    return round(time_s * 1e6)
