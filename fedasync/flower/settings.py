"""How a deployment goes, beside what a run is: the [deployment] table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedasync.core import Strategy
from fedasync.core.bounds import check_choice, check_integer, check_real

OnClientError = Literal["continue", "stop"]
"""After a client's exception: the others go on and it is backed off, or the run ends and says so."""
Record = Literal["all", "tail"]
"""Contributions kept on disk: all (``fedasync replay`` needs them), or those since the last checkpoint."""
MixedPrecision = Literal["no", "bf16", "fp16"]

CLIENT_KEYS = ("work_s_by_client", "mixed_precision", "gradient_accumulation_steps")
"""What concerns clients only."""


@dataclass(frozen=True)
class DeploymentSettings:
    """How a deployment goes, beside what a run is.

    The run begins when ``least_clients`` have joined (None: all clients of the workload), or after ``join_timeout_s``
    with those that have, if any. Clients that join later are used from then on.

    The server looks for replies every ``poll_s``. A task's reply is waited for no longer than the strategy's
    lease_timeout_s, or where it has none ``task_timeout_s``. A client whose tasks fail is left alone for
    ``back_off_s``, twice as long after each further failure in a row, up to ``most_back_off_s``. When nothing happens
    for ``say_every_s`` the log says who waits for whom; when nothing is accepted for ``stall_timeout_s`` the run ends,
    which the log and the exit status tell.

    ``most_samples`` bounds the weight that any client may claim; None: as many samples as the workload says that it
    has. A checkpoint is written every ``checkpoint_every_s``. ``profile_s`` lists how long (s) each client's task is
    expected to take, for strategies that sort clients by speed.

    On the clients, local training runs in ``mixed_precision`` with ``gradient_accumulation_steps``.
    ``work_s_by_client`` lists the seconds that each client's task lasts at least: for demonstrations of clients with
    different speed (it sleeps for the rest); None, or 0 for a client: no more than it takes.
    """

    least_clients: int | None = None
    join_timeout_s: float = 120.0
    poll_s: float = 0.1
    task_timeout_s: float = 600.0
    on_client_error: OnClientError = "continue"
    back_off_s: float = 5.0
    most_back_off_s: float = 300.0
    say_every_s: float = 30.0
    stall_timeout_s: float = 1800.0
    most_samples: int | None = None
    checkpoint_every_s: float = 60.0
    record: Record = "all"
    profile_s: Sequence[float] | None = None
    work_s_by_client: Sequence[float] | None = None
    mixed_precision: MixedPrecision = "no"
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("poll_s", "task_timeout_s", "back_off_s", "most_back_off_s", "say_every_s", "stall_timeout_s"):
            check_real(name, getattr(self, name), 0, above=True)
        if self.least_clients is not None:
            check_integer("least_clients", self.least_clients, 1)
        check_real("join_timeout_s", self.join_timeout_s, 0)
        for client, seconds in enumerate(self.profile_s or ()):
            check_real(f"profile_s[{client}]", seconds, 0, above=True)
        check_real("checkpoint_every_s", self.checkpoint_every_s, 0)
        check_choice("on_client_error", self.on_client_error, OnClientError)
        check_choice("record", self.record, Record)
        check_choice("mixed_precision", self.mixed_precision, MixedPrecision)
        check_integer("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        if self.most_samples is not None:
            check_integer("most_samples", self.most_samples, 1)
        for client, seconds in enumerate(self.work_s_by_client or ()):
            check_real(f"work_s_by_client[{client}]", seconds, 0)
        if self.most_back_off_s < self.back_off_s:
            raise ValueError(
                f"most_back_off_s = {self.most_back_off_s:g} is less than back_off_s = {self.back_off_s:g}"
            )

    def back_off(self, failures: int) -> float:
        """Seconds that a client is left alone after so many failures in a row."""
        return min(self.most_back_off_s, self.back_off_s * 2.0 ** min(failures - 1, 60)) if failures else 0.0

    def least_work_s(self, client: int) -> float:
        """Seconds that a client's whole task lasts at least."""
        return float(self.work_s_by_client[client]) if self.work_s_by_client else 0.0


def with_deadline(strategy: Strategy, settings: DeploymentSettings) -> Strategy:
    """The strategy with a time limit for its leases, its own or the deployment's."""
    if strategy.lease_timeout_s is not None:
        return strategy
    return replace(strategy, lease_timeout_s=settings.task_timeout_s)
