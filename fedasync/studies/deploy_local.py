"""What the command ``deploy local`` does: one run on Flower's processes of this machine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from fedasync.runs.run import SUMMARY
from fedasync.strategies import STRATEGIES
from fedasync.studies import app_folder_command
from fedasync.studies.app_folder_command import check_deployment, deployment_config
from fedasync.studies.command import console_for_tables, tell, why_ended
from fedasync.studies.errors import StudyError
from fedasync.studies.experiment import oddity
from fedasync.studies.experiment_file import Federation
from fedasync.studies.flower_run import FailedRunError, LostFederationError, keep_log, local_federation, make_run
from fedasync.studies.show import show_run

WHERE = "deploy local"
RESULTS = Path("results") / "deployed"
FILLED = ("concurrency", "cohort")
"""Keys of a strategy that say how many clients work at once: all of them, unless ``--set`` says otherwise."""
BOUNDED = ("buffer_size", "window")
"""Keys that say how many contributions a step takes: no more than there are clients, so that steps come soon."""


def deploy_local(
    clients: int,
    workload: str = "digits",
    strategy: str = "fedbuff",
    changes: Sequence[str] = (),
    out: Path | None = None,
) -> int:
    """Make one run with ``clients`` clients, show how far it is, and print what ``fedasync show`` prints of it.

    Workload and strategy are named as in a study; ``changes`` are ``dotted.key=value`` with a TOML value. The run is
    written to ``out`` (results/deployed/WORKLOAD-STRATEGY-1, -2, …), logs of Flower's processes beside it. The exit
    status: 0, or 1 when the run failed. Raises StudyError as `run_experiment` does; everything has ended by then.
    """
    if clients < 1:
        raise StudyError(f"{WHERE}: --clients {clients}; an integer ≥ 1 would do")
    config = _config(clients, workload, strategy, changes)
    folder = out or _free(f"{workload}-{strategy}".replace(".", "-"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StudyError(f"{folder} is there already; another --out would do")
    console, complaints = console_for_tables(), Console(stderr=True, soft_wrap=True)
    beside = folder.with_name(f"{folder.name}-federation")
    console.print(f"{clients} clients, {strategy} on {workload}; logs: {beside / 'logs'}", markup=False)
    try:
        with local_federation(beside, Federation(clients)) as federation:
            try:
                run = make_run(federation, config, folder, f"{strategy} on {workload}", console)
            except FailedRunError as error:
                log = keep_log(folder, error.log)
                complaints.print(f"fedasync: {error} (log: {log})", markup=False, highlight=False)
                return 1
            except LostFederationError as error:
                raise StudyError(f"{WHERE}: {error}", 1) from None
    except (KeyboardInterrupt, SystemExit, OSError) as error:
        if isinstance(error, SystemExit):
            raise StudyError(f"{WHERE}: ended by a signal; nothing is kept", int(error.code or 1)) from None
        why, status = why_ended(error, folder)
        raise StudyError(f"{WHERE}: {why}; nothing is kept", status) from None
    show_run(folder)
    console.print(f"{run.folder}: {SUMMARY} and what is beside it", markup=False, highlight=False, soft_wrap=True)
    odd = oddity(run)
    tell([odd] if odd else [], complaints)
    return 1 if odd else 0


def _config(clients: int, workload: str, strategy: str, changes: Sequence[str]) -> dict[str, Any]:
    """The run's configuration, checked. Raises StudyError."""
    given = [f"workload.clients={clients}", *_filled(strategy, clients), *changes]
    try:
        config = deployment_config(workload, strategy, given)
    except StudyError as error:
        raise StudyError(str(error).replace(f"{app_folder_command.WHERE}: ", f"{WHERE}: ", 1)) from None
    held = check_deployment(config, WHERE)
    if held != clients:
        raise StudyError(f"{WHERE}: --clients {clients}, and the workload has {held} clients; the same would do")
    return config


def _filled(strategy: str, clients: int) -> list[str]:
    """What a built-in strategy must be told of how many work at once."""
    make = STRATEGIES.get(strategy)
    if make is None:
        return []
    keys = inspect.signature(make).parameters.items()
    work = [f"strategy.{key}={clients}" for key, it in keys if key in FILLED and it.default is it.empty]
    return work + [f"strategy.{key}={clients}" for key, it in keys if key in BOUNDED and it.default > clients]


def _free(name: str) -> Path:
    """The first folder that no run has, nor a federation that is at work."""
    paths = (RESULTS / f"{name}-{number}" for number in count(1))
    return next(path for path in paths if not path.exists() and not _is_in_use(path))


def _is_in_use(folder: Path) -> bool:
    from fedasync.flower.leftovers import PROCESSES

    return (folder.with_name(f"{folder.name}-federation") / PROCESSES).exists()
