"""Every rule equals its formula, wherever its contract lets the next version be written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation import update
from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.update import Input, Inputs
from fedasync.core import Polynomial

DECAY = Polynomial(0.5)


def exact(rule: Any, values: Tensor, inputs: Inputs) -> Tensor:
    """The formula of a rule's paper, in float64."""
    w = values.double()
    entering = [(x.values.double(), x.samples, x.staleness) for x in inputs.entering]
    if isinstance(rule, SampleWeightedMean):
        return sum(n * x for x, n, _ in entering) / sum(n for _, n, _ in entering)  # type: ignore[return-value]
    if isinstance(rule, DeltaMean):
        return w + rule.server_learning_rate * sum(DECAY(tau) * x for x, _, tau in entering) / len(entering)
    if isinstance(rule, Mixing):
        for x, _, tau in entering:
            alpha = rule.alpha * DECAY(tau)
            w = (1 - alpha) * w + alpha * x
        return w
    if inputs.leaving and len(inputs.window) > 1 and rule.recompute_every > 1:
        return w + (entering[0][0] - inputs.leaving[0].values.double()) / len(inputs.window)
    return torch.stack([x.values.double() for x in inputs.window]).mean(dim=0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Any, Tensor, Inputs]:
    """A rule, a version and a ready buffer, of several blocks or less than one."""
    rule = draw(
        st.sampled_from([SampleWeightedMean(), Mixing(0.6, DECAY), DeltaMean(0.7, DECAY), WindowMean(), WindowMean(1)])
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    length = draw(st.integers(1, 11))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 5))

    def some() -> Input:
        values = torch.randn(length, generator=random, dtype=dtype) * 10 ** draw(st.integers(-3, 3))
        return Input(values, draw(st.integers(1, 1000)), draw(st.integers(0, 9)), 0)

    values = some().values
    window = [some() for _ in range(size)]
    if not isinstance(rule, WindowMean):
        return rule, values, Inputs(window)
    slides = draw(st.booleans())
    return rule, values, Inputs(window[-1:], window, [some()]) if slides else Inputs(window, window)


def places(inputs: Inputs, values: Tensor) -> dict[str, Tensor | None]:
    """Where the next version may be written."""
    where = {"in place": None, "fresh": torch.full_like(values, float("nan"))}
    if inputs.leaving:
        where["what leaves"] = inputs.leaving[0].values
    elif not inputs.window:
        where["what enters"] = inputs.entering[0].values
    return where


def copied(inputs: Inputs) -> Inputs:
    """Of one memory for an input that is both in the window and entering, as the server gives them."""
    copies = {id(x): replace(x, values=x.values.clone()) for x in (*inputs.entering, *inputs.window, *inputs.leaving)}
    return Inputs(*([copies[id(x)] for x in xs] for xs in (inputs.entering, inputs.window, inputs.leaving)))


@settings(max_examples=300, deadline=None)
@given(steps())
def test_a_rule_equals_its_formula_wherever_it_may_write(step: tuple[Any, Tensor, Inputs]) -> None:
    rule, start, given_ = step
    expected = exact(rule, start, given_)
    given_values = [start, *(x.values for x in (*given_.entering, *given_.window, *given_.leaving))]
    scale = max(float(values.abs().max()) for values in given_values)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "BLOCK", 4)
        for place in places(given_, start):
            values, inputs = start.clone(), copied(given_)
            out = places(inputs, values)[place]
            rule.apply(values, rule.init(values), inputs, out=out)
            result = values if out is None else out
            room = 20 * torch.finfo(start.dtype).eps * scale
            torch.testing.assert_close(result.double(), expected, rtol=0, atol=room, msg=place)
            assert out is None or torch.equal(values, start), f"{place}: the former version was written"
            results.append(result)
            for now, before in zip(
                (*inputs.entering, *inputs.window, *inputs.leaving),
                (*given_.entering, *given_.window, *given_.leaving),
                strict=True,
            ):
                assert now.values is out or torch.equal(now.values, before.values), f"{place}: an input was written"
    assert all(torch.equal(r, results[0]) for r in results), "the same bits wherever they are written"
