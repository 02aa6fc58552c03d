"""``fedasync calibrate``: the simulator fitted to recorded runs, of federated clients or on prompts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from fedasync.studies.calibrate_clients import calibrate as calibrate_clients
from fedasync.studies.errors import StudyError
from fedasync.studies.out_folder import check_out
from fedasync.studies.run_folders import one_strategy, opened, rollout_runs


def calibrate(runs: Sequence[Path], out: Path | None, *, probe: bool = False) -> int:
    """Fit the simulator's clients, or its cluster where runs have rollouts. Returns the exit status 0.

    ``probe``: of runs on prompts, contention is measured on this machine. Raises StudyError.
    """
    recorded = opened(runs)
    if out is not None:
        check_out(out)
    if not rollout_runs(recorded):
        if probe:
            raise StudyError("--probe measures what generating and training cost each other; clients do neither")
        return calibrate_clients(runs, out)
    from fedasync.studies.calibrate_rollouts import calibrate_rollouts

    one_strategy(recorded)
    command = shlex.join(["fedasync", "calibrate", *map(str, runs), *(["--probe"] if probe else [])])
    calibrate_rollouts(recorded, out, command, probes=probe)
    return 0
