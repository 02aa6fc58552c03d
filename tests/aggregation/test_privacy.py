"""The noise: its size, its independence, its absence, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedasync.aggregation import update
from fedasync.aggregation.aggregators import Krum, Mean, Median, TrimmedMean
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.privacy import Privacy
from fedasync.aggregation.server_optimizers import Sgd
from fedasync.aggregation.server_step import ServerStep, WindowAggregate
from fedasync.aggregation.update import Input, Inputs
from fedasync.core import Constant, Polynomial
from fedasync.strategies import fedavg, fedbuff, fedfa

P = 40_000


def noise(
    z: float = 1.5,
    clip: float = 2.0,
    count: int = 4,
    version: int = 0,
    seed: int = 7,
    length: int = P,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    mean = torch.zeros(length, dtype=dtype)
    Privacy(z).add(mean, count, clip, Inputs([], version=version, seed=seed))
    return mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_noise_is_normal_with_variance_z2_c2_over_k2(dtype: torch.dtype) -> None:
    found = noise(dtype=dtype)
    assert found.dtype == dtype
    sigma = 1.5 * 2.0 / 4
    assert abs(float(found.double().mean())) < 5 * sigma / P**0.5
    assert float(found.double().var()) == pytest.approx(sigma**2, rel=5 * (2 / P) ** 0.5 + 0.001)
    if dtype != torch.bfloat16:
        assert stats.kstest(found.double().numpy() / sigma, "norm").pvalue > 1e-3


@pytest.mark.parametrize(("z", "clip", "count"), [(3.0, 2.0, 4), (1.5, 4.0, 4), (1.5, 2.0, 2)])
def test_the_noise_grows_with_z_and_c_and_shrinks_with_k(z: float, clip: float, count: int) -> None:
    torch.testing.assert_close(noise(z, clip, count), 2 * noise())


def test_no_two_versions_and_no_two_seeds_share_noise() -> None:
    """Not even seeds that agree in their last 32 bits, nor (seed, version) shifted against each other."""
    gold = 0x9E3779B97F4A7C15
    pairs = [(7, 0), (7, 1), (7, 2), (8, 0), (0, 7), (7 + 2**32, 0), (7, 2**32), ((7 + gold) % 2**63, 0), (2**63, 0)]
    drawn = torch.stack([noise(seed=seed, version=version) for seed, version in pairs])
    correlation = torch.corrcoef(drawn) - torch.eye(len(pairs))
    assert float(correlation.abs().max()) < 6 / P**0.5
    # No stretch of one is one of another, at any offset.
    firsts = np.lib.stride_tricks.sliding_window_view(drawn.numpy(), 4, axis=1).reshape(-1, 4)
    assert len(np.unique(firsts, axis=0)) == len(firsts)


def test_the_same_seed_and_version_give_the_same_bytes_in_blocks_of_any_length() -> None:
    whole = noise(length=1000).numpy().tobytes()
    assert noise(length=1000).numpy().tobytes() == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "BLOCK", 137)
        assert noise(length=1000).numpy().tobytes() == whole


def test_the_noise_leaves_torchs_and_numpys_own_generators_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    expected = (torch.rand(()), np.random.rand())
    torch.manual_seed(1)
    np.random.seed(1)
    noise()
    assert (torch.rand(()), np.random.rand()) == expected


def buffer(count: int = 4, seed: int = 0) -> Inputs:
    random = torch.Generator().manual_seed(seed)
    entering = [Input(torch.randn(P, generator=random), 10 + n, n, n) for n in range(count)]
    return Inputs(entering, version=3, seed=11)


def applied(rule: Any, inputs: Inputs) -> Tensor:
    values = torch.ones(P)
    rule.apply(values, rule.init(values), inputs)
    return values


def test_a_private_step_is_the_plain_one_and_its_noise() -> None:
    """w + η·(mean + noise): the noise is that of the mean, once for the whole buffer, whatever the weights s(τ)."""
    plain = applied(DeltaMean(0.5, Polynomial(0.5)), buffer())
    private = applied(ServerStep(Sgd(0.5), staleness=Polynomial(0.5), privacy=Privacy(1.5), clip_norm=2.0), buffer())
    torch.testing.assert_close(private - plain, 0.5 * noise(version=3, seed=11), rtol=0, atol=1e-5)


def test_a_private_window_is_the_mean_of_its_models_and_fresh_noise() -> None:
    window = buffer().entering
    inputs = Inputs(window[-1:], window, version=3, seed=11)
    plain = applied(WindowMean(), inputs)
    private = applied(WindowAggregate(privacy=Privacy(1.5), clip_norm=2.0), inputs)
    torch.testing.assert_close(private - plain, noise(version=3, seed=11), rtol=0, atol=1e-5)
    later = applied(WindowAggregate(privacy=Privacy(1.5), clip_norm=2.0), inputs._replace(version=4))
    torch.testing.assert_close(later - plain, noise(version=4, seed=11), rtol=0, atol=1e-5)


def test_with_privacy_every_contribution_weighs_the_same() -> None:
    """Shares of the samples would let one weigh more than 1/K."""
    some = buffer()
    heavy = [x._replace(samples=1 + 10**6 * (n == 0)) for n, x in enumerate(some.entering)]
    step = ServerStep(weights="samples", privacy=Privacy(1.5), clip_norm=2.0)
    assert torch.equal(applied(step, some._replace(entering=heavy)), applied(step, some))


@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize(
    ("row", "size"), [(fedbuff, {"concurrency": 5}), (fedfa, {"concurrency": 5}), (fedavg, {"cohort": 5})]
)
def test_noise_0_is_no_privacy_at_all(row: Any, size: dict[str, int], clip: float | None) -> None:
    """The very same strategy, so the same bits: fedavg's weights by samples too."""
    assert row(**size, clip_norm=clip, privacy=Privacy(0.0)) == row(**size, clip_norm=clip)
    assert isinstance(row(**size, privacy=Privacy(0.0)).update, DeltaMean | WindowMean | SampleWeightedMean)


