"""The folder that ``flwr run`` takes: a pyproject.toml that names fedasync's apps, and the configuration of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w

from fedasync.flower.configuration import flatten

SERVER_APP, CLIENT_APP = "fedasync.apps.server_app:app", "fedasync.apps.client_app:app"

NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
"""What Flower takes for the name of an app."""


def write(
    folder: Path,
    config: Mapping[str, Any],
    *,
    name: str = "fedasync-app",
    server_app: str = SERVER_APP,
    client_app: str = CLIENT_APP,
) -> Path:
    """Write the app ``name`` with a run's configuration; the path of its pyproject.toml.

    The bundle that Flower makes of it holds that file alone: apps and data are there already, on every machine that
    has fedasync installed. Raises ValueError for a folder that is not empty, and for a name or configuration that
    Flower does not take.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: at most 32 letters, digits and hyphens, a letter first, would do")
    flat = flatten(config)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a new or an empty folder would do")
    if folder.is_dir() and (there := next(folder.iterdir(), None)):
        raise ValueError(f"{folder} is not empty: {there.name} is there; a new or an empty folder would do")
    pyproject = {
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": f"A federated run, configured for fedasync {version('fedasync')}",
            "license": "Apache-2.0",
            # fedasync itself is installed on every machine by its owner: no process fetches it from an index.
            "dependencies": ["flwr>=1.42,<1.43"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedasync",
                    "components": {"serverapp": server_app, "clientapp": client_app},
                    "config": flat,
                }
            }
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pyproject.toml"
    path.write_text(tomli_w.dumps(pyproject), encoding="utf-8")
    return path
