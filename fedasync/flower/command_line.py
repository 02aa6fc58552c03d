"""Flower's own commands: where they are, what they are called with, in which environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fedasync.flower.certificates import Certificates
from fedasync.flower.service import FederationError

_BIN = Path(sys.executable).parent


def command(name: str, *arguments: str) -> list[str]:
    """One of Flower's commands, in this Python."""
    script = _BIN / name
    if not script.is_file():
        raise FederationError(f"{script} is missing; pip install 'fedasync[flower]' in this environment would do")
    return [sys.executable, str(script), *arguments]


def superlink(
    address: str, tls: Certificates | None, *, authenticate: bool, isolation: str, database: Path | None
) -> list[str]:
    """The command of a SuperLink at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    options = ["--disable-runtime-dependency-installation", "--host", host, "--port", port, "--isolation", isolation]
    if tls:
        options += ["--ssl-ca-certfile", str(tls.authority), "--ssl-certfile", str(tls.server)]
        options += ["--ssl-keyfile", str(tls.server_key)]
    else:
        options.append("--insecure")
    if authenticate:
        options.append("--enable-supernode-auth")
    if database:
        options += ["--database", str(database)]
    return command("flower-superlink", *options)


def superexec(address: str, tls: Certificates | None) -> list[str]:
    """The command of a SuperExec that starts the apps of the SuperLink at ``address``."""
    return command("flower-superexec", *_trust(tls), "--runtime-api-address", address)


def supernode(
    superlink_address: str, own_address: str, node_config: str, tls: Certificates | None, key: Path | None = None
) -> list[str]:
    """The command of a SuperNode; ``key``: the private one that it authenticates itself with."""
    host, _, port = own_address.rpartition(":")
    options = [*_trust(tls), "--superlink", superlink_address, "--host", host, "--port", port]
    if key:
        options += ["--auth-supernode-private-key", str(key)]
    return command("flower-supernode", *options, "--node-config", node_config)


def _trust(tls: Certificates | None) -> list[str]:
    return ["--root-certificates", str(tls.authority)] if tls else ["--insecure"]


def environment_of(home: Path, poll_s: float, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a federation's processes, with Flower's own folder ``home``; they call nobody else."""
    local = [*filter(None, [os.environ.get("NO_PROXY", "")]), "127.0.0.1", "localhost"]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(_BIN), os.environ.get("PATH", os.defpath)]),  # they start each other by name
        "NO_PROXY": ",".join(local),
        "no_proxy": ",".join(local),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": f"{poll_s:g}",
        "OMP_NUM_THREADS": "1",  # several clients share this machine
        "PYTHONUNBUFFERED": "1",
        **more,
    }
