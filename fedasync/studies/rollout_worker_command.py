"""``fedasync rollout-worker``: this machine generates for the runs of another."""

from __future__ import annotations

import os
from math import inf, isnan
from pathlib import Path

from rich.console import Console

from fedasync.studies.errors import StudyError
from fedasync.studies.signals import SignalExit, left_on_signals
from fedasync.studies.worker_engine import engine
from fedasync.trainer.addresses import host_and_port
from fedasync.trainer.keys import KEY_VARIABLE, key_of_environment, key_of_file
from fedasync.trainer.link import LinkError
from fedasync.trainer.remote_worker import CannotWorkError, RemoteWorker


def serve_runs(address: str, key_file: Path | None, runs: int | None, patience_s: float) -> int:
    """Serve ``runs`` runs at ``address`` (None: until Ctrl-C or SIGTERM, which are no errors); the exit status 0.

    Raises StudyError: with status 2 for a wrong address or key file, with 1 where nobody listens in time, or the run
    and this worker do not go together.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    console = Console(soft_wrap=True)
    if isnan(patience_s):
        raise StudyError("rollout-worker: --patience-s is nan; a number ≥ 0 would do")
    try:
        if not host_and_port(address)[1]:
            raise ValueError("port 0 is where a run may listen, and nobody connects")
    except ValueError:
        raise StudyError(f"rollout-worker: got {address!r}; HOST:PORT, as the run says it, would do") from None
    try:
        key = key_of_environment() if key_file is None else key_of_file(key_file)
    except ValueError as error:
        raise StudyError(str(error)) from None
    if key is None:
        raise StudyError(
            f"rollout-worker needs the run's key: --key-file FILE, or the variable {KEY_VARIABLE}, would do"
        )

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    worker = RemoteWorker(address, key, engine, say, patience_s)
    try:
        with left_on_signals():
            worker.serve(inf if runs is None else runs)
    except (LinkError, CannotWorkError) as error:
        raise StudyError(str(error), 1) from None
    except (KeyboardInterrupt, SignalExit):
        say("ended")
    return 0