def test_a_step_with_noise_0_is_the_one_without_bit_for_bit() -> None:
    for weights in ("equal", "samples"):
        with_0 = ServerStep(staleness=Constant(), weights=weights, privacy=Privacy(0.0), clip_norm=1.0)
        without = ServerStep(staleness=Constant(), weights=weights)
        assert torch.equal(applied(with_0, buffer()), applied(without, buffer()))


def test_noise_0_goes_with_every_aggregator() -> None:
    assert fedbuff(concurrency=5, aggregator=Median(), privacy=Privacy(0.0)).update.aggregator == Median()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Privacy(-1.0), "privacy: noise_multiplier must be .*-1"),
        (lambda: Privacy(float("inf")), "privacy: noise_multiplier must be .*inf"),
        (lambda: Privacy(1.0, 0.0), "privacy: delta must be .*0"),
        (lambda: Privacy(1.0, 1.0), "privacy: delta must be .*1"),
        (lambda: fedbuff(concurrency=5, privacy=Privacy(1.0)), "privacy needs a clip_norm"),
        (lambda: fedavg(cohort=5, privacy=Privacy(1.0), max_norm=1.0), "privacy needs a clip_norm"),
        (lambda: fedfa(concurrency=5, privacy=Privacy(1.0)), "privacy needs a clip_norm"),
        *(
            (
                lambda rule=rule: fedbuff(concurrency=5, clip_norm=1.0, privacy=Privacy(1.0), aggregator=rule),
                f"privacy is defined here for the sum of a buffer, not for aggregator '{rule.kind}'",
            )
            for rule in (Median(), TrimmedMean(), Krum())
        ),
        (lambda: fedfa(concurrency=5, clip_norm=1.0, privacy=Privacy(1.0), aggregator=Median()), "not for aggregator"),
    ],
)
def test_noise_that_would_mean_nothing_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_the_mean_may_be_named() -> None:
    named = fedbuff(concurrency=5, clip_norm=1.0, privacy=Privacy(1.0), aggregator=Mean())
    assert named == fedbuff(concurrency=5, clip_norm=1.0, privacy=Privacy(1.0))
