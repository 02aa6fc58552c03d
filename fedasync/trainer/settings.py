"""How a real run on prompts goes: when it ends, which processes make it, and what becomes of what goes wrong."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from socket import inet_aton
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer, check_real, check_type
from fedasync.rl.engine import KvCache
from fedasync.rl.group_driver import Dropped
from fedasync.rl.partial_groups import PartialGroups, Refill
from fedasync.trainer.addresses import MOST_PORT, host_and_port

Channel = Literal["files", "shared_memory", "distributed"]
DataParallel = Literal["ddp", "fsdp"]


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
    often a prompt is asked whose group failed by its own fault. A reward (or a turn of the environment) that takes
    longer than ``reward_timeout_s`` fails its answer. Metrics go to a ``tracker`` of Accelerate's (tensorboard, wandb,
    trackio, …). A process that dies, or says nothing for ``silent_s``, is started again, ``restarts`` times in all.
    Ranks have all weights each (``data_parallel`` "ddp") or share them ("fsdp"); None: as Accelerate's environment
    says.

    ``remote_workers`` come from other machines by themselves, beside the ``workers`` that are started here. They
    connect to ``listen``, ``host:port`` as they reach this machine (port 0: a free one), and get weights from
    ``weights_port`` (None: a free one) of the same host.
    """

    workers: int = 1
    remote_workers: int = 0
    listen: str | None = None
    weights_port: int | None = None
    ranks: int = 1
    data_parallel: DataParallel | None = None
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
        check_integer("processes: remote_workers", self.remote_workers, 0)
        check_integer("processes: workers", self.workers, 0 if self.remote_workers else 1)
        for name in ("ranks", "threads", "max_running", "most_attempts"):
            check_integer(f"processes: {name}", getattr(self, name), 1)
        check_integer("processes: restarts", self.restarts, 0)
        check_choice("processes: channel", self.channel, Channel)
        check_choice("processes: kv", self.kv, KvCache)
        if self.data_parallel is not None:
            check_choice("processes: data_parallel", self.data_parallel, DataParallel)
            if self.ranks == 1:
                raise ValueError(
                    f"processes: data_parallel = {self.data_parallel!r} says nothing with ranks = 1; leave it out, or "
                    "give 2 ranks or more"
                )
        check_choice("processes: dropped", self.dropped, Dropped)
        check_type(
            "processes: partial_groups", self.partial_groups, PartialGroups, "a RequireFull, an AllowShort or a Refill"
        )
        for name in ("silent_s", "start_timeout_s"):
            check_real(f"processes: {name}", getattr(self, name), 0, above=True)
        if self.reward_timeout_s is not None:
            check_real("processes: reward_timeout_s", self.reward_timeout_s, 0, above=True)
        if self.weights_port is not None:
            check_integer("processes: weights_port", self.weights_port, 1)
            if self.weights_port > MOST_PORT:
                raise ValueError(f"processes: weights_port must be an integer ≤ {MOST_PORT}, got {self.weights_port}")
        if self.listen is not None:
            _check_listen(self.listen)
        if self.remote_workers:
            self._check_remote()
            return
        for name in ("listen", "weights_port"):
            if (told := getattr(self, name)) is not None:
                raise ValueError(
                    f"processes: {name} = {told!r} says nothing with remote_workers = 0; leave it out, or give "
                    "1 remote worker or more"
                )

    @property
    def all_workers(self) -> int:
        """Those of this machine, which have the first numbers, and those of others."""
        return self.workers + self.remote_workers

    def _check_remote(self) -> None:
        if self.listen is None:
            raise ValueError(
                f"processes: remote_workers = {self.remote_workers} without listen; this machine's address as they "
                'reach it would do, such as listen = "10.0.0.1:7777"'
            )
        if self.channel != "distributed":
            raise ValueError(
                f"processes: channel = {self.channel!r} with remote_workers = {self.remote_workers}: other machines "
                "do not see it; 'distributed' would do"
            )
        if self.weights_port == host_and_port(self.listen)[1]:
            raise ValueError(
                f"processes: weights_port = {self.weights_port} is the port of listen = {self.listen!r}; another would "
                "do, or leave it out for a free one"
            )


def _check_listen(address: str) -> None:
    try:
        host, _ = host_and_port(address)
        fits = not _is_everywhere(host)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"processes: listen: got {address!r}; this machine's address as others reach it would do, such as "
            "'10.0.0.1:7777' (port 0: a free one)"
        )


def _is_everywhere(host: str) -> bool:
    """Whether one may listen there on all of a machine's addresses, so that nobody can call it by that."""
    with suppress(ValueError):
        return ip_address(host).is_unspecified
    with suppress(OSError):
        return inet_aton(host) == bytes(4)  # "0" and "000.0.0.0", as the system reads them
    return host == "*"


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
