"""What the server makes of what comes from its nodes: who they are, contributions, failures, late replies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from typing import Any

from fedasync.aggregation.check import Defect
from fedasync.aggregation.model import Contribution
from fedasync.core import Accepted, Failed, Lease
from fedasync.federated.arrays import Arrays
from fedasync.federated.driver import RESTARTED, Driver
from fedasync.flower.failures import ClientFailure, one_line
from fedasync.flower.keeper import Keeper
from fedasync.flower.mailbox import FAILURES, Came, Mailbox
from fedasync.flower.messages import Sent, read_hello, read_reply
from fedasync.flower.roster import Roster
from fedasync.flower.settings import DeploymentSettings
from fedasync.runs import exchanges
from fedasync.runs.exchanges import Exchange

log = logging.getLogger("fedasync.flower")

UNKNOWN = FAILURES[0]
LOADING, RAISED = 1, 2
"""Flower's codes for an app that cannot be loaded, and for an exception of it."""
ANSWERS = (1, 2, 6, 7)
"""Codes of errors that a client's node sends; all others are Flower's own findings about one that is silent."""
LOOK_EVERY_S = 1.0
"""How often the SuperLink is asked which nodes are connected."""


class ClientFailedError(RuntimeError):
    """A client raised, and the deployment is to stop then."""


