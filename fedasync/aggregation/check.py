"""The check of a contribution before it touches the model, and its taking over by the server."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from math import inf, isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, NamedTuple

from fedasync.aggregation.model import Contribution, Form, Model
from fedasync.aggregation.norms import Norms, limit
from fedasync.aggregation.update import blocks

if TYPE_CHECKING:
    from torch import Tensor


class Defect(NamedTuple):
    """Why a contribution is not used: ``reason`` is a word of the ledger, ``detail`` what was found."""

    reason: str
    detail: str


def taken(
    contribution: Contribution, base: Model, form: Form, held: Container[int], norms: Norms = Norms()
) -> Contribution | Defect:
    """Check a contribution and turn it into ``form`` in one pass over memory; the defect if it is unfit.

    Bounds on its norm are a pass more.
    ``base`` is the version that its client started from, and is only read; ``held`` are the addresses of the storages
    that the receiver holds. Values that lie ``alone`` are taken over where they lie, and a change of form overwrites
    them, also when a defect is found half way; all others are copied into fresh memory.
    """
    found = _malformed(contribution, base)
    if found is not None:
        return found
    values = contribution.values
    kept = values
    if not alone(values, held):
        values = values.detach()  # the model is data, not a node of the client's graph
        kept = base.values.new_empty(values.shape)
    bad = _into(kept, values, base.values, 0 if contribution.form == form else -1 if form == "delta" else 1)
    found = _not_finite(bad, values) or _wrong_integers(contribution, base)
    if found is None and (too_far := limit(kept, base.values, form, norms)) is not None:
        found = Defect("norm too large", too_far)
    return found or replace(contribution, values=kept, form=form)


def alone(values: Tensor, held: Container[int]) -> bool:
    """Whether values lie in memory that, as far as can be seen, is nobody's but theirs.

    Not so: memory that is ``held`` already (a version, another contribution), views and excerpts, nodes of a graph,
    tensors of inference mode, and memory shared with numpy or another process (which torch cannot resize).
    """
    storage = values.untyped_storage()
    return not (
        values.requires_grad
        or values.is_inference()
        or values._is_view()
        or not values.is_contiguous()
        or storage.nbytes() != values.numel() * values.element_size()
        or not storage.resizable()
        or storage.is_shared()
        or storage.data_ptr() in held
    )


def non_finite(values: Tensor) -> int:
    """How many of ``values`` are NaN or infinite; one pass when none is."""
    # Any infinity or NaN among the summands makes the sum one, unless finite values overflow it.
    if isfinite(float(values.sum())):
        return 0
    return sum(int((~block.isfinite()).sum()) for (block,) in blocks(values))


def _into(target: Tensor, values: Tensor, base: Tensor, sign: int) -> int:
    """Write values + sign·base to ``target``, which may be ``values``, and count what is NaN or infinite.

    Counted are the values, or when all are finite the results: the difference of finite numbers need not be finite.
    """
    if not sign and target is values:
        return non_finite(values)
    import torch

    bad = overflown = 0
    for result, x, w in blocks(target, values, base):
        bad += non_finite(x)
        if sign:
            torch.add(x, w, alpha=sign, out=result)
            overflown += non_finite(result)
        else:
            result.copy_(x)
    return bad or overflown


def _malformed(contribution: Contribution, model: Model) -> Defect | None:
    if not isinstance(contribution, Contribution):
        return Defect("no contribution", f"got {type(contribution).__name__}; a Contribution would do")
    values, expected = contribution.values, model.values
    if not isinstance(values, type(expected)):
        return Defect("wrong type", f"values of {type(values).__name__}, the model has {type(expected).__name__}")
    if contribution.form not in ("parameters", "delta"):
        return Defect("unknown form", f"form {contribution.form!r}; 'parameters' or 'delta' would do")
    if tuple(values.shape) != tuple(expected.shape):
        return Defect("wrong shape", f"shape {list(values.shape)}, the model has {list(expected.shape)}")
    if values.dtype != expected.dtype:
        return Defect("wrong dtype", f"dtype {values.dtype}, the model has {expected.dtype}")
    samples = contribution.samples
    if isinstance(samples, bool) or not isinstance(samples, Integral) or samples < 1:
        return Defect("no samples", f"samples = {samples!r}; an integer ≥ 1 would do")
    size = contribution.step_size_sum
    if size is not None and not (isinstance(size, Real) and 0 < size < inf):
        return Defect("wrong step sizes", f"step_size_sum = {size!r}; a finite number > 0, or None, would do")
    return None


def _not_finite(bad: int, values: Tensor) -> Defect | None:
    return Defect("not finite", f"{bad} of {values.numel()} values are NaN or infinite") if bad else None


def _wrong_integers(contribution: Contribution, model: Model) -> Defect | None:
    carried, integers = model.integers, contribution.integers
    if carried is not None and (integers is None or integers.shape != carried.shape or integers.is_floating_point()):
        found = "none" if integers is None else f"{list(integers.shape)} of {integers.dtype}"
        return Defect("wrong integers", f"integer state: {found}, the model carries {list(carried.shape)} of int64")
    return None
