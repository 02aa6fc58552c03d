"""One measurement: a command as a process, its CPU time and its memory with all that it starts, daemons included."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import psutil
except ImportError:
    sys.exit("the comparison with peers reads process trees with psutil: pip install psutil")

SCRIPTS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(SCRIPTS))

from protocol import PREFIX, WAITS  # noqa: E402

PERIOD_S, GRACE_S = 0.25, 5.0

QUIET = {
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass
class Tree:
    """CPU time and memory of all that a process started, by a harness that is their sub-reaper."""

    root: int
    before: frozenset[int]
    reaped_before_s: float = field(default_factory=_children_cpu_s)
    peak_pss: int = 0
    peak_rss: int = 0
    most_processes: int = 0
    killed: int = 0
    _own_s: dict[tuple[int, float], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def processes(self) -> list[psutil.Process]:
        direct = [child for child in psutil.Process().children() if child.pid not in self.before]
        found = list(direct)
        for child in direct:
            with suppress(psutil.Error):
                found += child.children(recursive=True)
        return found

    def sample(self, root_cpu_s: float | None = None) -> float:
        """CPU-seconds so far; the root's own time, in ticks of 10 ms otherwise, may be given exactly."""
        with self._lock:
            total, pss, rss, count = 0.0, 0, 0, 0
            for process in self.processes():
                with suppress(psutil.Error):
                    if process.status() == psutil.STATUS_ZOMBIE and process.pid != self.root:
                        with suppress(ChildProcessError):
                            os.waitpid(process.pid, os.WNOHANG)  # an orphan that ended; kept in its last account
                        continue
                    times = process.cpu_times()
                    own = times.user + times.system
                    if process.pid == self.root and root_cpu_s is not None:
                        own = root_cpu_s
                    self._own_s[process.pid, process.create_time()] = own
                    total += own + times.children_user + times.children_system
                    memory = process.memory_full_info()
                    pss, rss, count = pss + getattr(memory, "pss", memory.uss), rss + memory.rss, count + 1
            total += _children_cpu_s() - self.reaped_before_s  # what ended and was waited for
            self.peak_pss, self.peak_rss = max(self.peak_pss, pss), max(self.peak_rss, rss)
            self.most_processes = max(self.most_processes, count)
            return total

    def total_s(self) -> float:
        """After the end: the kernel's account of what was waited for, or the last samples where nobody waited."""
        return max(_children_cpu_s() - self.reaped_before_s, sum(self._own_s.values()))

    def kill(self) -> None:
        """End what is left, by process id."""
        left = [process for process in self.processes() if process.pid != self.root]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        for process in left:
            with suppress(ChildProcessError, psutil.Error):
                process.wait(GRACE_S)
        self.killed += len(left)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Orphans become children of this process, so that none of the tree is lost (Linux; elsewhere nothing happens)."""
    set_child_subreaper = 36
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        if libc is not None:
            libc.prctl(set_child_subreaper, 0, 0, 0, 0)


def measure(command: Sequence[str], log: Path, limit_s: float, path: Sequence[Path] = (SCRIPTS,)) -> dict[str, Any]:
    """Run a script to its end: marks, CPU-seconds and memory. Raises RuntimeError when it fails."""
    before = frozenset(child.pid for child in psutil.Process().children())
    with _subreaper(), tempfile.TemporaryDirectory(prefix="bench") as scratch, log.open("w") as errors:
        env = {**os.environ, **QUIET, WAITS: "1", "PYTHONPATH": os.pathsep.join(map(str, path)), "RAY_TMPDIR": scratch}
        env["FLWR_HOME"] = str(Path(scratch, "flwr"))
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=scratch, env=env
        )
        tree = Tree(process.pid, before)
        over, marks, late = threading.Event(), {}, threading.Event()

        def watch() -> None:
            ended = None
            while not over.wait(PERIOD_S):
                tree.sample()
                now = time.monotonic()
                ended = ended or (now if process.poll() is not None else None)
                if now - began > limit_s:
                    late.set()
                    process.kill()
                if late.is_set() or (ended and now - ended > GRACE_S):
                    tree.kill()  # whatever holds the pipe below open

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            for line in process.stdout or ():
                if not line.startswith(PREFIX):
                    errors.write(line)
                    continue
                mark = json.loads(line.removeprefix(PREFIX))
                mark["wall_s"] = time.monotonic() - began
                mark["cpu_s"] = tree.sample(mark["process_cpu_s"])
                marks[mark["mark"]] = mark
                with suppress(BrokenPipeError):
                    print(file=process.stdin, flush=True)
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            over.set()
            watcher.join()
            if process.poll() is not None:
                _wait_for_orphans(tree)
                tree.kill()
    if late.is_set():
        raise RuntimeError(f"not done after {limit_s:g} s (log: {log})")
    if status or not {"start", "end"} <= set(marks):
        raise RuntimeError(f"{last_line(log.read_text()) or f'status {status}'} (log: {log})")
    start, end = marks["start"], marks["end"]
    cpu_s, wall_s = end["cpu_s"] - start["cpu_s"], end["wall_s"] - start["wall_s"]
    return {
        "updates": end["updates"],
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "updates_per_cpu_s": end["updates"] / cpu_s,
        "updates_per_wall_s": end["updates"] / wall_s,
        "startup_cpu_s": start["cpu_s"],
        "startup_wall_s": start["wall_s"],
        "total_cpu_s": tree.total_s(),
        "peak_pss_mb": tree.peak_pss / 1e6,
        "peak_rss_mb": tree.peak_rss / 1e6,
        "processes": tree.most_processes,
        "left_behind": tree.killed,
        "accuracy": marks.get("result", {}).get("accuracy"),
        "sha256": marks.get("result", {}).get("sha256"),
    }


def _wait_for_orphans(tree: Tree) -> None:
    """Daemons that were told to end get a little time for it."""
    deadline = time.monotonic() + GRACE_S
    while tree.processes() and time.monotonic() < deadline:
        tree.sample()
        time.sleep(PERIOD_S / 5)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
