"""The child processes of this machine: rollout workers and trainer ranks, started, watched, restarted and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from fedasync.core.bounds import check_integer, check_real
from fedasync.trainer import lifeline
from fedasync.trainer.addresses import free_port
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.keys import KEY_VARIABLE

WORKER, RANK = "fedasync.apps.rollout_worker", "fedasync.apps.trainer_rank"
TAIL_BYTES = 16384
SETTLE_S = 1.0
"""How long the ranks beside one that ended may take to end for the same reason, so that all of them are told."""


class Ended(NamedTuple):
    """A process that ended without being told to."""

    name: str
    status: int
    """Its exit status, or minus the signal that ended it."""
    words: str


class LocalProcesses:
    """Workers ``worker-0`` … and ranks ``rank-0`` …, each with a log in ``folder/logs``; end with the ``with`` block.

    Each is the leader of a session, and told to end (SIGTERM, SIGKILL after ``grace_s``) with all of its process group.
    All end by themselves when this process is no more, even by ``kill -9``: their standard input ends with it.

    ``address`` and ``authkey`` are the controller's listener's. ``threads`` is each child's, for OpenMP and MKL.
    ``environment`` is added to every child's. ``worker_module`` and ``rank_module`` are run with ``python -m``.
    Methods raise ValueError for names that were not started, and for starting what runs.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        authkey: bytes,
        settings: ChildSettings,
        *,
        threads: int = 1,
        grace_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
        worker_module: str = WORKER,
        rank_module: str = RANK,
    ) -> None:
        check_integer("processes: threads", threads, 1)
        check_real("processes: grace_s", grace_s, 0)
        self.folder, self.grace_s = folder.absolute(), grace_s
        self._settings = self.folder / "child-settings.json"
        settings.write(self._settings)
        (self.folder / "logs").mkdir(exist_ok=True)
        self._told = ["--settings", str(self._settings), "--controller", address]
        self._modules = worker_module, rank_module
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
            KEY_VARIABLE: authkey.hex(),
            lifeline.VARIABLE: "1",
        }
        self._children: dict[str, _Child] = {}
        self._rank_ended_s: float | None = None
        """When it was first seen that one of these ranks has ended, by the monotonic clock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start_worker(self, number: int) -> str:
        """Start worker ``number``; its name."""
        name = f"worker-{number}"
        self._start(name, [self._modules[0], *self._told, "--number", str(number)], {})
        return name

    def start_ranks(self, count: int = 1) -> list[str]:
        """Start the trainer as this many ranks, which find each other as under torchrun; their names."""
        check_integer("processes: ranks", count, 1)
        world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        names = [f"rank-{rank}" for rank in range(count)]
        self._rank_ended_s = None
        for rank, name in enumerate(names):
            variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._start(name, [self._modules[1], *self._told], variables)
        return names

    def restart(self, name: str) -> None:
        """Start a child again, after ending it where it still runs. Ranks only come back together: all are."""
        if not self._child(name).is_rank:
            self.end([name])
            self.start_worker(int(name.removeprefix("worker-")))
            return
        ranks = [each for each in self._children if self._children[each].is_rank]
        self.end(ranks)
        self.start_ranks(len(ranks))

    def kill(self, name: str) -> None:
        """SIGKILL to a child and its process group; it is among ``ended``, as if somebody else had done it."""
        child = self._child(name)
        child.kill()

    def end(self, names: Iterable[str] | None = None) -> None:
        """End these children, or all: SIGTERM, and SIGKILL to what is left of their process groups."""
        children = [self._child(name) for name in (list(self._children) if names is None else names)]
        for child in children:
            child.told_to_end = True
            child.signal(signal.SIGTERM)
        self._wait(children, self.grace_s)
        for child in children:
            child.finish()

    def wait(self, timeout_s: float, names: Iterable[str] | None = None) -> bool:
        """Wait for children that were told to stop; whether these, or all, have ended by themselves."""
        children = [self._child(name) for name in (list(self._children) if names is None else names)]
        for child in children:
            child.told_to_end = True
        return self._wait(children, timeout_s)

    def ended(self) -> list[Ended]:
        """Those that ended without being told to since this was last asked.

        Ranks end and come back together. So their end is told once, of all that have ended when all have, or
        ``SETTLE_S`` after it was first seen; of those that go on after that, nothing more is told until they are
        started again.
        """
        ranks = [child for child in self._children.values() if child.is_rank]
        gone = {name: child for name, child in self._children.items() if child.ended_by_itself}
        if any(child.is_rank for child in gone.values()):
            self._rank_ended_s = self._rank_ended_s or time.monotonic()
            all_have = all(child.popen.poll() is not None for child in ranks)
            if all_have or time.monotonic() >= self._rank_ended_s + SETTLE_S:
                for child in ranks:
                    child.told_to_end = True
            else:
                gone = {name: child for name, child in gone.items() if not child.is_rank}
        found = []
        for name, child in gone.items():
            child.finish()
            child.told_to_end = True
            status = child.popen.wait()
            found.append(Ended(name, status, f"{name} {_in_words(status)}; {self._last_line(name)}"))
        return found

    def names(self) -> list[str]:
        """Those that were started."""
        return list(self._children)

    def runs(self, name: str) -> bool:
        return name in self._children and self._children[name].popen.poll() is None

    def pid(self, name: str) -> int:
        return self._child(name).popen.pid

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def log_tail(self, name: str, lines: int = 5) -> str:
        """The last lines of a log that are not empty."""
        with self.log(name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            said = log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in said if line.strip()][-lines:])

    def _start(self, name: str, module: Sequence[str], variables: Mapping[str, str]) -> None:
        if self.runs(name):
            raise ValueError(f"{name} runs already, as process {self.pid(name)}")
        with self.log(name).open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", *module],
                env={**self._environment, **variables},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[name] = _Child(popen, bool(variables))

    def _child(self, name: str) -> _Child:
        if name not in self._children:
            raise ValueError(f"{name} was not started; there are: {', '.join(self._children) or 'none'}")
        return self._children[name]

    def _last_line(self, name: str) -> str:
        said = self.log_tail(name, 1)
        return f"last line of {self.log(name)}: {said}" if said else f"{self.log(name)} is empty"

    @staticmethod
    def _wait(children: Collection[_Child], timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while any(child.popen.poll() is None for child in children):
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.02)
        return True


class _Child:
    """A process that leads a process group of its own."""

    def __init__(self, popen: subprocess.Popen[bytes], is_rank: bool) -> None:
        self.popen, self.is_rank = popen, is_rank
        self.told_to_end = False

    def signal(self, number: signal.Signals) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    @property
    def ended_by_itself(self) -> bool:
        return not self.told_to_end and self.popen.poll() is not None

    def kill(self) -> None:
        """SIGKILL to it and its group, unless it has ended."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()

    def finish(self) -> None:
        """SIGKILL to what is left of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        if self.popen.stdin:
            self.popen.stdin.close()


def _in_words(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"ended by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"ended by signal {-status}"
