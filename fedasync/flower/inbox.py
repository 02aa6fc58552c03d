"""What the server makes of what comes from its nodes: who they are, contributions, failures, late replies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from typing import Any

from fedasync.aggregation.check import Defect
from fedasync.core import Lease
from fedasync.federated.arrays import Arrays
from fedasync.federated.driver import Driver
from fedasync.flower.failures import ClientFailure
from fedasync.flower.keeper import Keeper
from fedasync.flower.mailbox import FAILURES, Came, Mailbox
from fedasync.flower.messages import Sent, read_hello, read_reply
from fedasync.flower.roster import Roster
from fedasync.flower.settings import DeploymentSettings
from fedasync.runs import exchanges
from fedasync.runs.exchanges import Exchange

log = logging.getLogger("fedasync.flower")

RAISED = 2
"""Flower's code for an exception of the client's app."""
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
        if new := self._roster.connected(self._mailbox.nodes()):
            self._mailbox.ask(new)

    def take(self, now: float) -> None:
        """Take what has come, until the run is over. Raises ClientFailedError as the settings say."""
        for came in self._mailbox.take():
            if came.sent is None:
                self._meet(came, now)
            elif not self._driver.over:
                self.news_s = now
                self._take_reply(came, came.sent, now)

    def failed(self, sent: Sent, reason: str, now: float, *, returned: bool = True) -> None:
        """A task brings nothing; its client is free, and left alone for a while."""
        lease, before = sent.lease, self._given_up.pop(sent.lease.id, None)
        self._note(sent, before or reason, returned_s=now if returned else None)
        if before is None:
            pause_s = self._roster.failed(lease.worker, now)
            log.info("client %d is left alone for %.0f s", lease.worker, pause_s)
        self._driver.failed(lease.id, lease.worker, reason, now)

    def refused(self, tasks: Sequence[Sent], now: float) -> None:
        """The SuperLink did not take these tasks."""
        for sent in tasks:
            log.warning("client %d, lease %d: not taken by the SuperLink", sent.lease.worker, sent.lease.id)
            self.failed(sent, "not taken by the SuperLink", now, returned=False)

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
            log.warning("node %d did not say who it is: %s (%s)", node, FAILURES.get(error.code), error.reason)
            self._roster.ask_again(node)
            return
        try:
            hello = read_hello(came.message.content)
        except ValueError as error:
            problem: str | None = f"node {node}: {error}"
        else:
            problem = self._roster.welcome(node, hello)
        if problem is not None:
            log.warning("not used: %s", problem)
            self._stop_if_told(problem)
            return
        log.info("client %d joined: node %d on %s, %s", hello.client, node, hello.host, hello.software)
        for sent in self._mailbox.under_way:  # its former node will not answer any more
            if sent.lease.worker == hello.client and sent.node_id != node:
                log.warning("client %d, lease %d: its node was replaced", hello.client, sent.lease.id)
                self._mailbox.drop(sent.lease.id)
                self.failed(sent, "node replaced", now, returned=False)
                self._roster.succeeded(hello.client)  # it is there again: no reason to leave it alone

    def _take_reply(self, came: Came, sent: Sent, now: float) -> None:
        lease, message = sent.lease, came.message
        if message.has_error():
            code, why = message.error.code, message.error.reason
            reason = FAILURES.get(code, f"error {code}")
            log.warning("client %d, lease %d: %s (%s)", lease.worker, lease.id, reason, why)
            self.failed(sent, reason, now)
            if code == RAISED:
                self._stop_if_told(f"client {lease.worker}: {why}")
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
            self._stop_if_told(str(found))
            return
        size = None
        if isinstance(found, Defect):
            defect: Defect | None = found
        else:
            size = found.values.nbytes + (0 if found.integers is None else found.integers.nbytes)
            self._keeper.contribution(lease.id, found)
            defect = self._arrays.receive(lease.id, found)
        if defect is None:
            self._roster.succeeded(lease.worker)
            self.accepted_s = now
        else:
            self._keeper.no_contribution(lease.id)
            log.warning("client %d, lease %d: %s: %s", lease.worker, lease.id, defect.reason, defect.detail)
            self._driver.tell_unfit(lease.worker, lease.id, now, defect.reason, defect.detail)
            self._roster.failed(lease.worker, now)
        outcome = exchanges.DELIVERED if defect is None else exchanges.REJECTED
        measured = {name: reply.measured[name] for name in ("train_s", "wall_s") if name in reply.measured}
        work_s = reply.measured.get("wall_s")
        self._note(sent, outcome, returned_s=now, returned_bytes=size, work_s=work_s, **measured)
        self._driver.delivered(lease.id, lease.worker, now, None if defect is None else defect.reason)

    def _stop_if_told(self, line: str) -> None:
        if self._settings.on_client_error == "stop":
            raise ClientFailedError(line)

    def _note(self, sent: Sent, outcome: str, **measured: Any) -> None:
        lease = sent.lease
        self._keeper.exchange(
            Exchange(lease.id, lease.worker, str(sent.node_id), sent.sent_s, sent.sent_bytes, outcome, **measured)
        )
