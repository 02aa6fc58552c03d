"""The check of a contribution before it touches the model."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

from fedasync.aggregation.model import Contribution, Model


class Defect(NamedTuple):
    """Why a contribution is not used: ``reason`` is a word of the ledger, ``detail`` what was found."""

    reason: str
    detail: str


def defect(contribution: Contribution, model: Model) -> Defect | None:
    """What makes a contribution unfit for ``model``, or None."""
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
    # One pass: any infinity or NaN among the summands makes the sum one, unless finite values overflow it.
    if not values.sum().isfinite() and not values.isfinite().all():
        bad = int((~values.isfinite()).sum())
        return Defect("not finite", f"{bad} of {values.numel()} values are NaN or infinite")
    carried, integers = model.integers, contribution.integers
    if carried is not None and (integers is None or integers.shape != carried.shape or integers.is_floating_point()):
        found = "none" if integers is None else f"{list(integers.shape)} of {integers.dtype}"
        return Defect("wrong integers", f"integer state: {found}, the model carries {list(carried.shape)} of int64")
    return None
