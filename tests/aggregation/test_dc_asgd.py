"""DC-ASGD: the paper's recursion in terms of gradients."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from fedasync.aggregation.dc_asgd import DelayCompensation
from fedasync.aggregation.step_sizes import UnknownStepSizesError
from fedasync.aggregation.update import Input, Inputs


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def arrivals(seed: int) -> list[tuple[Tensor, Tensor, float]]:
    """Gradients, the versions that they were taken at, and sums of step sizes."""
    random = torch.Generator().manual_seed(seed)
    draws = torch.randn(8, 2, 3, generator=random, dtype=torch.float64)
    return [(draws[i, 0], draws[i, 1], 0.1 + 0.05 * i) for i in range(8)]


@pytest.mark.parametrize("adaptive", [False, True])
def test_every_arrival_follows_the_papers_recursion(adaptive: bool) -> None:
    """w ← w − s·η·(g + λ·g²·(w − w_base)); adaptive λ = λ₀/√(M + ε), M ← m·M + (1 − m)·g² with this g in it."""
    lambda_, m, epsilon, eta = 0.3, 0.9, 1e-3, 0.8
    rule = DelayCompensation(lambda_, adaptive, m, epsilon, eta)
    w = vector(1.0, 2.0, 3.0)
    state = rule.init(w)
    expected, mean_square = w.clone(), torch.zeros(3, dtype=torch.float64)
    for gradient, base, size in arrivals(4):
        mean_square = m * mean_square + (1 - m) * gradient**2
        factor = lambda_ / (mean_square + epsilon).sqrt() if adaptive else lambda_
        expected = expected - size * eta * (gradient + factor * gradient**2 * (expected - base))
        arrived = Input(-size * gradient, 1, 1, 0, step_size_sum=size, base=base)
        state = rule.apply(w, state, Inputs([arrived], clients=2))
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)


def test_a_fresh_gradient_and_no_compensation_are_plain_sgd() -> None:
    w, delta = vector(5.0, -1.0), vector(0.25, 0.5)
    for rule, base in ((DelayCompensation(), w.clone()), (DelayCompensation(0.0), vector(9.0, 9.0))):
        now = w.clone()
        rule.apply(now, None, Inputs([Input(delta, 1, 0, 0, step_size_sum=0.1, base=base)], clients=1))
        torch.testing.assert_close(now, w + delta, rtol=1e-15, atol=0)


def test_on_a_quadratic_with_matching_curvature_the_compensation_is_exact() -> None:
    """f = ½h·x² has g(w) = g(w_base) + h·(w − w_base); λ·g² = h makes the late gradient the present one."""
    h, base, now, size = 2.0, 3.0, 2.5, 0.01
    gradient = h * base
    rule = DelayCompensation(compensation=h / gradient**2)
    w = vector(now)
    rule.apply(w, None, Inputs([Input(vector(-size * gradient), 1, 1, 0, step_size_sum=size, base=vector(base))]))
    assert float(w) == pytest.approx(now - size * h * now, rel=1e-13)
    assert sqrt(h / rule.compensation) == pytest.approx(gradient)


def test_contributions_without_step_sizes_are_refused() -> None:
    w = vector(2.0)
    with pytest.raises(UnknownStepSizesError, match="dc_asgd needs"):
        DelayCompensation().apply(w, None, Inputs([Input(w.clone(), 1, 0, 1, base=w.clone())], clients=2))
