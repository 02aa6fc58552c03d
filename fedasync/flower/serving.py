"""A federated run over Flower: the driver under a grid and a real clock.

    run = serve(grid, Deployment(strategy, workload, Limits(updates=100), out=folder))

The server waits until enough clients have said who they are; then time 0 is. From then on, each turn of the loop takes
the replies that have come (in the order in which their leases were given out, all of one turn at one instant), rings
the coordinator's timers, writes what happened to the disk, and only then sends the tasks that follow from it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedasync.aggregation.check import Defect
from fedasync.core import Coordinator, Lease, Strategy, Tiers
from fedasync.federated.arrays import Arrays
from fedasync.federated.driver import Driver
from fedasync.federated.evaluation import Evaluations
from fedasync.federated.limits import Limits
from fedasync.federated.result import summarise
from fedasync.federated.selection import IdleClients
from fedasync.flower.clock import Clock, WallClock
from fedasync.flower.failures import ClientFailure
from fedasync.flower.keeper import Keeper
from fedasync.flower.mailbox import FAILURES, Came, Mailbox
from fedasync.flower.messages import Sent, read_hello, read_reply
from fedasync.flower.roster import Roster
from fedasync.flower.settings import DeploymentSettings
from fedasync.runs import exchanges
from fedasync.runs.exchanges import Exchange
from fedasync.runs.run import Run

if TYPE_CHECKING:
    from fedasync.workloads.protocol import Workload

log = logging.getLogger("fedasync.flower")

TTL_OVER_TIMEOUT = 1.25
"""A message lives so many times as long as its reply is waited for: one that is a little late is still counted."""


class StalledError(RuntimeError):
    """Nothing was accepted for too long."""


class ClientFailedError(RuntimeError):
    """A client raised, and the deployment is to stop then."""


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


def with_deadline(strategy: Strategy, settings: DeploymentSettings) -> Strategy:
    """The strategy with a time limit for its leases, its own or the deployment's."""
    if strategy.lease_timeout_s is not None:
        return strategy
    return replace(strategy, lease_timeout_s=settings.task_timeout_s)


