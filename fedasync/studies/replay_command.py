"""``fedasync replay``: a finished or interrupted run made again from its log, and compared with what it left."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.core import Strategy, Tiers
from fedasync.core.log import COLUMNS, KINDS, NONE, Row
from fedasync.federated.one_thread import one_thread
from fedasync.federated.recorded import CONTRIBUTIONS, JournalError, Recorded, digest, reason_of, told
from fedasync.federated.replay import Replayed, ReplayError, replay
from fedasync.flower.settings import DeploymentSettings, with_deadline
from fedasync.runs.run import CONFIG, EVENTS, MODEL, SUMMARY, Run
from fedasync.studies.build import build_strategy, build_workload, build_world, is_cluster
from fedasync.studies.errors import StudyError, parse

if TYPE_CHECKING:
    from fedasync.aggregation.model import Model
    from fedasync.federated.arrays import Arrays


def replay_run(folder: Path) -> int:
    """Make a run again from its log and compare every row, version and the last model; print what was checked.

    The exit status: 0, or 1 with one line on stderr at the first difference. A run that kept no contributions (a
    simulated one) is compared by its rows alone. Raises StudyError where nothing can be replayed.
    """
    try:
        run = _read(folder)
        noted, compared = run.recorded.versions(), 0

        def compare(version: int, model: Model) -> None:
            nonlocal compared
            if version in noted and digest(model) != noted[version]:
                raise ReplayError(f"version {version} has other bits than were noted when it was made")
            compared += version in noted

        with one_thread() if run.arrays is not None else nullcontext():
            contributions, profile = run.recorded.contribution, run.profile
            found = replay(
                run.rows,
                run.reasons,
                run.strategy,
                run.arrays,
                contributions,
                profile=profile,
                rings=run.rings,
                on_version=compare,
            )
            lines = [_ends(run, found), _versions(found, compared), *_model(run, found)]
    except ReplayError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    except JournalError as error:
        raise StudyError(str(error)) from None
    print(f"{folder}: strategy {run.strategy.name}: {found.rows} rows, {found.versions} versions")
    for line in lines:
        print(f"  {line}")
    return 0


@dataclass(frozen=True)
class _Told:
    """What a run's folder says of it. ``arrays`` are None where no contributions were kept."""

    folder: Path
    recorded: Recorded
    strategy: Strategy
    arrays: Arrays | None
    profile: Sequence[float] | None
    rows: list[Row]
    reasons: list[str]
    rings: list[tuple[int, float]] | None
    summary: dict[str, Any] | None
    """None for a run that did not end."""


def _read(folder: Path) -> _Told:
    config = _json(folder / CONFIG)
    if config is None:
        raise StudyError(f"{folder}: no run here ({CONFIG} is missing)")
    where = str(folder / CONFIG)
    if is_cluster(config, where):
        raise StudyError(f"{folder}: a run of a cluster; runs of federated clients can be replayed")
    strategy = build_strategy(config, where)
    recorded = Recorded(folder)
    summary = _json(folder / SUMMARY)
    rows, reasons = _rows(folder, recorded)
    profile: Sequence[float] | None
    if "population" in config:
        profile = _simulated_profile(config, strategy, where)
    else:
        settings = parse(DeploymentSettings, config.get("deployment", {}), f"{where}: deployment")
        if settings.record != "all":
            raise StudyError(
                f"{folder}: only contributions since the last checkpoint were kept; record = 'all' would do"
            )
        profile = settings.profile_s
        strategy = with_deadline(strategy, settings)
    kept = (folder / CONTRIBUTIONS).is_dir()
    if not kept and strategy.publication.measures:
        measures = ", ".join(sorted(strategy.publication.measures))
        raise StudyError(f"{folder}: its publication measures {measures}, and no contributions were kept to do so with")
    arrays = _arrays(config, strategy, where) if kept else None
    return _Told(folder, recorded, strategy, arrays, profile, rows, reasons, recorded.rings(), summary)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StudyError(f"{path}: not readable ({error})") from None
    if not isinstance(found, dict):
        raise StudyError(f"{path}: got no table")
    return found


