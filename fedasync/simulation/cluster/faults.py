"""What goes wrong on a cluster, and when: descriptions only, which the runtime carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fedasync.core.bounds import check_integer, check_real


def _check_span(what: str, at_s: float, for_s: float | None) -> None:
    check_real(f"{what}: at_s", at_s, 0)
    if for_s is not None:
        check_real(f"{what}: for_s", for_s, 0, above=True)


@dataclass(frozen=True)
class ServerDown:
    """A rollout server dies at ``at_s`` and is back ``for_s`` later (None: never); what ran on it is lost."""

    server: int
    at_s: float
    for_s: float | None = None

    def __post_init__(self) -> None:
        check_integer("servers_down: server", self.server, 0)
        _check_span("servers_down", self.at_s, self.for_s)


@dataclass(frozen=True)
class SlowServer:
    """A rollout server computes ``times`` as long from ``at_s`` on, for ``for_s`` (None: to the end)."""

    server: int
    at_s: float
    times: float
    for_s: float | None = None

    def __post_init__(self) -> None:
        check_integer("slow_servers: server", self.server, 0)
        _check_span("slow_servers", self.at_s, self.for_s)
        check_real("slow_servers: times", self.times, 0, above=True)


@dataclass(frozen=True)
class SyncFails:
    """An attempt to bring new weights to a server fails with ``probability``, which is known after ``timeout_s``.

    ``retry_s`` later it is tried again, ``most_retries`` times at most; then servers go on with the weights they have.
    """

    probability: float
    timeout_s: float
    retry_s: float = 0.0
    most_retries: int = 3

    def __post_init__(self) -> None:
        check_real("sync_fails: probability", self.probability, 0, 1)
        check_real("sync_fails: timeout_s", self.timeout_s, 0)
        check_real("sync_fails: retry_s", self.retry_s, 0)
        check_integer("sync_fails: most_retries", self.most_retries, 0)


@dataclass(frozen=True)
class SlowSync:
    """Bringing the versions ``from_version`` … ``to_version`` (inclusive) to the servers takes ``times`` as long."""

    from_version: int
    to_version: int
    times: float

    def __post_init__(self) -> None:
        check_integer("slow_syncs: from_version", self.from_version, 0)
        check_integer("slow_syncs: to_version", self.to_version, self.from_version)
        check_real("slow_syncs: times", self.times, 0, above=True)


@dataclass(frozen=True)
class RewardStuck:
    """The reward service grades nothing from ``at_s`` on, for ``for_s`` (None: to the end)."""

    at_s: float
    for_s: float | None = None

    def __post_init__(self) -> None:
        _check_span("reward_stuck", self.at_s, self.for_s)


@dataclass(frozen=True)
class TrainerCrash:
    """The trainer dies at ``at_s`` and resumes ``restart_s`` later: it makes again the step that it was in.

    What it knew is what it had written at its death: versions, finished groups that wait, who is in flight.
    ``keeps_rollouts``: the servers outlive it; otherwise the whole run dies, and prompts in flight are asked again.
    """

    at_s: float
    restart_s: float
    keeps_rollouts: bool = False

    def __post_init__(self) -> None:
        check_real("trainer_crashes: at_s", self.at_s, 0)
        check_real("trainer_crashes: restart_s", self.restart_s, 0)


@dataclass(frozen=True)
class Faults:
    """All that goes wrong in a scenario; by default nothing.

    A generated answer is a failure of the infrastructure with ``answer_failure_probability``, and its reply gets lost
    with ``lost_reply_probability``; that it is lost shows after ``answer_timeout_s`` (None: never). A run in which no
    version is made for ``stalled_after_s`` is given up.
    """

    servers_down: tuple[ServerDown, ...] = ()
    slow_servers: tuple[SlowServer, ...] = ()
    answer_failure_probability: float = 0.0
    lost_reply_probability: float = 0.0
    answer_timeout_s: float | None = None
    sync_fails: SyncFails | None = None
    slow_syncs: tuple[SlowSync, ...] = ()
    reward_stuck: tuple[RewardStuck, ...] = ()
    trainer_crashes: tuple[TrainerCrash, ...] = ()
    stalled_after_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("answer_failure_probability", "lost_reply_probability"):
            check_real(f"faults: {name}", getattr(self, name), 0, 1)
        for name in ("answer_timeout_s", "stalled_after_s"):
            if getattr(self, name) is not None:
                check_real(f"faults: {name}", getattr(self, name), 0, above=True)
        for server in {down.server for down in self.servers_down}:
            own = [(down.at_s, down.for_s) for down in self.servers_down if down.server == server]
            _check_apart(f"servers_down: server {server} is down", own)
        _check_apart("reward_stuck: the service is stuck", [(stuck.at_s, stuck.for_s) for stuck in self.reward_stuck])
        _check_apart("trainer_crashes: it is down", [(crash.at_s, crash.restart_s) for crash in self.trainer_crashes])

    def check_servers(self, servers: int) -> None:
        """Raise ValueError for a fault of a server that the cluster does not have."""
        for name in ("servers_down", "slow_servers"):
            for fault in getattr(self, name):
                if fault.server >= servers:
                    raise ValueError(
                        f"faults: {name}: the cluster has no server {fault.server}; 0 to {servers - 1} would do"
                    )


def _check_apart(what: str, spans: Sequence[tuple[float, float | None]]) -> None:
    """Raise ValueError for times (start, length) that overlap."""
    ends = -inf
    for at_s, for_s in sorted(spans, key=lambda span: span[0]):
        if at_s < ends:
            raise ValueError(f"faults: {what} at {at_s:g} s, and still is from before; times apart would do")
        ends = inf if for_s is None else at_s + for_s
