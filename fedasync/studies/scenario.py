"""Scenarios: runs of a scalar model that can be followed by hand, event by event.

A scenario is a TOML file with the ``[strategy]`` and ``[run]`` of a study, and clients written out: how long each lease
of theirs takes, and what they make of the model that they are given (docs/conformance.md).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from fedasync.aggregation.model import Contribution, Form, Model
from fedasync.core import EventLog, Step, Strategy
from fedasync.core.bounds import check_integer, check_real
from fedasync.federated.result import BrokenLawError, metric_table
from fedasync.runs.record import Record
from fedasync.runs.summary import told_by_the_log
from fedasync.simulation import FederatedSimulation, NothingAcceptedError, Population, Settings, Values, WorkloadError
from fedasync.simulation.federated import StandstillError
from fedasync.simulation.learning import Learner
from fedasync.simulation.refusals import check, realise
from fedasync.studies.build import build_federated
from fedasync.studies.errors import StudyError, did_you_mean, parse
from fedasync.workloads.protocol import Task

TABLES = ("start", "run", "strategy", "client")


@dataclass(frozen=True)
class Contract:
    """x = c + ρ·(w − c): a step towards ``centre`` that leaves ``rho`` of the distance."""

    centre: float
    rho: float
    kind: Literal["contract"] = "contract"

    def __post_init__(self) -> None:
        check_real("centre", self.centre, -inf)
        check_real("rho", self.rho, -inf)

    def __call__(self, w: float) -> float:
        return self.centre + self.rho * (w - self.centre)


@dataclass(frozen=True)
class Constant:
    """x = ``value``, whatever the client started from."""

    value: float
    kind: Literal["constant"] = "constant"

    def __post_init__(self) -> None:
        check_real("value", self.value, -inf)

    def __call__(self, w: float) -> float:
        return self.value


@dataclass(frozen=True)
class Shift:
    """x = w + ``by``."""

    by: float
    kind: Literal["shift"] = "shift"

    def __post_init__(self) -> None:
        check_real("by", self.by, -inf)

    def __call__(self, w: float) -> float:
        return w + self.by


@dataclass(frozen=True)
class Client:
    """A client written out: its i-th lease takes the i-th of ``duration_s`` (seconds; one number, or a list in turn).

    ``map`` makes its result x from the w that it started from, which it sends as it is, or as x − w (``form``).
    """

    name: str
    duration_s: Any
    map: Contract | Constant | Shift
    samples: int = 1
    form: Form = "parameters"

    def __post_init__(self) -> None:
        if not isinstance(self.duration_s, list | tuple):
            check_real("duration_s, where it is no list,", self.duration_s, 0)
        elif not self.duration_s:
            raise ValueError("duration_s is an empty list; at least one number of seconds would do")
        else:
            for place, seconds in enumerate(self.duration_s):
                check_real(f"duration_s[{place}]", seconds, 0)
        check_integer("samples", self.samples, 1)

    @property
    def durations_s(self) -> tuple[float, ...]:
        """Seconds of its leases, over and over."""
        return tuple(self.duration_s) if isinstance(self.duration_s, list | tuple) else (self.duration_s,)


@dataclass(frozen=True)
class Scenario:
    """A strategy, clients written out, the scalar that version 0 is, and how the run goes.

    Clients start in their order, and who delivered goes on: ``settings`` should have the selection ``same_client``.
    """

    strategy: Strategy
    clients: tuple[Client, ...]
    settings: Settings
    start: float = 0.0
    content: Mapping[str, Any] = field(default_factory=dict)
    """The file as read."""

    @property
    def population(self) -> Population:
        """The clients as a study's population has them: by their mean durations, which tiers sort them by."""
        means_s = tuple(sum(client.durations_s) / len(client.durations_s) for client in self.clients)
        return Population(len(self.clients), Values(means_s))


@dataclass(frozen=True)
class Happened:
    """A row of the log (docs/log.md) with the client's name, and the model after it."""

    time_s: float
    kind: str
    client: str | None
    lease: int | None
    base_version: int | None
    version: int
    staleness: int | None
    reason: str | None
    model: float


