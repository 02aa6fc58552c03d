"""The server's arrays: versions, contributions under their lease numbers, and the step from one version to the next.

Every runtime drives one of these beside its coordinator:

    server.lease(lease.id)                               # the lease starts from the published version
    base   = server.base(lease.id)                       # which it trains from
    defect = server.receive(lease.id, contribution)      # None, or why it must not be used
    server.apply(step)                                   # the model of step.version + 1
    server.forget(lease.id)                              # failed, cancelled, rejected
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedasync.aggregation.check import Defect, defect
from fedasync.aggregation.model import Contribution, Model
from fedasync.aggregation.update import Input, Inputs, Update
from fedasync.core.events import Arrival, Step


@dataclass(slots=True)
class _Kept:
    """A checked contribution, and once it was consumed the staleness with which it was."""

    contribution: Contribution
    staleness: int = 0
    worker: int = -1


class Server:
    """Holds the current model, the older versions that some lease still refers to, and what was received.

    A published version is shared by reference and never written again; it lives while a lease refers to it. One that
    was not published is updated in place. Work starts from the published version, which is version 0 at first.
    """

    def __init__(self, update: Update, model: Model) -> None:
        self.update = update
        self.model = model
        self._published = model
        self._state: Any = update.init(model.values)
        self._bases: dict[int, Model] = {}
        self._kept: dict[int, _Kept] = {}
        self._shared = True  # others read the current model's memory: copy before writing

    def publish(self) -> None:
        """Workers start from the current version from now on."""
        self._published = self.model
        self._shared = True

    def lease(self, lease_id: int) -> None:
        """Hold the published version for a lease until it ends."""
        self._bases[lease_id] = self._published

    def base(self, lease_id: int) -> Model:
        """The version that a lease trains from. Read it, never write it."""
        return self._bases[lease_id]

    def receive(self, lease_id: int, contribution: Contribution) -> Defect | None:
        """Check a contribution and keep it, in the form that the update wants; None when it is fit for use."""
        base = self._bases.pop(lease_id)
        found = defect(contribution, self.model)
        if found is None:
            if contribution.values.requires_grad:  # the model is data, not a node of the client's graph
                contribution = replace(contribution, values=contribution.values.detach())
            wanted = self._as_wanted(contribution, base)
            found = defect(wanted, self.model)  # the difference of finite numbers need not be finite
            if found is None:
                self._kept[lease_id] = _Kept(wanted)
        return found

    def forget(self, lease_id: int) -> None:
        """The lease ended without use: drop its base and whatever it brought."""
        self._bases.pop(lease_id, None)
        self._kept.pop(lease_id, None)

    def apply(self, step: Step) -> None:
        """Make the next version from a ready step, in place when nobody else reads the current one."""
        if self._shared:
            self.model = self.model.copy()
            self._shared = False
        for arrival in step.entering:
            kept = self._kept[arrival.lease.id]
            kept.staleness, kept.worker = step.staleness(arrival), arrival.lease.worker
        inputs = Inputs(
            [self._input(a.lease.id) for a in step.entering],
            [self._input(i) for i in step.window],
            [self._input(i) for i in step.leaving],
        )
        self._state = self.update.apply(self.model.values, self._state, inputs)
        self._carry_integers(step.entering)
        window = set(step.window)
        for lease_id in (*(a.lease.id for a in step.entering), *step.leaving):
            if lease_id not in window:
                del self._kept[lease_id]

    def _input(self, lease_id: int) -> Input:
        kept = self._kept[lease_id]
        return Input(kept.contribution.values, kept.contribution.samples, kept.staleness, kept.worker)

    def _as_wanted(self, contribution: Contribution, base: Model) -> Contribution:
        if contribution.form == self.update.wants:
            return contribution
        sign = -1 if self.update.wants == "delta" else 1
        values = contribution.values
        if values.untyped_storage().data_ptr() == base.values.untyped_storage().data_ptr():
            values = values.clone()  # the client handed back the base itself, which others read
        return replace(contribution, values=values.add_(base.values, alpha=sign), form=self.update.wants)

    def _carry_integers(self, entering: tuple[Arrival, ...]) -> None:
        """Counters are never averaged: the largest that came in is carried on."""
        if self.model.integers is None:
            return
        for arrival in entering:
            integers = self._kept[arrival.lease.id].contribution.integers
            self.model.integers.clamp_(min=integers)
