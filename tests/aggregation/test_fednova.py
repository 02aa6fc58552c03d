"""FedNova: normalised by the step sizes, FedAvg where all are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fednova import NormalisedMean
from fedasync.aggregation.step_sizes import UnknownStepSizesError
from fedasync.aggregation.update import Input, Inputs
from fedasync.workloads import LocalTraining


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_clients_by_hand() -> None:
    """p = (1/4, 3/4), s = (2, 1): s_eff = 5/4, w ← w + 5/4·(1/4·8/2 + 3/4·4/1)."""
    w = vector(1.0)
    entering = [Input(vector(8.0), 1, 0, 0, step_size_sum=2.0), Input(vector(4.0), 3, 0, 1, step_size_sum=1.0)]
    NormalisedMean().apply(w, None, Inputs(entering, clients=2))
    assert w.tolist() == [1.0 + 5 / 4 * (1 / 4 * 8 / 2 + 3 / 4 * 4 / 1)]


@pytest.mark.parametrize("size", [0.1, 1.0, 7.0])
def test_equal_local_steps_give_fedavg(size: float) -> None:
    random = torch.Generator().manual_seed(0)
    w = torch.randn(5, generator=random, dtype=torch.float64)
    models = torch.randn(4, 5, generator=random, dtype=torch.float64)
    samples = (1, 5, 2, 9)
    average = w.clone()
    SampleWeightedMean().apply(average, None, Inputs([Input(models[i], samples[i], 0, i) for i in range(4)]))
    nova = w.clone()
    entering = [Input(models[i] - w, samples[i], 0, i, step_size_sum=size) for i in range(4)]
    NormalisedMean().apply(nova, None, Inputs(entering, clients=4))
    torch.testing.assert_close(nova, average, rtol=1e-12, atol=1e-12)


def test_clients_of_one_direction_pull_alike_however_many_steps_they_made() -> None:
    """Δ_i = −s_i·g with one g: the model moves by −s_eff·g."""
    sizes = (0.1, 0.5, 2.0)
    w = vector(0.0)
    entering = [Input(vector(-3.0 * size), 1, 0, i, step_size_sum=size) for i, size in enumerate(sizes)]
    NormalisedMean().apply(w, None, Inputs(entering, clients=3))
    assert float(w) == pytest.approx(-3.0 * sum(sizes) / 3, rel=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_sum_of_step_sizes_is_how_far_a_gradient_of_1_moves(momentum: float) -> None:
    """‖a‖₁ = τ, and [τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ) with momentum ρ."""
    local = LocalTraining(learning_rate=0.1, momentum=momentum)
    x = velocity = 0.0
    for steps in range(1, 12):
        velocity = momentum * velocity + 1.0
        x += 0.1 * velocity
        assert local.step_size_sum(steps) == pytest.approx(x, rel=1e-12)
    assert LocalTraining(optimizer="adam").step_size_sum(5) is None


def test_contributions_without_step_sizes_are_refused() -> None:
    w = vector(2.0)
    with pytest.raises(UnknownStepSizesError, match="fednova needs the sizes of client 1's local steps"):
        NormalisedMean().apply(w, None, Inputs([Input(w.clone(), 1, 0, 1)], clients=2))