@dataclass(frozen=True)
class Played:
    """A scenario's run: its events in order, the last model, where every lease is, and how it ended."""

    events: tuple[Happened, ...]
    model: float
    ledger: Mapping[str, Any]
    time_s: float
    ended: str


def load(path: Path) -> Scenario:
    """Read a scenario. Raises StudyError: file, key, what it got, what would be accepted."""
    content = _toml(path)
    for key in content:
        if key not in TABLES:
            raise StudyError(f"{path}: {key}: unknown key{did_you_mean(key, TABLES)}")
    clients = _clients(content.get("client"), path)
    start = content.get("start", 0.0)
    try:
        check_real("start", start, -inf)
    except ValueError:
        raise StudyError(f"{path}: start: got {json.dumps(start)}; a finite number would do") from None
    config: dict[str, Any] = {table: content[table] for table in ("strategy", "run") if table in content}
    if isinstance(run := config.get("run"), dict):
        config["run"] = {"selection": "same_client", **run}
    parts = build_federated({**config, "population": {"clients": len(clients)} | _DURATION}, str(path))
    return Scenario(parts.strategy, clients, parts.settings, float(start), content)


_DURATION = {"duration_s": {"kind": "constant", "value": 1.0}}
"""For the population of a study's configuration; a scenario's clients bring their own."""


def _toml(path: Path) -> dict[str, Any]:
    """What JSON can hold of the file: dates and times become texts."""
    try:
        content: dict[str, Any] = json.loads(json.dumps(tomllib.loads(path.read_text("utf-8")), default=str))
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not TOML: {error}") from None
    return content


def _clients(tables: object, path: Path) -> tuple[Client, ...]:
    if tables is None:
        raise StudyError(f"{path}: client: this key is missing; one [[client]] or more would do")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise StudyError(f"{path}: client: got {json.dumps(tables)}; tables written as [[client]] would do")
    clients = [parse(Client, table, f"{path}: client {place}") for place, table in enumerate(tables, 1)]
    names = [client.name for client in clients]
    for place, name in enumerate(names, 1):
        if name in names[: place - 1]:
            first = names.index(name) + 1
            raise StudyError(f"{path}: client {place}.name: got {name!r}, as client {first}; another name would do")
    return tuple(clients)


class _Scalars:
    """The clients' maps as a workload. What a strategy asks of local training (μ, control, steps), a map ignores."""

    def __init__(self, scenario: Scenario) -> None:
        self._clients, self._start = scenario.clients, scenario.start

    def client_samples(self) -> Sequence[int]:
        return [client.samples for client in self._clients]

    def initial_model(self, seed: int) -> Model:
        import torch

        return Model.from_tensors({"w": torch.tensor([self._start], dtype=torch.float64)})

    def train(self, task: Task) -> Contribution:
        import torch

        client, w = self._clients[task.client], float(task.model.values[0])
        x = client.map(w)
        sent = x - w if client.form == "delta" else x
        return Contribution(torch.tensor([sent], dtype=torch.float64), client.form, client.samples)

    def evaluate(self, model: Model) -> dict[str, float]:
        return {"w": float(model.values[0])}


class _Watched(Learner):
    """Keeps every version."""

    versions: list[float]

    def apply(self, step: Step) -> None:
        super().apply(step)
        self.versions.append(float(self.server.model.values[0]))