class Inbox:
    """Takes what has come to the roster, the disk, the arrays and the driver, in this order.

    ``accepted_s`` is when a contribution was last accepted, ``news_s`` when anything last came.
    """

    def __init__(
        self,
        settings: DeploymentSettings,
        mailbox: Mailbox,
        roster: Roster,
        keeper: Keeper,
        arrays: Arrays,
        driver: Driver,
    ) -> None:
        self._settings, self._mailbox, self._roster = settings, mailbox, roster
        self._keeper, self._arrays, self._driver = keeper, arrays, driver
        self.accepted_s = self.news_s = 0.0
        self._look_s = -inf
        self._given_up: dict[int, str] = {}
        """Leases that nobody waits for any more, and why, whose clients are still at work."""

    def begins(self, now: float) -> None:
        """The run begins, or goes on, at this time of its own clock."""
        self.accepted_s = self.news_s = self._look_s = now

    def greet(self, now: float) -> None:
        """Ask those who they are that are seen for the first time."""
        if now < self._look_s:
            return
        self._look_s = now + LOOK_EVERY_S
        if new := self._roster.connected(self._mailbox.nodes(), now):
            for node in self._mailbox.ask(new):
                log.warning("node %d could not be asked who it is", node)
                self._roster.ask_again(node, now)

    def take(self, now: float) -> None:
        """Take what has come, until the run is over. Raises ClientFailedError as the settings say."""
        for came in self._mailbox.take():
            if came.sent is None:
                self._meet(came, now)
            elif self._driver.over:
                self._note(came.sent, self._given_up.pop(came.sent.lease.id, exchanges.CANCELLED), returned_s=now)
            else:
                self.news_s = now
                self._take_reply(came, came.sent, now)

    def failed(self, sent: Sent, reason: str, now: float, *, replied: bool = True, pause: bool = True) -> None:
        """A task brings nothing; its client is free, and where that is its fault left alone for a while."""
        lease, before = sent.lease, self._given_up.pop(sent.lease.id, None)
        self._note(sent, before or reason, returned_s=now if replied and before is None else None)
        if before is None and pause:
            pause_s = self._roster.failed(lease.worker, now)
            log.info("client %d is left alone for %.0f s", lease.worker, pause_s)
        self._driver.failed(lease.id, lease.worker, reason, now)

    def restarted(self, lease: Lease, now: float) -> None:
        """A lease of a server that is no more: it is given out anew."""
        size = self._arrays.server.model.values.nbytes
        self._keeper.exchange(Exchange(lease.id, lease.worker, None, lease.admitted_s, size, RESTARTED))
        self._driver.failed(lease.id, lease.worker, RESTARTED, now, again=True)

    def refused(self, tasks: Sequence[Sent], now: float) -> None:
        """The SuperLink did not take these tasks."""
        for sent in tasks:
            log.warning("client %d, lease %d: not taken by the SuperLink", sent.lease.worker, sent.lease.id)
            self.failed(sent, "not taken by the SuperLink", now, replied=False)

    def give_up(self, lease: Lease, outcome: str, now: float) -> None:
        """Nobody waits for this lease any more: its client goes on, and is free when something comes of it."""
        if outcome == exchanges.TIMEOUT:
            log.warning("client %d, lease %d: no reply in time", lease.worker, lease.id)
            self._roster.failed(lease.worker, now)
        self._given_up[lease.id] = outcome

    def close(self) -> None:
        """The run is over: whose reply did not come."""
        for sent in self._mailbox.under_way:
            self._note(sent, self._given_up.get(sent.lease.id, exchanges.CANCELLED))

    def _meet(self, came: Came, now: float) -> None:
        """A node says who it is."""
        node = came.node_id
        if came.message.has_error():
            error = came.message.error
            why = f"{FAILURES.get(error.code, UNKNOWN)} ({one_line(str(error.reason))})"
            log.warning("node %d did not say who it is: %s", node, why)
            self._roster.ask_again(node, now)
            if error.code in (LOADING, RAISED):
                self._stop_if_told(f"node {node}: {why}")
            return
        try:
            hello = read_hello(came.message.content)
        except ValueError as error:
            problem: str | None = f"node {node}: {error}"
        else:
            problem = self._roster.welcome(node, hello)
        if problem is not None:
            log.warning("not used: %s", problem)
            self._raised(problem)
            return
        log.info("client %d joined: node %d on %s, %s", hello.client, node, hello.host, hello.software)
        former = [
            sent
            for sent in self._mailbox.under_way
            if sent.lease.worker == hello.client and sent.node_id != node  # it will not answer any more
        ]
        for sent in former:
            log.warning("client %d, lease %d: its node was replaced", hello.client, sent.lease.id)
            self._mailbox.drop(sent.lease.id)
            self.failed(sent, "node replaced", now, replied=False, pause=False)

    def _take_reply(self, came: Came, sent: Sent, now: float) -> None:
        lease, message = sent.lease, came.message
        if message.has_error():
            code, why = message.error.code, one_line(str(message.error.reason))
            reason = FAILURES.get(code, UNKNOWN)
            log.warning("client %d, lease %d: %s (code %s: %s)", lease.worker, lease.id, reason, code, why)
            self.failed(sent, reason, now, replied=code in ANSWERS)
            if code == RAISED:
                self._raised(f"client {lease.worker}: {why}")
            return
        if not self._driver.coordinator.is_in_flight(lease.id):  # late, or over-selected: counted, its client is free
            self._note(sent, self._given_up.pop(lease.id, exchanges.CANCELLED), returned_s=now)
            self._driver.delivered(lease.id, lease.worker, now)
            return
        reply = read_reply(message.content, lease, sent.layout, sent.dtype, sent.most_samples)
        found = reply.contribution
        if isinstance(found, ClientFailure):
            log.warning("%s", found)
            self.failed(sent, "client error", now)
            self._raised(str(found))
            return
        size = None
        defect = found if isinstance(found, Defect) else self._lacking(found)
        if defect is None and not isinstance(found, Defect):
            size = found.values.nbytes + (0 if found.integers is None else found.integers.nbytes)
            self._keeper.contribution(lease.id, found)
            defect = self._arrays.receive(lease.id, found)
        if defect is None:
            self._roster.succeeded(lease.worker)
        else:
            log.warning("client %d, lease %d: %s: %s", lease.worker, lease.id, defect.reason, defect.detail)
            self._driver.tell_unfit(lease.worker, lease.id, now, defect.reason, defect.detail)
            self._roster.failed(lease.worker, now)
        event = self._driver.delivered(lease.id, lease.worker, now, None if defect is None else defect.reason)
        outcome = exchanges.DELIVERED
        if isinstance(event, Accepted):
            self.accepted_s = now
        else:  # unfit, too stale, or looked at only after its deadline
            outcome = exchanges.TIMEOUT if isinstance(event, Failed) else exchanges.REJECTED
            self._keeper.no_contribution(lease.id)
        measured = {name: reply.measured[name] for name in ("train_s", "wall_s") if name in reply.measured}
        work_s = reply.measured.get("wall_s")
        self._note(sent, outcome, returned_s=now, returned_bytes=size, work_s=work_s, **measured)

    def _lacking(self, contribution: Contribution) -> Defect | None:
        """What the update cannot do without, and a client left out."""
        if contribution.step_size_sum is None and getattr(self._arrays.server.update, "needs_step_sizes", False):
            return Defect("no step sizes", "step_size_sum is missing; the sum of plain SGD's step sizes would do")
        return None

    def _raised(self, line: str) -> None:
        """A client raised: that is kept with the run, for whoever looks at it."""
        self._keeper.failure(line)
        self._stop_if_told(line)

    def _stop_if_told(self, line: str) -> None:
        if self._settings.on_client_error == "stop":
            raise ClientFailedError(line)

    def _note(self, sent: Sent, outcome: str, **measured: Any) -> None:
        lease = sent.lease
        self._keeper.exchange(
            Exchange(lease.id, lease.worker, str(sent.node_id), sent.sent_s, sent.sent_bytes, outcome, **measured)
        )
