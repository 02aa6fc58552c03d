"""How a real run on prompts goes: when it ends, which processes make it, and what becomes of what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer, check_real, check_type
from fedasync.rl.engine import KvCache
from fedasync.rl.group_driver import Dropped
from fedasync.rl.partial_groups import PartialGroups, Refill

Channel = Literal["files", "shared_memory", "distributed"]


@dataclass(frozen=True)
class PromptSettings:
    """``[prompts]``: ``answers`` to each, how often the task's prompts are gone through, and in which order."""

    answers: int
    epochs: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_integer("prompts: answers", self.answers, 1)
        check_type("prompts: shuffle", self.shuffle, bool, "true or false")
        if self.epochs is not None:
            check_integer("prompts: epochs", self.epochs, 1)


@dataclass(frozen=True)
class ProcessSettings:
    """``[processes]``: ``workers`` that generate ``max_running`` answers each at a time, and ``ranks`` that train.

    ``threads`` are torch's in each of them. New weights go through ``channel``; sequences that they interrupt have
    their KV cache recomputed or kept (``kv``). ``partial_groups``: what becomes of a group that loses an answer;
    ``dropped``: whether the prompt of a group that was dropped as too stale is asked again; ``most_attempts``: how
    often a prompt whose group failed is asked. A reward (or a turn of the environment) that takes longer than
    ``reward_timeout_s`` fails its answer. Metrics go to a ``tracker`` of Accelerate's (tensorboard, wandb, trackio, …).
    A process that dies, or says nothing for ``silent_s``, is started again, ``restarts`` times in all.
    """

    workers: int = 1
    ranks: int = 1
    threads: int = 1
    max_running: int = 64
    channel: Channel = "files"
    kv: KvCache = "recompute"
    partial_groups: PartialGroups = Refill()
    dropped: Dropped = "replace"
    most_attempts: int = 3
    reward_timeout_s: float | None = 60.0
    tracker: str | None = None
    restarts: int = 5
    silent_s: float = 120.0
    start_timeout_s: float = 180.0

    def __post_init__(self) -> None:
        for name in ("workers", "ranks", "threads", "max_running", "most_attempts"):
            check_integer(f"processes: {name}", getattr(self, name), 1)
        check_integer("processes: restarts", self.restarts, 0)
        check_choice("processes: channel", self.channel, Channel)
        check_choice("processes: kv", self.kv, KvCache)
        check_choice("processes: dropped", self.dropped, Dropped)
        check_type(
            "processes: partial_groups", self.partial_groups, PartialGroups, "a RequireFull, an AllowShort or a Refill"
        )
        for name in ("silent_s", "start_timeout_s"):
            check_real(f"processes: {name}", getattr(self, name), 0, above=True)
        if self.reward_timeout_s is not None:
            check_real("processes: reward_timeout_s", self.reward_timeout_s, 0, above=True)


@dataclass(frozen=True)
class RunSettings:
    """``[run]``: when it stops (whichever limit comes first), what is evaluated, and what is kept on the disk.

    ``versions`` are committed steps, ``updates`` trained groups. Every ``evaluate_every``-th version is evaluated on
    ``evaluation_prompts`` held-out prompts. After every ``checkpoint_every``-th version the run can go on from there
    (None: only from its beginning). Without a new version for ``watchdog_s`` the run says who waits for whom, and
    fails.
    """

    versions: int | None = None
    time_s: float | None = None
    updates: int | None = None
    warm_up_versions: int = 0
    evaluate_every: int | None = None
    evaluation_prompts: int = 128
    checkpoint_every: int | None = 10
    watchdog_s: float = 600.0

    def __post_init__(self) -> None:
        if self.versions is None and self.time_s is None and self.updates is None:
            raise ValueError("a run needs an end: give versions, time_s, or updates")
        if self.time_s is not None:
            check_real("time_s", self.time_s, 0, inf, above=True)
        for name in ("versions", "updates", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_integer("evaluation_prompts", self.evaluation_prompts, 1)
        check_integer("warm_up_versions", self.warm_up_versions, 0)
        check_real("watchdog_s", self.watchdog_s, 0, above=True)
        if self.versions is not None and self.warm_up_versions >= self.versions:
            raise ValueError(
                f"warm_up_versions = {self.warm_up_versions} leaves nothing of {self.versions} versions to measure; "
                f"0 to {self.versions - 1} would do"
            )