def _rows(folder: Path, recorded: Recorded) -> tuple[list[Row], list[str]]:
    """The journal's rows, or those of the table; where there are both, they must be the same."""
    table = folder / EVENTS
    if not recorded.size and not table.exists():
        raise StudyError(f"{folder}: no log here ({EVENTS} is missing)")
    journal, reasons = list(recorded.rows()), recorded.reasons
    if not table.exists():
        return journal, reasons
    rows, texts = _table(folder)
    if not journal:
        return rows, texts
    for number, (row, other) in enumerate(zip(journal, rows, strict=False)):
        if row[:7] != other[:7] or reason_of(row, reasons) != reason_of(other, texts):
            raise ReplayError(f"row {number}: {EVENTS} has {told(other, texts)}; the journal has {told(row, reasons)}")
    if len(journal) != len(rows):
        raise ReplayError(f"{EVENTS} has {len(rows)} rows; the journal has {len(journal)}")
    return journal, reasons


def _table(folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of events.parquet, and the texts of their reasons."""
    try:
        events = Run({}, {}, folder=folder).events
    except ValueError as error:
        raise StudyError(str(error)) from None
    kinds = {kind: code for code, kind in enumerate(KINDS)}
    codes: dict[str, int] = {}
    rows: list[Row] = []
    for time_s, kind, lease, worker, base, version, staleness, reason in events.select(list(COLUMNS)).iter_rows():
        numbers = [NONE if number is None else int(number) for number in (lease, worker, base, version, staleness)]
        code = NONE if reason is None else codes.setdefault(reason, len(codes))
        rows.append((float(time_s), kinds.get(kind, len(KINDS)), *numbers, code))  # type: ignore[arg-type]
    return rows, list(codes)


def _simulated_profile(config: dict[str, Any], strategy: Strategy, where: str) -> Sequence[float] | None:
    """What a profiling phase would find of a simulated population."""
    if not isinstance(strategy.admission, Tiers):
        return None
    from fedasync.simulation.refusals import realise

    world = build_world(config, where)
    clients = realise(world.population, None if world.workload is None else world.workload(), config["seed"])
    return [clients.mean_work_s(client) for client in range(clients.count)]


def _arrays(config: dict[str, Any], strategy: Strategy, where: str) -> Arrays | None:
    from fedasync.federated.arrays import Arrays

    make = build_workload(config, where)
    if make is None:
        return None
    with one_thread():
        return Arrays(strategy, make(), config["seed"])


def _ends(run: _Told, found: Replayed) -> str:
    if run.summary is None:
        return "rows: the core does every one again (the run did not end)"
    if found.beyond:
        raise ReplayError(f"row {found.rows}: recorded no more; the core did {told(found.beyond[0], found.reasons)}")
    for name, now in (("ledger", found.coordinator.ledger.as_dict()), ("versions", found.versions)):
        if run.summary.get(name, now) != now:
            raise ReplayError(
                f"row {found.rows}: recorded no more; {SUMMARY} has {name} {run.summary[name]}, not {now}"
            )
    return "rows: the core does every one again"


def _versions(found: Replayed, compared: int) -> str:
    if not found.contributions:
        return "versions: not made again, since no contributions were kept"
    if not compared:
        return f"versions: made again from {found.contributions} contributions; none was noted to compare with"
    return f"versions: {compared} of {found.versions} have the bits that were noted when they were made"


def _model(run: _Told, found: Replayed) -> list[str]:
    path = run.folder / MODEL
    if run.arrays is None or not path.exists():
        return []
    from fedasync.aggregation.model import Model
    from fedasync.aggregation.server import DivergedError

    step = found.coordinator.step
    if step is not None and str((run.summary or {}).get("ended")).startswith("diverged"):
        with suppress(DivergedError):  # what the run ended with
            run.arrays.apply(step)
    try:
        kept = Model.from_bytes(path.read_bytes())
    except Exception as error:  # noqa: BLE001  whatever the format's reader makes of damaged bytes
        raise StudyError(f"{path}: not readable as a model ({' '.join(str(error).split())})") from None
    if digest(kept) != digest(run.arrays.server.model):
        raise ReplayError(f"{MODEL}: other bits than version {found.versions} has when it is made again")
    return [f"model: version {found.versions} is {MODEL}, bit for bit"]
