"""What every child process is told, as a JSON file: the problem, and how it is worked on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedasync.core.bounds import check_integer, check_real, check_type
from fedasync.trainer.channels import ChannelSpec


@dataclass(frozen=True)
class ChildSettings:
    """The same for all workers and ranks of a run."""

    problem: Mapping[str, Any]
    """The tables [task], [policy], [sampling], [objective], [optimiser]."""
    where: str
    """Where they were read, for messages."""
    seed: int
    channel: ChannelSpec
    max_running: int = 64
    """Sequences that a worker decodes together."""
    reward_timeout_s: float | None = None
    evaluation_prompts: int = 0
    """Held-out prompts of an evaluation."""
    pulse_s: float = 1.0
    iterations_s: float = 0.5
    load_timeout_s: float = 20.0
    engine: Mapping[str, Any] | None = None
    """A completions server that generates, as ``fedasync.rl.openai_settings`` reads it; None: the worker does."""
    sharded: bool | None = None
    """Ranks share the weights (FSDP); None: as Accelerate's environment says."""
    tracker: str | None = None
    """Accelerate's name of a tracker of metrics (tensorboard, wandb, trackio, …), and where it writes."""
    tracker_folder: str = ""

    def __post_init__(self) -> None:
        check_type("child settings: problem", self.problem, Mapping, "a table")
        check_integer("child settings: seed", self.seed, 0)
        check_integer("child settings: max_running", self.max_running, 1)
        check_integer("child settings: evaluation_prompts", self.evaluation_prompts, 0)
        for name in ("pulse_s", "iterations_s", "load_timeout_s"):
            check_real(f"child settings: {name}", getattr(self, name), 0, above=True)
        if self.reward_timeout_s is not None:
            check_real("child settings: reward_timeout_s", self.reward_timeout_s, 0, above=True)

    def for_others(self) -> dict[str, Any]:
        """What workers on other machines are told, as JSON keeps it; ``told`` reads it."""
        return asdict(replace(self, tracker=None, tracker_folder=""))

    @staticmethod
    def told(told: Mapping[str, Any]) -> ChildSettings:
        """Raises KeyError, TypeError and ValueError for what are no settings."""
        return ChildSettings(**{**told, "channel": ChannelSpec(**told["channel"])})

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> ChildSettings:
        """Raises ValueError for what ``write`` did not write, OSError where nothing can be read."""
        try:
            return ChildSettings.told(json.loads(path.read_text()))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no settings of child processes: {error!r}") from None
