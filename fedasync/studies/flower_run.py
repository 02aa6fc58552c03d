"""One deployment's run on a federation of this machine: from its configuration to its folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedasync.report import write_trace
from fedasync.runs.run import Run, write
from fedasync.studies import store
from fedasync.studies.errors import StudyError
from fedasync.studies.execute import error_log
from fedasync.studies.experiment_file import Federation
from fedasync.studies.run_progress import RunProgress, shown

if TYPE_CHECKING:
    from fedasync.flower.processes import LocalFederation

COMPLETED = "finished:completed"
SERVER_LOG = "server.log"


class FailedRunError(RuntimeError):
    """A run came to no end of its own; the message is one line, and the federation goes on.

    ``log`` is what its server wrote.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class LostFederationError(RuntimeError):
    """A process is gone, or does not answer, without which no run can be made; the message is one line."""


@contextmanager
def local_federation(folder: Path, settings: Federation) -> Iterator[LocalFederation]:
    """A SuperLink and its SuperNodes, started, in the scratch folder ``folder``; all end with the block.

    Users' own modules are looked for in the working directory, as by ``fedasync sim``. Raises StudyError for what is
    not installed, and with status 1 for processes that do not start.
    """
    try:
        from fedasync.flower.certificates import make
        from fedasync.flower.processes import LocalFederation
        from fedasync.flower.service import FederationError
    except ImportError as error:
        raise StudyError(f"{error.name} is not installed; pip install 'fedasync[flower]' would do") from None
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            TemporaryDirectory(prefix=".keys-", dir=folder) as keys,
            LocalFederation(
                folder,
                settings.clients,
                tls=make(Path(keys) / "made", clients=settings.clients, days=1) if settings.tls else None,
                authenticate=settings.authenticate,
                isolation=settings.isolation,
                poll_s=settings.poll_s,
                timeout_s=settings.timeout_s,
                environment={"PYTHONPATH": path},
            ) as federation,
        ):
            shutil.rmtree(folder / "logs", ignore_errors=True)  # of an earlier federation
            federation.start()
            yield federation
    except FederationError as error:
        raise StudyError(str(error), 1) from None


def make_run(federation: LocalFederation, config: Mapping[str, Any], folder: Path, what: str, console: Console) -> Run:
    """Make the run that a deployment's configuration describes, and keep it as ``folder``: whole, or absent.

    Its server writes beside that place, and what it wrote is moved there when it has finished. ``what`` names the run
    while its progress is shown. Raises FailedRunError, and LostFederationError when the federation cannot go on.
    """
    from fedasync.flower.app_folder import write as write_app
    from fedasync.flower.server_log import last_word, server_log
    from fedasync.flower.service import FederationError

    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial").absolute()
    app = federation.folder / "app"
    shutil.rmtree(app, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    write_app(app, {**config, "out": str(partial), "resume": False}, name="fedasync-run")
    try:
        with shown(what, RunProgress(partial), console):
            run_id = federation.run(app)
            status = federation.wait_for_run(run_id, inf, every_s=0.5)
        if status != COMPLETED or not store.is_finished(partial):
            log = server_log(federation.link, run_id)
            raise FailedRunError(f"{status}: {last_word(log)}", log)
        run = Run.load(partial)
        write(partial / SERVER_LOG, server_log(federation.link, run_id).encode())
        write_trace(run.read_events(lambda events: events.head(store.TRACED_ROWS)), partial / store.TRACE)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except FederationError as error:
        raise LostFederationError(str(error)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    error_log(folder).unlink(missing_ok=True)
    return Run.load(folder)


def keep_log(folder: Path, log: str) -> Path:
    """Write what a failed run's server said beside the place of the run."""
    path = error_log(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, log.encode())
    return path
