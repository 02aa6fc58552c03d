"""What the command ``flower-app`` does: a deployment's folder for ``flwr run``, checked before it is written."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedasync.federated.limits import Limits
from fedasync.studies.deployment import build_parts, clients_of, demand_settings
from fedasync.studies.errors import StudyError, did_you_mean, parse
from fedasync.studies.study import set_key

TABLES = ("strategy", "workload", "run", "targets", "deployment")
VALUES = ("seed", "out", "resume")
ENDS = ("time_s", "updates", "versions")
DEFAULT_UPDATES = 100

WHERE = "flower-app"


@dataclass(frozen=True)
class _Values:
    """What stands outside the tables."""

    seed: int
    out: str
    resume: bool


def write_app_folder(
    folder: Path, workload: str, strategy: str, changes: Sequence[str] = (), name: str = "fedasync-app"
) -> None:
    """Write the folder of a deployment, and print how to go on. Nothing is written where StudyError is raised."""
    config = deployment_config(workload, strategy, changes)
    clients = check_deployment(config, WHERE)
    from fedasync.flower.app_folder import write

    try:
        write(folder, config, name=name)
    except ValueError as error:
        raise StudyError(str(error)) from None
    print(_next_steps(folder, config, clients))


def deployment_config(workload: str, strategy: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration of a deployment, every key of [run] and [deployment] with a value: ``flwr run`` may change
    what is written, and nothing else.

    Workload and strategy are named as in a study; ``changes`` are ``dotted.key=value`` with a TOML value. Raises
    StudyError; what only building them tells is told by ``check_deployment``.
    """
    try:
        from fedasync.flower.settings import DeploymentSettings
    except ImportError as error:
        raise StudyError(f"{WHERE}: {error.name} is not installed; pip install 'fedasync[flower]' would do") from None

    config: dict[str, Any] = {
        "strategy": {"name": strategy},
        "workload": {"kind": workload},
        "run": {},
        "targets": {},
        "deployment": {},
        "seed": 0,
        "out": "fedasync-run",
        "resume": False,
    }
    for change in changes:
        _apply(config, change)
    if not any(key in config["run"] for key in ENDS):
        config["run"]["updates"] = DEFAULT_UPDATES
    parse(_Values, {key: config[key] for key in VALUES}, WHERE)
    config["run"] = asdict(parse(Limits, config["run"], f"{WHERE}: run"))
    config["deployment"] = asdict(parse(DeploymentSettings, config["deployment"], f"{WHERE}: deployment"))
    config["targets"] = parse(dict[str, float], config["targets"], f"{WHERE}: targets")
    return config


def _apply(config: dict[str, Any], change: str) -> None:
    key, equals, text = (part.strip() for part in change.partition("="))
    if not equals or not key:
        raise StudyError(f"--set {change}: write it as dotted.key=value")
    first, dot, _ = key.partition(".")
    if first not in TABLES + VALUES or (first in TABLES) != bool(dot):
        raise StudyError(f"--set {change}: unknown key{did_you_mean(first, [f'{t}.…' for t in TABLES] + [*VALUES])}")
    try:
        value = json.loads(json.dumps(tomllib.loads(f"value = {text}")["value"], default=str))
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a text
    set_key(config, key, value, f"--set {change}")


def check_deployment(config: dict[str, Any], where: str) -> int:
    """Make what the server and each client will make; how many clients there are. Raises StudyError."""
    run = {key: value for key, value in config["run"].items() if value is not None}
    parts = build_parts({**config, "run": run}, where)
    clients = clients_of(config, where)
    demand_settings(parts, clients, where)
    if refusal := parts.strategy.refusal(clients):
        raise StudyError(f"{where}: {refusal}")
    return clients


def _next_steps(folder: Path, config: Mapping[str, Any], clients: int) -> str:
    app = shlex.quote(str(folder))
    lines = [
        f"{folder / 'pyproject.toml'} is written. With fedasync's Python environment first on PATH, on every machine:",
        "",
        "# the server; for more than one machine, `fedasync certs` makes keys",
        "flower-superlink --insecure --disable-runtime-dependency-installation",
        "# a client; the next one on this machine: --port 9102 and partition-id=1",
        "flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9101 --node-config 'partition-id=0'",
        "# SUPERLINK: the connection's name in ~/.flwr/config.toml",
        f"flwr run {app} SUPERLINK --stream",
        "# with other values",
        f"flwr run {app} SUPERLINK --run-config 'run.updates=20 deployment.poll_s=0.5'",
        "",
        f"The workload has {clients} clients: partition-id is 0 to {clients - 1} (workload.clients sets their number).",
        f"The run is written to {config['out']!r} (key `out`) on the server's machine.",
    ]
    own = [value for value in (config["workload"]["kind"], config["strategy"]["name"]) if "." in value]
    if own:
        lines.append(f"Every machine must be able to import {' and '.join(own)}.")
    return "\n".join(lines)
