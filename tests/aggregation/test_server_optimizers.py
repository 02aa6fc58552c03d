"""Each server optimiser against its recursion in numpy; Adam and AMSGrad also against torch's."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedasync.aggregation import update
from fedasync.aggregation.server_optimizers import Adagrad, Adam, Amsgrad, Sgd, Yogi

Vector = NDArray[np.float64]
P, STEPS = 7, 12


def directions(seed: int, steps: int = STEPS) -> list[Vector]:
    """Pseudo-gradients of changing size, with zeros among them."""
    rng = np.random.default_rng(seed)
    found = [rng.standard_normal(P) * 10.0 ** rng.integers(-3, 2) for _ in range(steps)]
    for d in found:
        d[rng.integers(P)] = 0.0
    return found


def walk(optimizer: Any, found: list[Vector], delays: list[int] | None = None, *, aside: bool = False) -> list[Vector]:
    """Every version from w = 1. ``aside``: written to the direction's memory, as a server does that publishes."""
    w = torch.ones(P, dtype=torch.float64)
    state = optimizer.init(w)
    versions = []
    for i, d in enumerate(found):
        direction = torch.from_numpy(d.copy())
        target = direction if aside else w
        state = optimizer.step(w, state, direction, target, 0 if delays is None else delays[i])
        w = target
        versions.append(w.numpy().copy())
    return versions


def assert_same(ours: list[Vector], theirs: list[Vector], rel: float = 1e-12) -> None:
    assert len(ours) == len(theirs) > 0
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=rel, atol=1e-15)


def textbook(optimizer: Any, found: list[Vector], delays: list[int]) -> list[Vector]:
    """The recursion of the optimiser's paper."""
    w, u, m = np.ones(P), np.zeros(P), np.zeros(P)
    from_tau = isinstance(optimizer, (Yogi, Adagrad)) or getattr(optimizer, "convention", "") == "paper"
    v = np.full(P, optimizer.tau**2 if from_tau else 0.0)
    largest, versions = np.zeros(P), []
    for t, (d, delay) in enumerate(zip(found, delays, strict=True), start=1):
        if isinstance(optimizer, Sgd):
            u = optimizer.momentum * u + d
            w = w + optimizer.learning_rate * u
            versions.append(w)
            continue
        m = optimizer.beta_1 * m + (1 - optimizer.beta_1) * d
        rate = optimizer.learning_rate
        if isinstance(optimizer, Adagrad):
            v = v + d**2
        elif isinstance(optimizer, Yogi):
            v = v - (1 - optimizer.beta_2) * d**2 * np.sign(v - d**2)
        else:
            v = optimizer.beta_2 * v + (1 - optimizer.beta_2) * d**2
        if isinstance(optimizer, Adam) and optimizer.convention != "paper":
            power = t + (optimizer.convention == "flower")
            rate *= sqrt(1 - optimizer.beta_2**power) / (1 - optimizer.beta_1**power)
        if isinstance(optimizer, Amsgrad):
            largest = np.maximum(largest, v)
            threshold = optimizer.delay_threshold
            rate = rate / delay if threshold is not None and delay > threshold else rate
            w = w + rate * m / (np.sqrt(largest) + optimizer.epsilon)
        else:
            w = w + rate * m / (np.sqrt(v) + optimizer.tau)
        versions.append(w)
    return versions


OPTIMIZERS = {
    "sgd": Sgd(0.7),
    "momentum": Sgd(0.7, 0.9),
    "adam": Adam(0.05, 0.9, 0.99, 1e-2),
    "adam_textbook": Adam(0.05, 0.8, 0.99, 1e-3, "textbook"),
    "adam_flower": Adam(0.05, 0.9, 0.95, 1e-3, "flower"),
    "adam_without_memory": Adam(0.05, 0.0, 0.0, 1.0),
    "yogi": Yogi(0.05, 0.9, 0.99, 1e-2),
    "adagrad": Adagrad(0.05, 0.0, 1e-2),
    "adagrad_with_momentum": Adagrad(0.05, 0.5, 1e-2),
    "amsgrad": Amsgrad(0.05),
    "amsgrad_delay_adaptive": Amsgrad(0.05, delay_threshold=2),
}


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_follows_its_recursion(name: str, aside: bool) -> None:
    delays = [0, 1, 2, 3, 7, 2] * 2
    found = directions(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "BLOCK", 3)  # several blocks, one of them short
        ours = walk(OPTIMIZERS[name], found, delays, aside=aside)
    assert_same(ours, textbook(OPTIMIZERS[name], found, delays))


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(tuple(OPTIMIZERS)), seed=st.integers(0, 10_000), delay=st.integers(0, 9))
def test_an_optimiser_follows_its_recursion_from_any_draw(name: str, seed: int, delay: int) -> None:
    found = directions(seed, 5)
    assert_same(walk(OPTIMIZERS[name], found, [delay] * 5), textbook(OPTIMIZERS[name], found, [delay] * 5), rel=1e-10)


