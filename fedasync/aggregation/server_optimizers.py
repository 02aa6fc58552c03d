"""Server optimisers: what is made of the mean update D of a buffer, the "pseudo-gradient" (Reddi et al. 2021).

An optimiser is a frozen value with two functions: ``init(values)``, its state for a model [P], and ``step(values,
state, direction, target, delay)``, which writes w + η·(something of D) to ``target`` and returns the next state.
``target`` is ``values`` itself, or the memory of ``direction``; ``delay`` is the largest τ in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from fedasync.aggregation.update import blocks
from fedasync.core.bounds import check_choice, check_integer, check_real

if TYPE_CHECKING:
    from torch import Tensor

Convention = Literal["paper", "flower", "textbook"]
"""Where v starts and whether moments are corrected: v = τ² and not at all (Reddi et al. 2021, as recalled); v = 0 and
with exponents one larger than Adam's own (Flower 1.42); v = 0 and as in Adam (Kingma and Ba 2015)."""


@dataclass(frozen=True, slots=True)
class Sgd:
    """w ← w + η·u with u ← β·u + D: FedAvgM (Hsu et al. 2019) for β > 0, the plain server step for β = 0."""

    learning_rate: float = 1.0
    momentum: float = 0.0
    kind: Literal["sgd"] = "sgd"

    def __post_init__(self) -> None:
        check_real("sgd: learning_rate", self.learning_rate, 0, above=True)
        check_real("sgd: momentum", self.momentum, 0, 1, below=True)

    def init(self, values: Tensor) -> Tensor | None:
        """The velocity u [P], 0; None without momentum."""
        import torch

        return torch.zeros_like(values) if self.momentum else None

    def step(
        self, values: Tensor, state: Tensor | None, direction: Tensor, target: Tensor, delay: int
    ) -> Tensor | None:
        import torch

        if state is None:
            for moved, w, d in blocks(target, values, direction):
                torch.add(w, d, alpha=self.learning_rate, out=moved)
            return None
        for moved, w, d, u in blocks(target, values, direction, state):
            u.mul_(self.momentum).add_(d)
            torch.add(w, u, alpha=self.learning_rate, out=moved)
        return state


class Moments(NamedTuple):
    """State of an adaptive optimiser: m and v [P], the largest v so far (AMSGrad) or None, and steps made."""

    first: Tensor
    second: Tensor
    largest: Tensor | None
    steps: int


@dataclass(frozen=True, slots=True)
class Adam:
    """FedAdam (Reddi et al. 2021): v ← β₂·v + (1 − β₂)·D², w ← w + η·m/(√v + τ), m ← β₁·m + (1 − β₁)·D.

    β and τ are the paper's, as recalled; its η is tuned for every task, 0.1 is Flower's.
    """

    learning_rate: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3
    convention: Convention = "paper"
    kind: Literal["adam"] = "adam"

    def __post_init__(self) -> None:
        _check(self.kind, self.learning_rate, self.beta_1, self.beta_2, self.tau)
        check_choice("adam: convention", self.convention, Convention)

    def init(self, values: Tensor) -> Moments:
        return _moments(values, self.tau**2 if self.convention == "paper" else 0.0)

    def step(self, values: Tensor, state: Moments, direction: Tensor, target: Tensor, delay: int) -> Moments:
        rate = self.learning_rate
        if self.convention != "paper":
            t = state.steps + (2 if self.convention == "flower" else 1)
            rate *= sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)

        def second(v: Tensor, d: Tensor) -> None:
            v.mul_(self.beta_2).addcmul_(d, d, value=1 - self.beta_2)

        return _adaptive(values, state, direction, target, rate, self.beta_1, self.tau, second)


@dataclass(frozen=True, slots=True)
class Yogi:
    """FedYogi (Reddi et al. 2021): v ← v − (1 − β₂)·D²·sign(v − D²), else as Adam. η = 0.01 is Flower's."""

    learning_rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3
    kind: Literal["yogi"] = "yogi"

    def __post_init__(self) -> None:
        _check(self.kind, self.learning_rate, self.beta_1, self.beta_2, self.tau)

    def init(self, values: Tensor) -> Moments:
        return _moments(values, self.tau**2)

    def step(self, values: Tensor, state: Moments, direction: Tensor, target: Tensor, delay: int) -> Moments:
        def second(v: Tensor, d: Tensor) -> None:
            squared = d.square()
            v.addcmul_(squared, (v - squared).sign_(), value=-(1 - self.beta_2))

        return _adaptive(values, state, direction, target, self.learning_rate, self.beta_1, self.tau, second)


