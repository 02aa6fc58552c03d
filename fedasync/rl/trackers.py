"""Trackers of the trainer's metrics: which there are, what each needs, and where its files lie.

Accelerate leaves a tracker out, with a warning, whose package is missing; here that is refused.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROJECT = "fedasync"
"""What trackers call the runs together."""
TRACKERS: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "comet_ml": ("comet_ml",),
    "aim": ("aim",),
    "mlflow": ("mlflow",),
    "clearml": ("clearml",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
}
"""Accelerate's names → packages, any of which would do."""


def tracker_refusal(tracker: str) -> str | None:
    """Why nothing could be tracked with it here; None where it could be."""
    if tracker not in TRACKERS:
        return f"tracker = {tracker!r}; {', '.join(map(repr, TRACKERS))} would do"
    packages = TRACKERS[tracker]
    if any(find_spec(package) for package in packages):
        return None
    return f"tracker = {tracker!r} needs the package {packages[0]}: pip install {packages[0].replace('_', '-')}"


def start_settings(tracker: str, folder: Path | None) -> dict[str, dict[str, Any]]:
    """Keywords of the tracker's start, for Accelerate's ``init_trackers``; ``folder``: the tracker's, in its run's.

    A run has its folder's name. What Weights & Biases writes lies in ``folder``, unless WANDB_DIR says otherwise.
    """
    if folder is None or tracker not in ("wandb", "trackio"):
        return {}
    told: dict[str, Any] = {"name": folder.absolute().parent.name}
    if tracker == "wandb" and "WANDB_DIR" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)  # it would take another where there is none
        told["dir"] = str(folder)
    return {tracker: told}
