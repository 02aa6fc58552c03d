"""What comes in is held to its bounds: scaled back to one, rejected beyond the other, else left as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation import update
from fedasync.aggregation.check import Defect, taken
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.model import Contribution, Form, Model
from fedasync.aggregation.norms import Norms, limit, norm
from fedasync.aggregation.server import Server
from fedasync.core import Constant
from fedasync.strategies import STRATEGIES

from .scalars import brings, model

forms = pytest.mark.parametrize("form", ["delta", "parameters"])


def limited(change: Tensor, base: Tensor, form: Form, norms: Norms) -> tuple[Tensor, str | None]:
    """The change that is left of a contribution, and what is wrong with it."""
    values = change.clone() if form == "delta" else base + change
    found = limit(values, base, form, norms)
    return (values if form == "delta" else values - base), found


@forms
@given(length=st.integers(1, 11), seed=st.integers(0, 2**32), size=st.floats(1e-3, 1e3), clip=st.floats(1e-2, 1e2))
def test_a_change_is_scaled_back_to_the_bound_and_keeps_its_direction(
    form: Form, length: int, seed: int, size: float, clip: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    change = size * torch.randn(length, generator=random, dtype=torch.float64)
    base = torch.randn(length, generator=random, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "BLOCK", 4)
        left, found = limited(change, base, form, Norms(clip=clip))
        assert norm(change) == pytest.approx(float(change.norm()))
        assert norm(base + change, base) == pytest.approx(float(change.norm()), abs=1e-12)
    assert found is None
    torch.testing.assert_close(left, change * min(1.0, clip / float(change.norm())), rtol=1e-9, atol=1e-12)


@forms
def test_what_lies_within_the_bounds_is_left_bit_for_bit(form: Form) -> None:
    values, base = torch.tensor([0.3, 0.4]), torch.zeros(2)
    before = values.numpy().tobytes()
    for norms in (Norms(), Norms(clip=0.500001), Norms(most=0.500001), Norms(1.0, 2.0)):
        assert limit(values, base, form, norms) is None
        assert values.numpy().tobytes() == before


@forms
def test_what_lies_too_far_is_rejected_before_it_is_clipped(form: Form) -> None:
    change, base = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 1.0])
    assert limited(change, base, form, Norms(clip=1.0, most=4.9))[1] == (
        "it lies 5 from its base; at most 4.9 would do"
    )
    left, found = limited(change, base, form, Norms(clip=1.0, most=5.1))
    assert found is None
    torch.testing.assert_close(left, torch.tensor([0.6, 0.8]))


@forms
@pytest.mark.parametrize("norms", [Norms(clip=1.0), Norms(most=1.0), Norms(1.0, 2.0)], ids=str)
def test_a_distance_beyond_all_numbers_never_becomes_a_nan(form: Form, norms: Norms) -> None:
    """Finite values whose squares, or whose difference, are not: no scale would bring them back."""
    huge = torch.tensor([1e200, 1.0], dtype=torch.float64)
    found = limit(huge, torch.zeros(2, dtype=torch.float64), form, norms)
    assert found is not None
    assert "its base" in found
    found = limit(torch.tensor([3e38]), torch.tensor([-3e38]), "parameters", norms)
    assert found is not None


def test_a_float32_norm_of_huge_values_is_summed_in_float64() -> None:
    values = torch.full((100,), 1e30)
    assert norm(values) == pytest.approx(1e31)
    assert limit(values, torch.zeros(100), "delta", Norms(clip=1.0)) is None
    assert norm(values) == pytest.approx(1.0)


@pytest.mark.parametrize("sent", ["delta", "parameters"])
@pytest.mark.parametrize("rule", [DeltaMean(1.0, Constant()), SampleWeightedMean()], ids=["delta", "parameters"])
def test_the_distance_is_from_the_base_of_the_lease_in_whatever_form_it_comes(rule: Any, sent: Form) -> None:
    base = model(10.0, 10.0)
    contribution = brings(3.0, 4.0, form="delta") if sent == "delta" else brings(13.0, 14.0)
    kept = taken(contribution, base, rule.wants, (), Norms(clip=1.0))
    assert isinstance(kept, Contribution)
    change = kept.values if rule.wants == "delta" else kept.values - base.values
    torch.testing.assert_close(change, torch.tensor([0.6, 0.8], dtype=torch.float64))
    far = brings(3.0, 4.0, form="delta") if sent == "delta" else brings(13.0, 14.0)
    assert taken(far, base, rule.wants, (), Norms(most=4.0)) == Defect(
        "norm too large", "it lies 5 from its base; at most 4 would do"
    )


def test_the_server_clips_what_it_keeps_and_not_what_others_hold() -> None:
    server = Server(DeltaMean(), model(0.0, 0.0), norms=Norms(clip=1.0))
    server.lease(0, 0)
    row = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert server.receive(0, Contribution(row[0], "delta", 1)) is None
    assert row[0].tolist() == [3.0, 4.0]
    assert norm(server._kept[0].input.values) == pytest.approx(1.0)
    assert server.model.values.tolist() == [0.0, 0.0]


def test_what_is_not_finite_is_called_so_before_its_norm_is_looked_at() -> None:
    start: Model = model(0.0, 0.0)
    bad = replace(brings(0.0, 0.0), values=torch.tensor([float("nan"), 1.0], dtype=torch.float64))
    found = taken(bad, start, "delta", (), Norms(1.0, 2.0))
    assert isinstance(found, Defect)
    assert found.reason == "not finite"


@pytest.mark.parametrize("knob", ["clip_norm", "max_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_that_bounds_nothing_is_refused_in_one_line(knob: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"strategy 'fedbuff': {knob} must be") as refusal:
        STRATEGIES["fedbuff"](concurrency=2, **{knob: value})
    assert "\n" not in str(refusal.value)
