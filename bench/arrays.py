"""CPU-seconds per arrival at the server's arrays, beside what the same bytes cost at the speed of memory.

    python bench/arrays.py
    python bench/arrays.py --quick --out arrays.json
    python bench/arrays.py --large                     # and 10^8 parameters: needs 6 GB of memory

An arrival is what a runtime does with one contribution: ``receive``, ``apply`` when it makes a step ready, ``publish``
and a new lease. Leases in flight hold former versions, so none can be written in place. The floor is the time in which
a triad, a ← b + s·c out of place over vectors of the same length, moves as many bytes; both run in turn in this process
on one thread. Bytes are those that the operations name, in streams of P values read or written, not those that caches
move. *Naive* is the same rule as one would write it in torch: check, copy, add up what the window or buffer holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.model import Contribution, Model
from fedasync.aggregation.server import Server
from fedasync.core import Arrival, Lease, Step

FLOAT_BYTES = 4
NEVER = 10**9
LARGE = 10**8


def naive_mean(w: Tensor, xs: Sequence[Tensor]) -> Tensor:
    mean = xs[0].clone()
    for x in xs[1:]:
        mean += x
    return mean.div_(len(xs))


def naive_deltas(w: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    moved = w.clone()
    for delta in deltas:
        moved += delta / len(deltas)
    return moved


@dataclass(frozen=True)
class Rule:
    """What is measured.

    ``bytes_named`` says which streams an arrival reads and writes, ``streams(K)`` how many of P values each they are;
    ``naive`` makes the next version from the current one and K contributions.
    """

    name: str
    update: Any
    window: bool
    bytes_named: str
    streams: Callable[[int], float]
    naive: Callable[[Tensor, Sequence[Tensor]], Tensor]


RULES = (
    Rule("FedFa", WindowMean(NEVER), True, "check x; w, x, x_old → w", lambda K: 1 + 4, naive_mean),
    Rule("FedFa, afresh", WindowMean(1), True, "check x; K models → w", lambda K: 1 + K + 1, naive_mean),
    Rule("FedAsync", Mixing(0.6), False, "check x; w, x → w", lambda K: 1 + 3, lambda w, xs: 0.4 * w + 0.6 * xs[0]),
    Rule("FedBuff", DeltaMean(0.05), False, "x, base → Δ; (w, K deltas → w)/K", lambda K: 3 + 1 + 2 / K, naive_deltas),
    Rule("FedAvg", SampleWeightedMean(), False, "check x; (K models → w)/K", lambda K: 1 + 1 + 1 / K, naive_mean),
)


class Arrivals:
    """A server with leases in flight, and the steps that a coordinator would ask of it."""

    def __init__(self, rule: Rule, size: int, length: int, in_flight: int) -> None:
        self.rule, self.size = rule, size
        self.server = Server(rule.update, Model.from_tensors({"w": torch.zeros(length)}))
        self.version = 0
        self._leases: deque[int] = deque(range(in_flight))
        self._next = in_flight
        self._buffer: list[int] = []
        for lease in self._leases:
            self.server.lease(lease, 0)

    def bring(self, values: list[Tensor]) -> float:
        """CPU-seconds of one arrival of the only element of ``values``, which is taken out: memory changes hands."""
        lease, new = self._leases.popleft(), self._next
        contribution = Contribution(values.pop(), "parameters", 1)
        step = self._step(lease)
        start = time.process_time()
        found = self.server.receive(lease, contribution)
        assert found is None, found
        del contribution
        if step is not None:
            self.server.apply(step)
            self.server.publish()
        self.server.lease(new, 0)
        took = time.process_time() - start
        self.version += step is not None
        self._leases.append(new)
        self._next += 1
        return took

    def _step(self, lease: int) -> Step | None:
        self._buffer.append(lease)
        if len(self._buffer) < self.size:
            return None
        entering: list[int] = self._buffer
        leaving: tuple[int, ...] = ()
        if self.rule.window and self.version:
            entering, leaving = [lease], (self._buffer.pop(0),)
        arrivals = tuple(Arrival(Lease(i, 0, self.version, 0.0), 0.0, self.version) for i in entering)
        if self.rule.window:
            return Step(self.version, arrivals, tuple(self._buffer), leaving)
        self._buffer = []
        return Step(self.version, arrivals)


def cpu_s(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(rule: Rule, size: int, length: int, seconds: float) -> dict[str, Any]:
    """Medians of an arrival, the triad and the naive rule, taken in turn for about so many seconds."""
    gc.collect()
    a, b, c = torch.zeros(length), torch.randn(length), torch.randn(length)
    arrivals = Arrivals(rule, size, length, in_flight=4)
    for _ in range(size + 3 if rule.window else size):
        arrivals.bring([c.clone()])
    pool = [c.clone() for _ in range(min(size, max(16, 64 * 10**6 // length)))]  # more than caches hold
    held = [pool[i % len(pool)] for i in range(size)]
    ours: list[float] = []
    triad: list[float] = []
    naive: list[float] = []
    arrivals_at_a_time = 1 if rule.window else size  # a tumbling buffer's step belongs to K arrivals
    until = time.monotonic() + seconds
    while len(ours) < 3 or time.monotonic() < until:
        ours.append(statistics.fmean(arrivals.bring([torch.add(c, 1)]) for _ in range(arrivals_at_a_time)))
        triad.append(cpu_s(lambda: torch.add(b, c, alpha=0.5, out=a)))
        if len(naive) < 3 or size * length < 10**8:
            whole = cpu_s(lambda: rule.naive(b, held))
            naive.append(cpu_s(lambda: naive_receive(rule, b, c)) + whole / arrivals_at_a_time)
    streams = rule.streams(size)
    took, stream_s = statistics.median(ours), statistics.median(triad) / 3
    return {
        "rule": rule.name,
        "K": size,
        "P": length,
        "streams": streams,
        "streams_named": rule.bytes_named,
        "bytes": streams * length * FLOAT_BYTES,
        "cpu_s": took,
        "least_s": min(ours),
        "most_s": max(ours),
        "triad_bytes_per_s": length * FLOAT_BYTES / stream_s,
        "floor_s": streams * stream_s,
        "times_floor": took / (streams * stream_s),
        "naive_cpu_s": statistics.median(naive),
        "samples": len(ours),
    }


def naive_receive(rule: Rule, base: Tensor, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return x - base if rule.update.wants == "delta" else x


def peak_bytes() -> int:
    """Most memory that was resident at a time; Linux only. (getrusage counts what was there before exec, too.)"""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def resident(length: int, size: int) -> dict[str, Any]:
    """Peak memory of FedFa above what the process held when torch was imported, and CPU-seconds per arrival.

    What must be there: the window's K models, the current version, one that a lease holds, and what comes in.
    """
    before = peak_bytes()
    arrivals = Arrivals(RULES[0], size, length, in_flight=2)
    took = [arrivals.bring([torch.full((length,), float(i))]) for i in range(2 * size + 5)]
    above = peak_bytes() - before
    return {
        "rule": RULES[0].name,
        "K": size,
        "P": length,
        "versions": arrivals.version,
        "cpu_s": statistics.median(took[size:]),
        "peak_bytes_above_import": above,
        "model_bytes": length * FLOAT_BYTES,
        "budget_bytes": (size + 3) * length * FLOAT_BYTES,
    }


def cases(quick: bool) -> list[tuple[Rule, int, int]]:
    """Where K models fit into memory; FedAsync steps at each arrival."""
    lengths = (10**5, 4 * 10**6) if quick else (10**5, 4 * 10**6, 10**7)
    sizes = (2, 10) if quick else (2, 10, 200)
    return [
        (rule, size, length)
        for rule in RULES
        for length in lengths
        for size in ((1,) if rule.name == "FedAsync" else sizes)
        if size * length <= 8 * 10**8
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shorter")
    parser.add_argument("--large", action="store_true", help="also 10^8 parameters, K = 10: peak memory")
    parser.add_argument("--resident", type=int, nargs=2, metavar=("P", "K"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.resident:
        print(json.dumps(resident(*options.resident)))
        return
    rows = [measure(*case, seconds=0.3 if options.quick else 2.0) for case in cases(options.quick)]
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table("rule", "K", "P", "CPU-ms per arrival", "range", "streams", "floor, ms", "× floor", "naive, × ours")
    for row in rows:
        table.add_row(
            row["rule"],
            f"{row['K']}",
            f"{row['P']:.0e}",
            f"{row['cpu_s'] * 1e3:.3f}",
            f"{row['least_s'] * 1e3:.3f} – {row['most_s'] * 1e3:.3f}",
            f"{row['streams']:.4g}: {row['streams_named']}",
            f"{row['floor_s'] * 1e3:.3f}",
            f"{row['times_floor']:.2f}",
            f"{row['naive_cpu_s'] / row['cpu_s']:.1f}",
        )
    console.print(table)
    large = None
    if options.large:  # in a process of its own: peak memory is a process's
        command = [sys.executable, __file__, "--resident", str(LARGE), "10"]
        large = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        console.print(
            f"FedFa, P = {large['P']:.0e}, K = {large['K']}: {large['peak_bytes_above_import'] / 1e9:.2f} GB at most"
            f" above the import of torch, {large['budget_bytes'] / 1e9:.1f} GB for K + 3 models,"
            f" {large['cpu_s']:.3f} CPU-s per arrival"
        )
    if options.out:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        options.out.write_text(json.dumps({"machine": machine, "rows": rows, "large": large}, indent=1) + "\n")


if __name__ == "__main__":
    main()
