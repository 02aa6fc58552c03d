"""FedAT: mirrored weights by hand, and a first update that moves the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation.fedat import TierMix
from fedasync.aggregation.update import Input, Inputs


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_tier(tier: int, *models: float, samples: tuple[int, ...] = ()) -> Inputs:
    counts = samples or (1,) * len(models)
    return Inputs([Input(vector(x), n, 0, i, group=tier) for i, (x, n) in enumerate(zip(models, counts, strict=True))])


def test_fedmodule_7_the_first_update_moves_the_model() -> None:
    """A weight from the mirror image, which has not stepped, would leave the first updates without effect."""
    for tier in range(3):
        rule, w = TierMix(3), vector(10.0)
        rule.apply(w, rule.init(w), of_tier(tier, 2.0, 5.0, samples=(2, 1)))
        assert w.tolist() == [3.0]


def test_a_sequence_by_hand() -> None:
    rule, w = TierMix(2), vector(100.0)
    state = rule.init(w)
    steps = [
        (0, 4.0, 4.0),  # tier 1 has not stepped: tier 0 alone
        (0, 8.0, 8.0),
        (1, 2.0, 1 / 3 * 8 + 2 / 3 * 2),  # counts 2, 1: the slow tier has the fast one's 2/3
        (0, 12.0, 1 / 4 * 12 + 3 / 4 * 2),
        (1, 6.0, 2 / 5 * 12 + 3 / 5 * 6),
    ]
    for tier, model, expected in steps:
        state = rule.apply(w, state, of_tier(tier, model))
        assert float(w) == pytest.approx(expected, rel=1e-14)
    assert state.counts == [3, 2]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any))
def test_weights_sum_to_1_and_none_is_for_a_tier_without_a_model(counts: list[int]) -> None:
    weights = TierMix(len(counts)).weights(counts)
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)
    assert all(weight == 0 for weight, count in zip(weights, counts, strict=True) if not count)
    if min(counts):
        total = sum(counts)
        assert weights == [counts[len(counts) - 1 - m] / total for m in range(len(counts))]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_the_model_stays_in_the_hull_of_the_tiers_models(tiers: list[int]) -> None:
    rule, w = TierMix(5), vector(50.0)
    state = rule.init(w)
    for i, tier in enumerate(tiers):
        state = rule.apply(w, state, of_tier(tier, float(i % 7)))
        models = [float(model) for model in state.models.values()]
        assert min(models) - 1e-12 <= float(w) <= max(models) + 1e-12


def test_one_tier_takes_its_rounds_mean() -> None:
    rule, w = TierMix(1), vector(50.0)
    state = rule.init(w)
    for i in range(4):
        state = rule.apply(w, state, of_tier(0, float(i), float(i + 4), samples=(3, 1)))
        assert w.tolist() == [i + 1.0]