@dataclass(frozen=True, slots=True)
class Adagrad:
    """FedAdagrad (Reddi et al. 2021): v ← v + D², else as Adam; β₁ = 0 as recalled. η = 0.1 is Flower's."""

    learning_rate: float = 0.1
    beta_1: float = 0.0
    tau: float = 1e-3
    kind: Literal["adagrad"] = "adagrad"

    def __post_init__(self) -> None:
        _check(self.kind, self.learning_rate, self.beta_1, 0.0, self.tau)

    def init(self, values: Tensor) -> Moments:
        return _moments(values, self.tau**2)

    def step(self, values: Tensor, state: Moments, direction: Tensor, target: Tensor, delay: int) -> Moments:
        def second(v: Tensor, d: Tensor) -> None:
            v.addcmul_(d, d)

        return _adaptive(values, state, direction, target, self.learning_rate, self.beta_1, self.tau, second)


@dataclass(frozen=True, slots=True)
class Amsgrad:
    """FADAS's server (Wang et al. 2024): Adam whose denominator is the largest v so far, v from 0, uncorrected.

    With a ``delay_threshold`` τ_c the step is delay-adaptive: η/τ_max for a buffer whose largest τ exceeds τ_c.
    """

    learning_rate: float = 1e-3
    beta_1: float = 0.9
    beta_2: float = 0.99
    epsilon: float = 1e-8
    delay_threshold: int | None = None
    kind: Literal["amsgrad"] = "amsgrad"

    def __post_init__(self) -> None:
        _check(self.kind, self.learning_rate, self.beta_1, self.beta_2, self.epsilon, "epsilon")
        if self.delay_threshold is not None:
            check_integer("amsgrad: delay_threshold", self.delay_threshold, 1)

    def init(self, values: Tensor) -> Moments:
        return _moments(values, 0.0, largest=True)

    def step(self, values: Tensor, state: Moments, direction: Tensor, target: Tensor, delay: int) -> Moments:
        late = self.delay_threshold is not None and delay > self.delay_threshold
        rate = self.learning_rate / delay if late else self.learning_rate

        def second(v: Tensor, d: Tensor) -> None:
            v.mul_(self.beta_2).addcmul_(d, d, value=1 - self.beta_2)

        return _adaptive(values, state, direction, target, rate, self.beta_1, self.epsilon, second)


ServerOptimizer: TypeAlias = Sgd | Adam | Yogi | Adagrad | Amsgrad


def _check(kind: str, learning_rate: float, beta_1: float, beta_2: float, tau: float, named: str = "tau") -> None:
    check_real(f"{kind}: learning_rate", learning_rate, 0, above=True)
    check_real(f"{kind}: beta_1", beta_1, 0, 1, below=True)
    check_real(f"{kind}: beta_2", beta_2, 0, 1, below=True)
    check_real(f"{kind}: {named}", tau, 0, above=True)


def _moments(values: Tensor, second: float, *, largest: bool = False) -> Moments:
    import torch

    zeros = torch.zeros_like(values)
    return Moments(zeros, torch.full_like(values, second), torch.zeros_like(values) if largest else None, 0)


def _adaptive(
    values: Tensor,
    state: Moments,
    direction: Tensor,
    target: Tensor,
    rate: float,
    beta_1: float,
    tau: float,
    second: Callable[[Tensor, Tensor], None],
) -> Moments:
    """m ← β₁·m + (1 − β₁)·D; v by ``second(v, D)``; w + η·m/(√v + τ) to ``target``."""
    import torch

    vectors = (target, values, direction, state.first, state.second)
    for moved, w, d, m, v, *largest in blocks(*vectors, *(() if state.largest is None else (state.largest,))):
        m.lerp_(d, 1 - beta_1)
        second(v, d)
        for most in largest:
            torch.maximum(most, v, out=most)
        scale = (largest[0] if largest else v).sqrt().add_(tau)
        torch.addcdiv(w, m, scale, value=rate, out=moved)
    return state._replace(steps=state.steps + 1)