def torchs(optimizer: Any, found: list[Vector]) -> list[Vector]:
    """torch.optim.Adam, told before each step where our ε enters: before the correction, not after it.

    Torch divides by √v/√(1 − β₂ᵗ) + ε; ours, the other form in Kingma and Ba's section 2, by √v + ε. AMSGrad as FADAS
    has it corrects nothing at all, so that the step size takes torch's correction back.
    """
    w = torch.ones(P, dtype=torch.float64, requires_grad=True)
    amsgrad = isinstance(optimizer, Amsgrad)
    epsilon = optimizer.epsilon if amsgrad else optimizer.tau
    theirs = torch.optim.Adam([w], betas=(optimizer.beta_1, optimizer.beta_2), amsgrad=amsgrad)
    versions = []
    for t, d in enumerate(found, start=1):
        first, second = 1 - optimizer.beta_1**t, sqrt(1 - optimizer.beta_2**t)
        theirs.param_groups[0]["eps"] = epsilon / second
        theirs.param_groups[0]["lr"] = optimizer.learning_rate * (first / second if amsgrad else 1)
        w.grad = -torch.from_numpy(d)
        theirs.step()
        versions.append(w.detach().numpy().copy())
    return versions


@pytest.mark.parametrize(
    "optimizer", [Adam(0.05, 0.9, 0.99, 1e-3, "textbook"), Adam(0.1, 0.5, 0.9, 1e-8, "textbook"), Amsgrad(0.05)]
)
def test_adam_and_amsgrad_are_torchs(optimizer: Any) -> None:
    found = directions(11, 30)
    assert_same(walk(optimizer, found), torchs(optimizer, found), rel=1e-11)


def test_textbook_adam_is_torchs_as_it_stands_where_epsilon_is_small() -> None:
    found = [d + 1.0 for d in directions(5)]  # nowhere near 0
    w = torch.ones(P, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.Adam([w], lr=0.05, betas=(0.9, 0.99), eps=1e-12)
    for d in found:
        w.grad = -torch.from_numpy(d)
        theirs.step()
    ours = walk(Adam(0.05, 0.9, 0.99, 1e-12, "textbook"), found)
    np.testing.assert_allclose(ours[-1], w.detach().numpy(), rtol=1e-9)


def test_momentum_is_torchs_sgd() -> None:
    found = directions(7)
    w = torch.ones(P, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.SGD([w], lr=0.3, momentum=0.9)
    for d in found:
        w.grad = -torch.from_numpy(d)
        theirs.step()
    np.testing.assert_allclose(walk(Sgd(0.3, 0.9), found)[-1], w.detach().numpy(), rtol=1e-12)


def test_the_conventions_differ_by_their_factors_alone() -> None:
    """One step along D = 1 with v from 0: η·(1 − β₁)/(√(1 − β₂) + τ), times each convention's correction."""
    beta_1, beta_2, tau, eta = 0.9, 0.99, 1e-3, 0.1

    def one(convention: Any) -> float:
        return float(walk(Adam(eta, beta_1, beta_2, tau, convention), [np.ones(P)])[0][0]) - 1

    plain = eta * (1 - beta_1) / (sqrt(1 - beta_2) + tau)
    assert one("textbook") == pytest.approx(plain * sqrt(1 - beta_2) / (1 - beta_1), rel=1e-12)
    assert one("flower") == pytest.approx(plain * sqrt(1 - beta_2**2) / (1 - beta_1**2), rel=1e-12)
    started = beta_2 * tau**2 + 1 - beta_2
    assert one("paper") == pytest.approx(eta * (1 - beta_1) / (sqrt(started) + tau), rel=1e-12)


def test_amsgrads_denominator_never_shrinks() -> None:
    """After one large D every step along a small one is as small as it was right after it."""
    found = [np.full(P, 10.0), *[np.full(P, 1e-3)] * 20]
    optimizer = Amsgrad(0.1, beta_1=0.0)
    moved = np.diff([w[0] for w in walk(optimizer, found)])
    assert moved == pytest.approx(0.1 * 1e-3 / (sqrt(0.01 * 100) + 1e-8), rel=1e-9)


@pytest.mark.parametrize(("delay", "factor"), [(0, 1), (3, 1), (4, 1 / 4), (10, 1 / 10)])
def test_delay_adaptive_amsgrad_divides_by_the_delay_beyond_the_threshold(delay: int, factor: float) -> None:
    plain, adaptive = Amsgrad(0.1), Amsgrad(0.1, delay_threshold=3)
    d = [np.ones(P)]
    assert walk(adaptive, d, [delay])[0] - 1 == pytest.approx(factor * (walk(plain, d)[0] - 1), rel=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_to_follow_moves_nothing(name: str) -> None:
    assert all(np.array_equal(w, np.ones(P)) for w in walk(OPTIMIZERS[name], [np.zeros(P)] * 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sgd(0.0), "sgd: learning_rate must be a finite number > 0"),
        (lambda: Sgd(1.0, 1.0), "sgd: momentum must be a finite number ≥ 0 and < 1"),
        (lambda: Adam(beta_1=1.0), "adam: beta_1"),
        (lambda: Adam(tau=0.0), "adam: tau must be a finite number > 0"),
        (lambda: Adam(convention="keras"), "adam: convention must be 'paper' or 'flower' or 'textbook'"),  # type: ignore[arg-type]
        (lambda: Yogi(beta_2=-0.1), "yogi: beta_2"),
        (lambda: Adagrad(float("nan")), "adagrad: learning_rate"),
        (lambda: Amsgrad(epsilon=0.0), "amsgrad: epsilon"),
        (lambda: Amsgrad(delay_threshold=0), "amsgrad: delay_threshold must be an integer ≥ 1, got 0"),
    ],
)
def test_an_optimiser_refuses_what_is_out_of_range(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
