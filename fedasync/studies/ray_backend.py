"""Runs on a Ray cluster: an existing one (``RAY_ADDRESS``, as Ray has it) or one started on this machine.

A worker makes runs in a scratch folder and sends their files; only this process writes into the study's folder, so the
machines need share no disk. Every machine needs fedasync, the study's own modules and the files that the study names.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedasync.studies.errors import StudyError
from fedasync.studies.execute import Job, LostWorkerError, Outcome, error_log, perform
from fedasync.studies.store import place


def over_ray(waiting: Sequence[Sequence[Job]], processes: int | None) -> Generator[Outcome, None, None]:
    """Make groups of runs, ``processes`` at a time (None: one a processor); outcomes come as they finish.

    Raises StudyError when Ray is not installed or there is no cluster, LostWorkerError when a worker is lost (twice:
    Ray tries again once).
    """
    if not waiting:
        return
    ray = _ray()
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        _knock(address)
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        else:
            ray.init(num_cpus=processes, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        where = f"at RAY_ADDRESS = {address}" if address else "on this machine"
        raise StudyError(f"no Ray cluster {where}: {type(error).__name__}: {_first_line(error)}", 1) from error
    at_once = processes or max(1, int(ray.cluster_resources().get("CPU", 1)))
    make = ray.remote(num_cpus=1, max_retries=1, num_returns="streaming")(_made)
    paths = [str(Path(path).resolve()) for path in sys.path]
    todo = list(waiting)[::-1]
    making: dict[Any, dict[str, Job]] = {}
    try:
        while todo or making:
            while todo and len(making) < at_once:
                group = todo.pop()
                making[make.remote(group, paths)] = {job.folder.name: job for job in group}
            ready, _ = ray.wait(list(making), num_returns=1)
            by_name = making[ready[0]]
            try:
                outcome, files = ray.get(next(ready[0]))
            except StopIteration:
                del making[ready[0]]
                continue
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, OSError):
                    raise cause from error
                if cause is None:
                    raise LostWorkerError(f"a Ray worker was lost: {_first_line(error)}") from error
                what = f"{type(cause).__name__}: {_first_line(cause)}"
                raise LostWorkerError(f"a Ray worker raised {what}") from error
            _settle(by_name[outcome.folder.name], outcome, files)
            yield outcome
    finally:
        ray.shutdown()


def _made(jobs_together: Sequence[Job], paths: Sequence[str]) -> Iterator[tuple[Outcome, dict[str, bytes]]]:
    """On a worker: each outcome with the run's files, or the traceback's."""
    sys.path[:0] = [path for path in paths if path not in sys.path]
    with TemporaryDirectory(prefix="fedasync-") as scratch:
        for outcome in perform(jobs_together, Path(scratch)):
            folder = Path(scratch) / outcome.folder.name
            files = [error_log(folder)] if outcome.error else sorted(folder.iterdir())
            yield outcome, {file.name: file.read_bytes() for file in files}


def _settle(job: Job, outcome: Outcome, files: dict[str, bytes]) -> None:
    """Write what a worker sent to where a local one would have written it."""
    if outcome.error:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        error_log(job.folder).write_bytes(next(iter(files.values())))
        return
    place(files, job.folder)
    error_log(job.folder).unlink(missing_ok=True)


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise StudyError(f"--backend ray needs Ray ({error}): pip install 'fedasync[ray]'", 1) from None
    return ray


def _knock(address: str) -> None:
    """Ray would wait for ever at an address where nobody answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local"):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise StudyError(f"no Ray cluster at RAY_ADDRESS = {address}: {error}; host:port would do", 1) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
