"""A learner in a folder: ``learner.safetensors`` (weights and the optimiser's moments) and ``learner.json``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedasync.rl.placement import spread_like, whole

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.learner import Learner

FORMAT = 1
TENSORS, ABOUT = "learner.safetensors", "learner.json"


def saved(learner: Learner, folder: Path) -> None:
    """Write the learner into ``folder``, in place of what is there.

    All is written beside it and put in its place by renaming, so that it is the whole of one save or of none. Over
    several ranks the first one writes, and all wait for it.
    """
    from safetensors.torch import save_file

    place = learner.placement
    tensors = {f"weights.{name}": each for name, each in learner.weights().items()}
    for name, parameter in place.parameters.items():
        for key, value in place.optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{key}.{name}"] = whole(value).detach().cpu().clone()
    if place.rank == 0:
        about = {
            "format": FORMAT,
            "version": learner.version,
            "steps": learner.steps,
            "seed": learner.seed,
            "optimiser": learner.problem.optimiser.kind,
        }
        beside, former = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
        for left in (beside, former):
            shutil.rmtree(left, ignore_errors=True)
        beside.mkdir(parents=True)
        save_file({name: each.contiguous() for name, each in tensors.items()}, beside / TENSORS)
        (beside / ABOUT).write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
        for name in (TENSORS, ABOUT):
            _flush(beside / name)
        if folder.exists():
            os.rename(folder, former)
        os.rename(beside, folder)
        _flush(folder.parent)
        shutil.rmtree(former, ignore_errors=True)
    place.wait()


def restored(learner: Learner, folder: Path) -> None:
    """Make a learner what ``saved`` wrote of one of the same problem.

    Raises ValueError where the folder holds none, or one of another policy, optimiser or seed; the learner is then as
    it was.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"learner: {folder} holds no saved learner: {error}") from None
    own = {"format": FORMAT, "seed": learner.seed, "optimiser": learner.problem.optimiser.kind}
    for name, here in own.items():
        if about.get(name) != here:
            raise ValueError(f"learner: {folder} was saved with {name} {about.get(name)!r}, and here it is {here!r}")
    weights = {name.removeprefix("weights."): each for name, each in tensors.items() if name.startswith("weights.")}
    if missing := set(learner.weights()) - set(weights):
        raise ValueError(f"learner: {folder} has no weights {min(missing)!r}: it was saved by another policy")
    learner.load_weights(weights)
    place = learner.placement
    place.optimiser.state.clear()
    for name, parameter in place.parameters.items():
        state: dict[str, Tensor] = {}
        for key in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
            value = tensors.get(f"optimiser.{key}.{name}")
            if value is not None:
                state[key] = value if key == "step" else spread_like(value, parameter)
        if state:
            place.optimiser.state[parameter] = state
    learner.version, learner.steps = int(about["version"]), int(about["steps"])
    with torch.no_grad():
        place.optimiser.zero_grad(set_to_none=True)


def _flush(path: Path) -> None:
    """Onto the disk, so that a rename after it is not there before it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
