"""Every rule equals its formula, wherever its contract lets the next version be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation import update
from fedasync.aggregation.aggregators import Krum, Mean, Median, TrimmedMean
from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.server_optimizers import Adagrad, Adam, Amsgrad, Sgd, Yogi
from fedasync.aggregation.server_step import ServerStep, shares
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
    copies = {id(x): x._replace(values=x.values.clone()) for x in (*inputs.entering, *inputs.window, *inputs.leaving)}
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


OPTIMIZERS = (
    Sgd(0.7),
    Sgd(0.7, 0.9),
    Adam(),
    Adam(convention="flower"),
    Yogi(),
    Adagrad(),
    Amsgrad(0.1, delay_threshold=2),
)
AGGREGATORS = (Mean(), Median(), TrimmedMean(0.25), Krum(0, 1), Krum(1, 2))


@settings(max_examples=100, deadline=None)
@given(
    optimizer=st.sampled_from(OPTIMIZERS),
    aggregator=st.sampled_from(AGGREGATORS),
    by_samples=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    length=st.integers(1, 11),
    data=st.data(),
)
def test_a_server_step_is_its_optimisers_step_along_its_aggregate_wherever_it_may_write(
    optimizer: Any, aggregator: Any, by_samples: bool, dtype: torch.dtype, length: int, data: st.DataObject
) -> None:
    """Three steps one after the other: the state is the same too, and holds none of the memory that was handed in."""
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    rule = ServerStep(optimizer, aggregator, DECAY, weights="samples" if by_samples else "equal")
    buffers = []
    for _ in range(3):
        size = data.draw(st.integers(aggregator.fewest, 6))
        taus = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
        buffers.append(
            [Input(torch.randn(length, generator=random, dtype=dtype), i + 1, t, i) for i, t in enumerate(taus)]
        )
    start = torch.randn(length, generator=random, dtype=dtype)
    results: dict[str, list[Tensor]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "BLOCK", 4)
        expected, state = start.clone(), optimizer.init(start)
        by_parts = []
        for buffer in buffers:
            direction, factors = torch.empty_like(start), shares(buffer, not by_samples)
            decays = [DECAY(x.staleness) for x in buffer]
            aggregator.aggregate([x.values.clone() for x in buffer], factors, decays, direction)
            delay = max(x.staleness for x in buffer)
            state = optimizer.step(expected, state, direction, expected, delay)
            by_parts.append(expected.clone())
        for place in ("in place", "fresh", "what enters"):
            w, rule_state = start.clone(), rule.init(start)
            results[place] = []
            for buffer in buffers:
                inputs = copied(Inputs(buffer))
                out = places(inputs, w)[place]
                before = w.clone()
                rule_state = rule.apply(w, rule_state, inputs, out=out)
                assert out is None or torch.equal(w, before), f"{place}: the former version was written"
                w = w if out is None else out
                results[place].append(w.clone())
                for now, given_ in zip(inputs.entering, buffer, strict=True):
                    assert now.values is out or torch.equal(now.values, given_.values), f"{place}: an input was written"
                    if now.values is not out:
                        now.values.fill_(float("nan"))  # nobody may go on counting on it
    for place, versions in results.items():
        assert all(map(torch.equal, versions, by_parts)), place


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 6), by_samples=st.booleans(), seed=st.integers(0, 10_000))
def test_a_server_step_with_plain_sgd_is_the_weighted_mean(size: int, by_samples: bool, seed: int) -> None:
    """FedBuff's for equal weights, FedAvg's for samples: with formulas of this file alone."""
    random = torch.Generator().manual_seed(seed)
    deltas = torch.randn(size, 5, generator=random, dtype=torch.float64)
    buffer = [Input(deltas[i], 2 * i + 1, i, i) for i in range(size)]
    w = torch.zeros(5, dtype=torch.float64)
    rule = ServerStep(Sgd(0.7), staleness=DECAY, weights="samples" if by_samples else "equal")
    rule.apply(w, rule.init(w), Inputs(buffer))
    weights = [x.samples / size**2 if by_samples else 1 / size for x in buffer]
    expected = 0.7 * sum(p * DECAY(x.staleness) * x.values for p, x in zip(weights, buffer, strict=True))
    torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-14)
