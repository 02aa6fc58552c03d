"""The server's arrays: versions, contributions under their lease numbers, and the step from one version to the next.

Every runtime drives one of these beside its coordinator:

    server.lease(lease.id, lease.worker)                 # the lease starts from the published version
    base   = server.base(lease.id)                       # which it trains from, and
    control = server.control(lease.id)                   # adds to every gradient (mostly None)
    defect = server.receive(lease.id, contribution)      # None, or why it must not be used
    server.apply(step)                                   # the model of step.version + 1
    server.forget(lease.id)                              # failed, cancelled, rejected
    state, tensors = server.snapshot()                   # all of it, between any two calls

Who owns which memory: a version belongs to whoever trains from it, and is never written once it was published. A
contribution belongs to the server from ``receive`` on; when a step uses it up, its memory becomes that step's version,
so that in the long run an arrival takes no memory but what it brings along. Values that do not lie alone
(``check.alone``) are copied when they come in, and memory is left to those who still refer to the values it held.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from fedasync.aggregation.check import Defect, non_finite, taken
from fedasync.aggregation.kept import Kept, Versions, by_lease, plain_layout, restored_layout, restored_versions
from fedasync.aggregation.model import Contribution, Model
from fedasync.aggregation.norms import Norms
from fedasync.aggregation.state_codec import Pool, Stored, kinds_in, kinds_of, plain, restored
from fedasync.aggregation.update import Elsewhere, Input, Inputs, Steering, Update
from fedasync.core.events import Arrival, Step

if TYPE_CHECKING:
    from torch import Tensor


class OverwrittenError(RuntimeError):
    """Memory of the server was written by others, so that a version or a contribution is spoilt."""


class DivergedError(ArithmeticError):
    """A step made NaN or infinity of finite contributions: the run has diverged, and no client is to blame."""


class Server:
    """Holds the current model, the older versions that some lease still refers to, and what was received.

    A published version is shared by reference and never written again; it lives while a lease refers to it. One that
    was not published is updated in place. Work starts from the published version, which is version 0 at first.
    ``clients`` is how many take part in the training, at work or not; ``seed`` fixes everything random in an update;
    ``norms`` bounds how far a contribution may lie from its base.

    ``base`` and ``receive`` raise KeyError for a lease that is not in flight; nothing changes then.
    """

    def __init__(
        self, update: Update, model: Model, *, clients: int = 0, seed: int = 0, norms: Norms = Norms()
    ) -> None:
        if model.values.requires_grad or model.values.is_inference():  # neither can be computed with in place
            model = replace(model, values=model.values.detach().clone())
        self.update = update
        self._elsewhere = "out" in signature(update.apply).parameters
        self._steering = cast(Steering, update) if hasattr(update, "control") else None
        self._needs_base = bool(getattr(update, "needs_base", False))
        self._clients, self._seed, self._norms = clients, seed, norms
        self._controls: dict[int, Tensor | None] = {}
        self._state: Any = update.init(model.values)
        self._first_kinds = kinds_in(self._state)
        self._may_diverge = not getattr(update, "stays_between", False)
        averaged = update.wants == "delta" and not getattr(update, "steps_statistics", False)
        self._statistics = model.layout.statistics if averaged else []
        self._bases: dict[int, Model] = {}
        self._kept: dict[int, Kept] = {}
        self._held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """Storage address → tensor, of all versions and contributions that are alive."""
        self._set_model(model)
        self.publish()

    def _set_model(self, model: Model) -> None:
        self.model = model
        self._written = model.values._version
        self._hold(model.values)

    def publish(self) -> None:
        """Workers start from the current version from now on."""
        self._published = self.model
        self._shared = True  # others read the current model's memory: write elsewhere

    @property
    def published(self) -> Model:
        """The version that work starts from. Read it, never write it."""
        return self._published

    def lease(self, lease_id: int, worker: int) -> None:
        """Hold the published version for a lease until it ends."""
        self._bases[lease_id] = self._published
        if self._steering is not None:
            self._controls[lease_id] = self._steering.control(self._state, worker)

    def base(self, lease_id: int) -> Model:
        """The version that a lease trains from. Read it, never write it."""
        return self._bases[lease_id]

    def control(self, lease_id: int) -> Tensor | None:
        """[P]: what the lease's worker adds to every gradient, as it stood when the lease began. Only read it."""
        return self._controls.get(lease_id)

    def receive(self, lease_id: int, contribution: Contribution) -> Defect | None:
        """Check a contribution and keep it, in the form that the update wants; None when it is fit for use.

        One pass over memory, and one more where norms are bounded. The values must be the server's from now on: memory
        that nobody writes again. Raises OverwrittenError when the current version was written since it was made.
        """
        base, control = self._bases.pop(lease_id), self._controls.pop(lease_id, None)
        self._check_current()
        found = taken(contribution, base, self.update.wants, self._held, self._norms)
        if isinstance(found, Defect):
            return found
        self._hold(found.values)
        kept = Input(
            found.values,
            int(found.samples),  # numpy's numbers compute, and are kept, otherwise
            staleness=0,
            worker=-1,
            step_size_sum=None if found.step_size_sum is None else float(found.step_size_sum),
            control=control,
            base=base.values if self._needs_base else None,
        )
        statistics = [base.values[place] + found.values[place] for place in self._statistics]
        self._kept[lease_id] = Kept(kept, found.integers, found.values._version, statistics)
        return None

    def forget(self, lease_id: int) -> None:
        """The lease ended without use: drop its base and whatever it brought."""
        self._bases.pop(lease_id, None)
        self._controls.pop(lease_id, None)
        self._kept.pop(lease_id, None)

    def apply(self, step: Step) -> None:
        """Make the next version from a ready step, in place when nobody else reads the current one.

        Raises OverwrittenError when a contribution was written since it was received; the model is unchanged then.
        """
        for arrival in step.entering + step.undrafted:
            self._complete(arrival, step.staleness(arrival))
        entering = [arrival.lease.id for arrival in step.entering]
        undrafted = [arrival.lease.id for arrival in step.undrafted]
        for lease_id in (*entering, *undrafted, *step.leaving):
            self._check_unwritten(lease_id)
        out = self._room(step) if self._shared else None
        inputs = Inputs(
            self._seen(entering),
            self._seen(step.window),
            self._seen(step.leaving),
            self._seen(undrafted),
            step.version,
            step.time_s,
            self._clients,
            self._seed,
        )
        model = self.model
        if out is None:
            self._state = self.update.apply(model.values, self._state, inputs)
        elif self._elsewhere:
            self._state = cast(Elsewhere, self.update).apply(model.values, self._state, inputs, out=out)
        else:
            self._state = self.update.apply(out.copy_(model.values), self._state, inputs)
        if out is not None:
            model = Model(out, model.layout, None if model.integers is None else model.integers.clone())
        self._shared = False
        if self._may_diverge and (bad := non_finite(model.values)):
            raise DivergedError(
                f"the step to version {step.version + 1} made {bad} of {model.values.numel()} values NaN or infinite, "
                "from contributions that are all finite; a smaller learning rate, the server's or the clients', may do"
            )
        self._average_statistics(model, [*entering, *undrafted])
        self._set_model(model)
        self._carry_integers([*entering, *undrafted])
        window = set(step.window)
        for lease_id in (*entering, *undrafted, *step.leaving):
            if lease_id not in window:
                del self._kept[lease_id]

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The whole state, between any two calls: data that JSON keeps, and tensors by name, each memory once.

        The tensors are the server's own: write them out, or copy them, before the next call. Raises OverwrittenError as
        ``receive`` and ``apply`` do, and StateError for an update's state that cannot be kept.
        """
        self._check_current()
        for lease_id in self._kept:
            self._check_unwritten(lease_id)
        pool = Pool()
        versions = Versions(pool)
        state = {
            "layout": plain_layout(self.model.layout),
            "model": versions.place(self.model),
            "published": versions.place(self._published),
            "shared": self._shared,
            "bases": [[lease_id, versions.place(base)] for lease_id, base in self._bases.items()],
            "versions": versions.plain,
            "controls": [[lease_id, plain(control, pool, {})] for lease_id, control in self._controls.items()],
            "kept": [[lease_id, kept.plain(pool)] for lease_id, kept in self._kept.items()],
            "update": plain(self._state, pool, kinds_of(self.update, self._first_kinds)),
            "clients": self._clients,
            "seed": self._seed,
            "norms": asdict(self._norms),
        }
        return state, pool.tensors

    @classmethod
    def restore(cls, update: Update, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Server:
        """A server that goes on from ``snapshot``'s state as if nothing had happened.

        ``update`` is the rule of before: its ``init`` says what kinds its state is made of. The tensors belong to the
        server from now on. Raises StateError for a state that does not fit the update.
        """
        stored = Stored(tensors)
        versions = restored_versions(state["versions"], restored_layout(state["layout"]), stored)
        norms = Norms(**state["norms"])
        self = cls(update, versions[state["model"]], clients=state["clients"], seed=state["seed"], norms=norms)
        self._published, self._shared = versions[state["published"]], state["shared"]
        self._bases = {lease_id: versions[place] for lease_id, place in by_lease(state["bases"]).items()}
        controls = by_lease(state["controls"])
        self._controls = {lease_id: restored(found, stored, {}) for lease_id, found in controls.items()}
        self._kept = {lease_id: Kept.restored(found, stored) for lease_id, found in by_lease(state["kept"]).items()}
        self._state = restored(state["update"], stored, kinds_of(update, self._first_kinds))
        for values in (*(model.values for model in versions), *(kept.input.values for kept in self._kept.values())):
            self._hold(values)
        return self

    def _seen(self, lease_ids: Sequence[int]) -> list[Input]:
        return [self._kept[lease_id].input for lease_id in lease_ids]

    def _complete(self, arrival: Arrival, staleness: int) -> None:
        """Add to a contribution what is known of it now that it is used."""
        lease, kept = arrival.lease, self._kept[arrival.lease.id]
        kept.input = kept.input._replace(
            staleness=staleness,
            worker=lease.worker,
            admitted_s=lease.admitted_s,
            group=lease.group,
        )

    def _room(self, step: Step) -> Tensor:
        """Memory for the next version: of the contribution that ``Elsewhere`` names, or fresh."""
        import torch

        used_up = step.leaving[:1] or (() if step.window else tuple(a.lease.id for a in step.entering[:1]))
        if self._elsewhere and used_up:
            kept = self._kept[used_up[0]]
            theirs = weakref.ref(kept.input.values)
            ours = kept.input.values.detach()
            kept.input = kept.input._replace(values=ours)
            if theirs() is None:  # the sender has let go of what it sent
                return ours
        return torch.empty_like(self.model.values)

    def _hold(self, values: Tensor) -> None:
        self._held[values.untyped_storage().data_ptr()] = values

    def _check_current(self) -> None:
        if self.model.values._version != self._written:
            raise OverwrittenError(
                "the current version was written by others: only read the models that you are given, and hand over"
                " values in memory that you do not go on using"
            )

    def _check_unwritten(self, lease_id: int) -> None:
        kept = self._kept[lease_id]
        if kept.input.values._version != kept.written:
            raise OverwrittenError(
                f"the contribution of lease {lease_id} was written after it was handed over: hand over values in memory"
                " that you do not go on using"
            )

    def _average_statistics(self, model: Model, entering: list[int]) -> None:
        """A mean of running variances is one, and what a step along them makes need not be: it may be negative."""
        kept = [self._kept[lease_id] for lease_id in entering]
        total = sum(each.input.samples for each in kept)
        for i, place in enumerate(self._statistics):
            mean = model.values[place].zero_()
            for each in kept:
                mean.add_(each.statistics[i], alpha=each.input.samples / total)

    def _carry_integers(self, entering: list[int]) -> None:
        """Counters are never averaged: the largest that came in is carried on."""
        if self.model.integers is None:
            return
        for lease_id in entering:
            self.model.integers.clamp_(min=self._kept[lease_id].integers)