def play(scenario: Scenario) -> Played:
    """Run a scenario under the virtual clock, as ``simulate`` would, with its clients' durations in turn.

    Raises ValueError when it can make no progress or its parts do not fit, WorkloadError for a strategy that needs more
    of its clients than a map, NothingAcceptedError and StandstillError when the run does not get on.
    """
    strategy, settings = scenario.strategy, scenario.settings
    workload = _Scalars(scenario)
    clients = realise(scenario.population, workload, 0)
    durations_s = [client.durations_s for client in scenario.clients]
    clients.work_s = lambda client, turn, _: durations_s[client][turn % len(durations_s[client])]
    check(strategy, clients, settings, {}, learns=True)
    learner = _Watched(strategy, workload, 0, settings)
    learner.versions = [scenario.start]
    record = Record()
    simulation = FederatedSimulation(strategy, clients, settings, 0, learner, log=EventLog(record.write))
    end_s = simulation.run()
    record.complete(simulation.log)
    ledger = simulation.coordinator.ledger.as_dict()
    _audit(simulation, record, ledger, strategy)
    return Played(
        _events(record, learner.versions, [client.name for client in scenario.clients]),
        learner.versions[-1],
        ledger,
        end_s,
        simulation.ended,
    )


def _audit(simulation: FederatedSimulation, record: Record, ledger: dict[str, Any], strategy: Strategy) -> None:
    """Every run checks the laws on its own log."""
    told = told_by_the_log(
        record.chunks(),
        ledger,
        metric_table(simulation.evaluations),
        end_s=simulation.now,
        slots=strategy.admission.most_in_flight,
        max_staleness=strategy.max_staleness,
        server_busy_s=simulation.server_busy_s,
    )
    if broken := [f"{verdict['name']}: {verdict['detail']}" for verdict in told["verdicts"] if not verdict["holds"]]:
        raise BrokenLawError(f"the run breaks its own laws: {'; '.join(broken)}")


def _events(record: Record, versions: Sequence[float], names: Sequence[str]) -> tuple[Happened, ...]:
    events: list[Happened] = []
    working: dict[int, str] = {}
    committed = 0
    for row in record.table().iter_rows(named=True):
        committed += row["kind"] == "committed"
        worker, lease = row.pop("worker"), row["lease"]
        if row["kind"] == "admitted":
            working[lease] = names[worker]  # a late message has its lease's number alone
        events.append(Happened(**row, client=working.get(lease), model=versions[committed]))
    return tuple(events)


def show(path: Path, *, as_json: bool) -> None:
    """Play a scenario file and print every event with the model after it. Raises StudyError."""
    scenario = load(path)
    try:
        played = play(scenario)
    except (ValueError, WorkloadError, NothingAcceptedError, StandstillError) as error:
        raise StudyError(f"{path}: {error}") from None
    if as_json:
        told = {"scenario": scenario.content, **asdict(played)}
        print(json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False))
        return
    _print(path, scenario, played)


def _print(path: Path, scenario: Scenario, played: Played) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    title = f"{path.stem}: {scenario.strategy.name} from w = {shortest(scenario.start)}"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table()
    for name in ("t (s)", "event", "client", "lease", "base", "version", "τ", "reason", "w"):
        table.add_column(name, justify="left" if name in ("event", "client", "reason") else "right")
    for event in played.events:
        cells = (event.time_s, event.kind, event.client, event.lease, event.base_version, event.version)
        table.add_row(*(Text(shortest(cell)) for cell in (*cells, event.staleness, event.reason, event.model)))
    console.print(table)
    console.print(_end(played), markup=False, highlight=False, soft_wrap=True)


def _end(played: Played) -> str:
    """When and why it ended, the last model, and where the leases are then."""
    limits = {"time": "at its time limit", "updates": "by updates", "versions": "by versions"}
    why = limits.get(played.ended, f"since {played.ended},")
    ended = f"ended {why} at {shortest(played.time_s)} s with w = {shortest(played.model)}"
    return f"{ended}; {_places(played.ledger)}"


def _places(ledger: Mapping[str, Any]) -> str:
    """Where the admitted leases are, in one line."""
    places = [f"{ledger[place]} {place.replace('_', ' ')}" for place in ("consumed", "buffered", "in_flight")]
    for place in ("rejected", "failed", "cancelled"):
        places += [f"{count} {place} ({reason})" for reason, count in ledger[place].items()]
    return f"of {ledger['admitted']} leases {', '.join(places)}"


def shortest(value: object) -> str:
    """A number with as few digits as tell it from every other, without a trailing ".0"; nothing for None."""
    return "" if value is None else repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
