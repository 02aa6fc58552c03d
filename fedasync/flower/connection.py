"""What is asked of a SuperLink, by ``flwr``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedasync.flower.certificates import Certificates
from fedasync.flower.command_line import command
from fedasync.flower.service import FederationError

NAME = "federation"
"""The SuperLink's name in the configuration that ``flwr`` reads."""


@dataclass(frozen=True)
class Connection:
    """A SuperLink as ``flwr`` reaches it, with ``home`` as Flower's own folder (FLWR_HOME of ``environment``).

    Each question starts a process, of 1 to 2 s of CPU time. Raises FederationError for a refusal, and for no answer
    within ``timeout_s``.
    """

    home: Path
    environment: Mapping[str, str]
    timeout_s: float

    def point(self, address: str, tls: Certificates | None) -> None:
        """Write down where the SuperLink is (host:port)."""
        how: dict[str, Any] = {"root-certificates": str(tls.authority.absolute())} if tls else {"insecure": True}
        superlinks = {"default": NAME, NAME: {"address": address, **how}}
        (self.home / "config.toml").write_text(tomli_w.dumps({"superlink": superlinks}), encoding="utf-8")

    def register(self, public_key: Path, name: str) -> int:
        """Tell the SuperLink a SuperNode's key: its node ID."""
        return int(self._ask("supernode", "register", str(public_key), NAME, "--name", name)["node-id"])

    def run(self, app_folder: Path, run_config: Mapping[str, Any]) -> int:
        """Hand in an app's folder, with these values in place of the folder's: the run's ID."""
        options: list[str] = []
        if run_config:
            overrides = self.home / "run-config.toml"
            overrides.write_text(tomli_w.dumps(run_config), encoding="utf-8")
            options = ["--run-config", str(overrides)]
        return int(self._ask("run", str(app_folder), NAME, *options)["run-id"])

    def status(self, run_id: int) -> str:
        """``pending``, ``starting``, ``running``, ``finished:completed``, ``finished:failed``, ``finished:stopped``."""
        return str(self._ask("list", NAME, "--run-id", str(run_id))["runs"][0]["status"])

    def stop(self, run_id: int) -> None:
        """End a run."""
        self._ask("stop", str(run_id), NAME)

    def supernodes(self) -> list[dict[str, Any]]:
        """Its nodes: ``node-id``, ``status`` (online, offline, registered), and more."""
        return list(self._ask("supernode", "list", NAME)["nodes"])

    def _ask(self, *arguments: str) -> dict[str, Any]:
        return call([*arguments, "--format", "json"], self.environment, self.timeout_s)


def call(arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """What ``flwr`` answers (JSON). Raises FederationError for a refusal, and for no answer within ``timeout_s``."""
    said = f"flwr {' '.join(arguments[:2])}"
    try:
        ended = subprocess.run(
            command("flwr", *arguments),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FederationError(f"{said} gave no answer within {timeout_s:g} s") from None
    try:
        answer: dict[str, Any] = json.loads(ended.stdout[ended.stdout.index("{") :])
    except ValueError:
        answer = {"success": False, "error-message": f"{ended.stdout} {ended.stderr}"}
    if ended.returncode or not answer.get("success", False):
        reason = " ".join(str(answer.get("error-message", ended.stderr)).split())
        raise FederationError(f"{said}: {reason or f'ended with status {ended.returncode}'}")
    return answer