class _Server:
    def __init__(self, grid: Grid, deployment: Deployment, clock: Clock) -> None:
        self.deployment, self.settings, self.clock = deployment, deployment.settings, clock
        strategy = with_deadline(deployment.strategy, self.settings)
        samples = list(deployment.workload.client_samples())
        if refusal := strategy.refusal(len(samples)):
            raise ValueError(refusal)
        self.roster = Roster(samples, self.settings)
        timeout = strategy.lease_timeout_s
        longest_s = timeout if isinstance(timeout, int | float) else self.settings.task_timeout_s
        self.mailbox = Mailbox(grid, TTL_OVER_TIMEOUT * longest_s)
        self.keeper = Keeper(deployment.out, self.settings, strategy, self._profile(strategy, len(samples)))
        self.arrays = Arrays(strategy, deployment.workload, deployment.seed)
        limits = deployment.limits
        self.evaluations = Evaluations(self.arrays, limits.evaluate_every_s, deployment.targets, limits.stop_at_target)
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
        self._accepted_s = self._news_s = self._now
        self._server_busy_s = 0.0
        self._given_up: dict[int, str] = {}
        """Leases that nobody waits for any more, and why, whose clients are still at work."""

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
            self._gather()
            self._go_on()
            self._serve()
            return self._close()
        finally:
            self.keeper.close()

    def _gather(self) -> None:
        """Wait until enough clients have joined; say for whom."""
        wanted = self.settings.least_clients or self.roster.clients
        waited_s, said_s = 0.0, 0.0
        while len(self.roster.joined) < wanted:
            self._greet()
            for came in self.mailbox.take():
                self._meet(came)
            if len(self.roster.joined) >= wanted:
                return
            if waited_s >= self.settings.join_timeout_s and self.roster.joined:
                log.warning("starting without all clients: %s", self.roster.explain(self._now))
                return
            if waited_s >= self.settings.stall_timeout_s:
                raise StalledError(f"no client joined in {waited_s:.0f} s: {self._who()}")
            if waited_s >= said_s:
                log.info("waiting for clients: %s", self._who())
                said_s = waited_s + self.settings.say_every_s
            self.clock.wait(self.settings.poll_s, inf)
            waited_s += self.settings.poll_s

    def _go_on(self) -> None:
        """Start the clock. Of a run that was interrupted, what was in flight is lost, and given out anew."""
        self.clock.start(self.keeper.elapsed_s)
        self._now = max(self.coordinator.now, self.keeper.elapsed_s, 0.0)
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
        for lease in in_flight:
            self.driver.failed(lease.id, lease.worker, exchanges.RESTARTED, self._now)
        self.driver.look_at_the_counts()
        if not self.driver.over:
            self.driver.dispatch(self._now)
        self._write_and_send()

    def _serve(self) -> None:
        driver, coordinator = self.driver, self.coordinator
        while not driver.over:
            self.clock.wait(self.settings.poll_s, self._next_s())
            now = self.clock.now()
            if now > self._limit_s:
                self._now = self._limit_s
                return
            self._now = max(now, self._now)
            self.evaluations.before(self._now, coordinator.version)
            if self.evaluations.reached_s < inf:
                return
            self._greet()
            for came in self.mailbox.take():
                if came.sent is None:
                    self._meet(came)
                else:
                    self._take_reply(came, came.sent)
                if driver.over:
                    break
            if driver.over:
                break
            timer_s = coordinator.next_timer()
            if timer_s is not None and timer_s <= self._now:
                self.keeper.rung(self._now)
                driver.ring(self._now)
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
        for refused in self.mailbox.send(self._now):
            self._failed(refused, "not taken by the SuperLink", self._now)

    def _watch(self) -> None:
        """Say who waits for whom when nothing happens, and give up when nothing is accepted."""
        if self._now - self._accepted_s > self.settings.stall_timeout_s:
            raise StalledError(f"nothing was accepted for {self._now - self._accepted_s:.0f} s: {self._who()}")
        if self._now - self._news_s > self.settings.say_every_s:
            self._news_s = self._now
            log.info("%.0f s: %s", self._now, self._who())

    def _who(self) -> str:
        return f"{self.roster.explain(self._now)}; {self.coordinator.explain()}"

    def _close(self) -> Run:
        deployment, driver = self.deployment, self.driver
        self.evaluations.before(self._now, self.coordinator.version, inclusive=True)
        if self.evaluations.reached_s < inf:
            driver.ended, self._now = "target", self.evaluations.reached_s
        self.evaluations.at(self._now, self.coordinator.version)
        for sent in self.mailbox.under_way:
            self._note(sent, self._given_up.get(sent.lease.id, exchanges.CANCELLED))
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
        summary["runtime"] = "flower"
        tables = {"metrics": metrics, "exchanges": self.keeper.exchanges()}
        run = Run(dict(deployment.config), summary, tables, self.arrays.server.model, record=record)
        if deployment.out is not None:
            run.save(deployment.out)
        log.info(
            "ended at %.1f s (%s): version %d, %s", self._now, driver.ended, self.coordinator.version, summary["final"]
        )
        return run

    # -- nodes -------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        new = self.roster.connected(self.mailbox.nodes())
        if new:
            self.mailbox.ask(new)

    def _meet(self, came: Came) -> None:
        """A node says who it is."""
        if came.message.has_error():
            error = came.message.error
            log.warning("node %d did not say who it is: %s (%s)", came.node_id, FAILURES.get(error.code), error.reason)
            self.roster.ask_again(came.node_id)
            return
        try:
            hello = read_hello(came.message.content)
            problem = self.roster.welcome(came.node_id, hello)
        except ValueError as error:
            problem = f"node {came.node_id}: {error}"
        if problem is not None:
            log.warning("not used: %s", problem)
            if self.settings.on_client_error == "stop":
                raise ClientFailedError(problem)
            return
        log.info("client %d joined: node %d on %s, %s", hello.client, came.node_id, hello.host, hello.software)
        for sent in self.mailbox.under_way:  # its former node will not answer any more
            if sent.lease.worker == hello.client and sent.node_id != came.node_id:
                self.mailbox.drop(sent.lease.id)
                self._failed(sent, "node replaced", self._now)

    # -- replies -----------------------------------------------------------------------------------------------

    def _take_reply(self, came: Came, sent: Sent) -> None:
        now, lease = self._now, sent.lease
        self._news_s = now
        message = came.message
        if message.has_error():
            reason = FAILURES.get(message.error.code, f"error {message.error.code}")
            log.warning("client %d, lease %d: %s (%s)", lease.worker, lease.id, reason, message.error.reason)
            if message.error.code == 2:
                self._stop_if_told(f"client {lease.worker}: {message.error.reason}")
            self._failed(sent, reason, now)
            return
        if not self.coordinator.is_in_flight(lease.id):  # late: counted, and its client is free
            self._note(sent, self._given_up.pop(lease.id, exchanges.CANCELLED), returned_s=now)
            self.driver.delivered(lease.id, lease.worker, now)
            return
        reply = read_reply(message.content, lease, sent.layout, sent.dtype, sent.most_samples)
        found = reply.contribution
        if isinstance(found, ClientFailure):
            log.warning("%s", found)
            self._stop_if_told(str(found))
            self._failed(sent, "client error", now)
            return
        size = 0
        if not isinstance(found, Defect):
            size = found.values.nbytes + (0 if found.integers is None else found.integers.nbytes)
            self.keeper.contribution(lease.id, found)
            defect = self.arrays.receive(lease.id, found)
        else:
            defect = found
        if defect is not None:
            self.keeper.no_contribution(lease.id)
            log.warning("client %d, lease %d: %s: %s", lease.worker, lease.id, defect.reason, defect.detail)
            self.driver.tell_unfit(lease.worker, lease.id, now, defect.reason, defect.detail)
            self.roster.failed(lease.worker, now)
        else:
            self.roster.succeeded(lease.worker)
            self._accepted_s = now
        outcome = exchanges.DELIVERED if defect is None else exchanges.REJECTED
        self._note(sent, outcome, returned_s=now, returned_bytes=size, **reply.measured)
        self.driver.delivered(lease.id, lease.worker, now, None if defect is None else defect.reason)

    def _stop_if_told(self, line: str) -> None:
        if self.settings.on_client_error == "stop":
            self.keeper.turn(self._now, self.coordinator, self.arrays, self.evaluations, self.idle.draws)
            raise ClientFailedError(line)

    def _failed(self, sent: Sent, reason: str, now: float) -> None:
        """A task that will bring nothing: its client is left alone for a while."""
        client = sent.lease.worker
        pause_s = self.roster.failed(client, now)
        log.info("client %d is left alone for %.0f s", client, pause_s)
        self._note(sent, reason, returned_s=now)
        self.driver.failed(sent.lease.id, client, reason, now)

    def _note(self, sent: Sent, outcome: str, **measured: Any) -> None:
        values = self.arrays.server.model.values
        known = {
            name: measured[name] for name in ("returned_s", "returned_bytes", "train_s", "wall_s") if name in measured
        }
        self.keeper.exchange(
            Exchange(
                sent.lease.id,
                sent.lease.worker,
                str(sent.node_id),
                sent.sent_s,
                values.nbytes,
                outcome,
                work_s=measured.get("wall_s"),
                **known,
            )
        )

    # -- what the driver asks for ------------------------------------------------------------------------------

    def start(self, lease: Lease, turn: int, now: float) -> None:
        self.arrays.lease(lease)
        client = lease.worker
        task = self.arrays.task(lease, turn)
        self.mailbox.put(lease, self.roster.node_of(client), task, self.roster.most_samples(client))

    def nobody_idle(self, now: float) -> None:
        """The loop looks again when somebody is to be awake."""

    def cancelled(self, lease: Lease, now: float) -> bool:
        """Flower has no word for "stop": the client finishes what nobody waits for."""
        self._give_up(lease, exchanges.CANCELLED)
        return False

    def given_up(self, lease: Lease, now: float) -> bool:
        """The client goes on, and is free when its late reply comes, or Flower says that none will."""
        log.warning("client %d, lease %d: no reply in time", lease.worker, lease.id)
        self.roster.failed(lease.worker, now)
        self._give_up(lease, exchanges.TIMEOUT)
        return False

    def _give_up(self, lease: Lease, outcome: str) -> None:
        self._given_up[lease.id] = outcome
        if (sent := self.mailbox.sent_for(lease.id)) is not None:
            self._note(sent, outcome)

    def step_begins(self, now: float) -> bool:
        return False

    # -- arrays, with what must be kept of them ------------------------------------------------------------------

    def apply(self, step: Any) -> None:
        self.arrays.apply(step)
        self.keeper.version(step.version + 1, self.arrays.server.model)

    def publish(self) -> None:
        self.arrays.publish()

    def forget(self, lease_id: int) -> None:
        self.arrays.forget(lease_id)

    def _measured(self, coordinator: Coordinator, now: float) -> dict[str, float]:
        asked = coordinator.asks
        return self.arrays.measure(asked, coordinator.version + 1) if asked else {}
