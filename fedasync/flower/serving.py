"""A federated run over Flower: the driver under a grid and a real clock.

    run = serve(grid, Deployment(strategy, workload, Limits(updates=100), out=folder))

The server waits until enough clients have said who they are; then time 0 is. From then on, each turn of the loop takes
the replies that have come (in the order in which their leases were given out, all of one turn at one instant), rings
the coordinator's timers, writes what happened to the disk, and only then sends the tasks that follow from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedasync.core import Coordinator, Lease, Strategy, Tiers
from fedasync.federated.arrays import Arrays
from fedasync.federated.driver import Driver
from fedasync.federated.evaluation import Evaluations
from fedasync.federated.limits import Limits
from fedasync.federated.result import summarise
from fedasync.federated.selection import IdleClients
from fedasync.flower.clock import Clock, WallClock
from fedasync.flower.inbox import Inbox
from fedasync.flower.keeper import Keeper
from fedasync.flower.mailbox import Mailbox
from fedasync.flower.roster import Roster
from fedasync.flower.settings import DeploymentSettings, with_deadline
from fedasync.runs import exchanges
from fedasync.runs.run import CONFIG, Run, write

if TYPE_CHECKING:
    from fedasync.workloads.protocol import Workload

log = logging.getLogger("fedasync.flower")

FIXED = ("strategy", "workload", "seed", "targets")
"""What a run that goes on must have in common with what lies in its folder."""


class StalledError(RuntimeError):
    """Nothing was accepted for too long."""


@dataclass(frozen=True)
class Deployment:
    """What is deployed. ``config`` is kept with the run; with ``resume`` it goes on from what lies in ``out``."""

    strategy: Strategy
    workload: Workload
    limits: Limits
    settings: DeploymentSettings = DeploymentSettings()
    seed: int = 0
    targets: Mapping[str, float] = field(default_factory=dict)
    out: Path | None = None
    resume: bool = False
    name: str | None = None
    study: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def serve(grid: Grid, deployment: Deployment, clock: Clock | None = None) -> Run:
    """Run a deployment to its end, and save it.

    Raises ValueError for what cannot run, ClientFailedError and StalledError as the settings say, WorkloadError where
    the server's own workload raises. What was accepted by then is on the disk.
    """
    return _Server(grid, deployment, clock or WallClock()).run()


class _Server:
    def __init__(self, grid: Grid, deployment: Deployment, clock: Clock) -> None:
        self.deployment, self.settings, self.clock = deployment, deployment.settings, clock
        strategy = with_deadline(deployment.strategy, self.settings)
        samples = list(deployment.workload.client_samples())
        if refusal := strategy.refusal(len(samples)):
            raise ValueError(refusal)
        self.roster = Roster(samples, self.settings)
        timeout = strategy.lease_timeout_s
        if isinstance(timeout, int | float) and timeout > self.settings.stall_timeout_s:
            raise ValueError(
                f"deployment.stall_timeout_s = {self.settings.stall_timeout_s:g} ends the run before a task's own "
                f"{timeout:g} s are over; a longer one, or a shorter task_timeout_s, would do"
            )
        self.mailbox = Mailbox(grid)
        self._prepare(deployment)
        self.keeper = Keeper(deployment.out, self.settings, strategy, self._profile(strategy, len(samples)))
        self.arrays = Arrays(strategy, deployment.workload, deployment.seed)
        limits = deployment.limits
        self.evaluations = Evaluations(self.arrays, limits.evaluate_every_s, deployment.targets, limits.stop_at_target)
        if deployment.targets:
            found = self.arrays.evaluate(0)
            if missing := sorted(set(deployment.targets) - set(found)):
                raise ValueError(f"target {missing[0]!r}: the workload has no such metric; it has {sorted(found)}")
        self.coordinator = self.keeper.begin(self.arrays, self.evaluations, resume=deployment.resume)
        self.idle = IdleClients(len(samples), limits.selection, self.roster, deployment.seed)
        self.driver = Driver(
            self.coordinator,
            self.idle,
            len(samples),
            self,
            self,
            self._measured if strategy.publication.measures else None,
            versions=inf if limits.versions is None else limits.versions,
            updates=inf if limits.updates is None else limits.updates,
        )
        self._limit_s = inf if limits.time_s is None else limits.time_s
        self._now = self.keeper.elapsed_s
        self._said_s = self._server_busy_s = 0.0
        self.inbox = Inbox(self.settings, self.mailbox, self.roster, self.keeper, self.arrays, self.driver)

    def _prepare(self, deployment: Deployment) -> None:
        """Have the configuration in the folder. Raises ValueError where another run's lies there that is to go on."""
        if deployment.out is None:
            return
        deployment.out.mkdir(parents=True, exist_ok=True)
        path, asked = deployment.out / CONFIG, dict(deployment.config)
        if deployment.resume and path.is_file():
            before = json.loads(path.read_text())
            for key in FIXED:
                if key in before and before[key] != json.loads(json.dumps(asked.get(key))):
                    raise ValueError(
                        f"{path}: the run that lies here has {key} = {json.dumps(before[key])}, and is to go on with "
                        f"{json.dumps(asked.get(key))}; the same, or another folder, would do"
                    )
            return
        if not path.is_file():
            write(path, (json.dumps(asked, indent=1) + "\n").encode())

    def _profile(self, strategy: Strategy, clients: int) -> list[float] | None:
        """Seconds that each client's work is expected to take, where admission sorts clients by them."""
        if not isinstance(strategy.admission, Tiers):
            return None
        profile = self.settings.profile_s
        if profile is None or len(profile) != clients:
            got = "it is missing" if profile is None else f"got {len(profile)} for {clients} clients"
            raise ValueError(
                f"strategy {strategy.name!r} sorts clients by speed: deployment.profile_s, the seconds that each "
                f"client's task is expected to take: {got} (`fedasync calibrate` measures them)"
            )
        return list(profile)

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self) -> Run:
        try:
            self.arrays.server.snapshot()  # an update's state that cannot be kept is told now
            self._gather()
            self._go_on()
            self._serve()
            return self._close()
        except Exception:
            self.keeper.sync()
            raise
        finally:
            self.keeper.close()

    def _gather(self) -> None:
        """Wait until enough clients have joined; say for whom."""
        wanted = self.settings.least_clients or self.roster.clients
        said_s = -inf
        self.clock.start(0.0)
        while True:
            waited_s = self.clock.now()
            self.inbox.greet(waited_s)
            self.inbox.take(self._now)
            joined = len(self.roster.joined)
            if joined >= wanted:
                return
            if joined and waited_s >= self.settings.join_timeout_s:
                log.warning("starting without all clients: %s", self.roster.explain(self._now))
                return
            if waited_s >= self.settings.stall_timeout_s:
                raise StalledError(f"no client joined in {waited_s:.0f} s: {self._who()}")
            if waited_s - said_s >= self.settings.say_every_s:
                said_s = waited_s
                log.info("waiting for clients: %s", self.roster.explain(self._now))
            self.clock.wait(self.settings.poll_s, inf)

    def _go_on(self) -> None:
        """Start the clock. Of a run that was interrupted, what was in flight is lost, and given out anew."""
        self._now = max(self.coordinator.now, self.keeper.elapsed_s)
        self.clock.start(self._now)
        self.inbox.begins(self._now)
        self._said_s = self._now
        in_flight = self.coordinator.leases
        self.idle.go_on(self.keeper.draws, {lease.worker for lease in in_flight})
        for client, turns in self.keeper.turns.items():
            self.driver.turns[client] = turns
        if self.keeper.resumed:
            log.info(
                "going on at %.1f s from version %d with %d accepted contributions; %d tasks were in flight",
                self._now,
                self.coordinator.version,
                self.coordinator.ledger.accepted,
                len(in_flight),
            )
            if self.coordinator.step is not None:
                self.driver.step_done(self._now)
        self.driver.look_at_the_counts()
        if self.driver.over or self.evaluations.reached_s < inf or self._now >= self._limit_s:
            return
        for lease in in_flight:
            self.inbox.restarted(lease, self._now)
        self.driver.dispatch(self._now)
        self._write_and_send()

    def _serve(self) -> None:
        driver, coordinator = self.driver, self.coordinator
        while not driver.over and self.evaluations.reached_s == inf:
            self.clock.wait(self.settings.poll_s, self._next_s())
            now = self.clock.now()
            if now > self._limit_s:
                self._now = self._limit_s
                return
            self._now = max(now, self._now)
            self.evaluations.before(self._now, coordinator.version)
            if self.evaluations.reached_s < inf:
                return
            self.inbox.greet(self._now)
            self.inbox.take(self._now)
            if driver.over:
                return
            timer_s = coordinator.next_timer()
            if timer_s is not None and timer_s <= self._now:
                self.keeper.rung(self._now)
                driver.ring(self._now)
                if driver.over:
                    return
            if driver.dispatch_due or self.idle.next_awake_s <= self._now:
                driver.dispatch(self._now)
            self._write_and_send()
            self._watch()

    def _next_s(self) -> float:
        """The next moment, after now, at which something is to be done whether or not a reply comes."""
        moments_s = (self._limit_s, self.evaluations.next_s, self.coordinator.next_timer() or inf)
        return min((time_s for time_s in moments_s if time_s > self._now), default=inf)

    def _write_and_send(self) -> None:
        """First the disk, then the wire: a client never works on what a restarted server would not know."""
        self.keeper.turn(self._now, self.coordinator, self.arrays, self.evaluations, self.idle.draws)
        self.inbox.refused(self.mailbox.send(self.clock.now(), self.roster.node_of), self._now)

    def _watch(self) -> None:
        """Say who waits for whom when nothing happens, and give up when nothing is accepted."""
        idle_s = self._now - self.inbox.accepted_s
        if idle_s > self.settings.stall_timeout_s:
            raise StalledError(f"nothing was accepted for {idle_s:.0f} s: {self._who()}")
        if self._now - max(self._said_s, self.inbox.news_s) > self.settings.say_every_s:
            self._said_s = self._now
            log.info("%.0f s: %s", self._now, self._who())

    def _who(self) -> str:
        return f"{self.roster.explain(self._now)}; {self.coordinator.explain()}"

    def _close(self) -> Run:
        deployment, driver = self.deployment, self.driver
        self.evaluations.before(self._now, self.coordinator.version, inclusive=True)
        if self.evaluations.reached_s < inf:
            driver.ended, self._now = "target", self.evaluations.reached_s
        self.evaluations.at(self._now, self.coordinator.version)
        self.inbox.close()
        self.keeper.turn(self._now, self.coordinator, self.arrays, self.evaluations, self.idle.draws)
        record = self.keeper.record()
        summary, metrics = summarise(
            driver,
            record,
            self.evaluations,
            end_s=self._now,
            server_busy_s=self._server_busy_s,
            targets=deployment.targets,
            seed=deployment.seed,
            name=deployment.name,
            study=deployment.study,
            labels=deployment.labels,
            timing_only=False,
        )
        summary["not_batched"] = None
        summary["runtime"], summary["closed_forms"] = "flower", []
        tables = {"metrics": metrics, "exchanges": self.keeper.exchanges()}
        run = Run(dict(deployment.config), summary, tables, self.arrays.server.model, record=record)
        if deployment.out is not None:
            run.save(deployment.out)
        log.info(
            "ended at %.1f s (%s): version %d, %s", self._now, driver.ended, self.coordinator.version, summary["final"]
        )
        return run

    # -- what the driver asks for ------------------------------------------------------------------------------

    def start(self, lease: Lease, turn: int, now: float) -> None:
        self.arrays.lease(lease)
        client = lease.worker
        task = self.arrays.task(lease, turn)
        self.mailbox.put(lease, task, self.roster.most_samples(client))

    def nobody_idle(self, now: float) -> None:
        """The loop looks again when somebody is to be awake."""

    def cancelled(self, lease: Lease, now: float) -> bool:
        """Flower has no word for "stop": a client that has begun finishes what nobody waits for."""
        if self.mailbox.withdraw(lease.id):
            return True
        self.inbox.give_up(lease, exchanges.CANCELLED, now)
        return False

    def given_up(self, lease: Lease, now: float) -> bool:
        """The client goes on, and is free when its late reply comes, or Flower says that none will."""
        if self.mailbox.withdraw(lease.id):
            return True
        self.inbox.give_up(lease, exchanges.TIMEOUT, now)
        return False

    def step_begins(self, now: float) -> bool:
        return False

    # -- arrays, with what must be kept of them ------------------------------------------------------------------

    def apply(self, step: Any) -> None:
        before_s = self.clock.now()
        self.arrays.apply(step)
        self._server_busy_s += self.clock.now() - before_s
        self.keeper.version(step.version + 1, self.arrays.server.model)

    def publish(self) -> None:
        self.arrays.publish()

    def forget(self, lease_id: int) -> None:
        self.arrays.forget(lease_id)

    def _measured(self, coordinator: Coordinator, now: float) -> dict[str, float]:
        asked = coordinator.asks
        return self.arrays.measure(asked, coordinator.version + 1) if asked else {}
