"""What frameworks compute under one name: FedBuff and FedAsync as the peers have them, to reproduce their results.

Read in the released sources or repositories of the versions that ``FRAMEWORKS`` names. The papers' own rules are
``DeltaMean`` and ``Mixing``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Literal

from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs, Update
from fedasync.core.bounds import check_real
from fedasync.core.staleness import Constant, Hinge, Staleness, checked

if TYPE_CHECKING:
    from torch import Tensor

FedBuffConvention = Literal[
    "paper", "flgo", "asyncflsim", "federatedscope", "normalised", "flsim", "plato", "nvflare", "fedscale", "appfl"
]
FedAsyncConvention = Literal["paper", "plato", "flgo"]

FRAMEWORKS = {
    "paper": "paper",
    "flower": "Flower 1.42.0",
    "textbook": "Adam (Kingma and Ba 2015)",
    "flgo": "FLGo 0.4.4",
    "asyncflsim": "AsyncFLSim, 28 October 2025",
    "federatedscope": "FederatedScope, 19 October 2023",
    "normalised": "weights that sum to 1",
    "flsim": "FLSim 0.1.0",
    "plato": "Plato, 1 October 2025",
    "nvflare": "NVFlare 2.9.0",
    "fedscale": "FedScale, 18 December 2023",
    "appfl": "APPFL 1.12.0",
}
"""Convention → whose it is, with the version in which it was read."""


def fedbuff_update(convention: FedBuffConvention, server_learning_rate: float, staleness: Staleness) -> Update:
    """FedBuff's rule as a framework has it.

    ``staleness`` is s(τ) before the framework's own scaling; Plato ignores it, and NVFlare has its own. Raises
    ValueError for a learning rate where the framework has none.
    """
    match convention:
        case "paper" | "flgo" | "asyncflsim" | "federatedscope":
            return DeltaMean(server_learning_rate, staleness)
        case "normalised":
            return DeltaMean(server_learning_rate, staleness, "weights")
        case "flsim":
            return DeltaMean(server_learning_rate, ScaledToOne(staleness), "nothing")
        case "plato":
            return DeltaMean(server_learning_rate, Constant())
        case "nvflare":
            return DeltaMean(server_learning_rate, OnePlusRoot())
        case "appfl":
            return DriftMean(server_learning_rate, staleness)
        case "fedscale":
            if server_learning_rate != 1:
                raise ValueError(
                    f"fedbuff: convention 'fedscale' installs a mean of models and has no server_learning_rate, got "
                    f"{server_learning_rate}; 1 would do"
                )
            return ModelMean(staleness)


def fedasync_update(convention: FedAsyncConvention, alpha: float, staleness: Staleness) -> Update:
    """FedAsync's rule as a framework has it.

    Plato multiplies the α that it stores by s(τ) at every arrival; FLGo's hinge lacks the "+ 1" and jumps at b. (FLGo
    also averages what arrives within one tick of its clock; here arrivals stay one by one.)
    """
    match convention:
        case "paper":
            return Mixing(alpha, staleness)
        case "plato":
            return DecayingMixing(alpha, staleness)
        case "flgo":
            jumps = JumpingHinge(staleness.a, staleness.b) if isinstance(staleness, Hinge) else staleness
            return Mixing(alpha, jumps)


@dataclass(frozen=True, slots=True)
class ScaledToOne:
    """FLSim: s(τ)/s(average), so that a contribution of average staleness weighs 1."""

    staleness: Callable[[int], float]
    average: int = 1

    def __call__(self, tau: int) -> float:
        return self.staleness(tau) / self.staleness(self.average)


@dataclass(frozen=True, slots=True)
class OnePlusRoot:
    """NVFlare: 1/(1 + √(τ + 1)), since the version is counted on before the weight is taken; a fresh one weighs ½."""

    def __call__(self, tau: int) -> float:
        return 1 / (1 + sqrt(checked(tau) + 1))


@dataclass(frozen=True, slots=True)
class JumpingHinge:
    """FLGo: 1 up to b, then 1/(a·(τ − b))."""

    a: float
    b: float

    def __post_init__(self) -> None:
        check_real("hinge: a, without the “+ 1”,", self.a, 0, above=True)

    def __call__(self, tau: int) -> float:
        return 1.0 if checked(tau) <= self.b else 1 / (self.a * (tau - self.b))


@dataclass(frozen=True, slots=True)
class ModelMean:
    """FedScale: w ← Σ s(τ)·x / Σ s(τ), the mean of the models that come back."""

    staleness: Callable[[int], float]
    wants: Form = "parameters"

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs) -> None:
        weights = [self.staleness(x.staleness) for x in inputs.entering]
        values.zero_()
        for x, weight in zip(inputs.entering, weights, strict=True):
            values.add_(x.values, alpha=weight / sum(weights))


@dataclass(frozen=True, slots=True)
class DriftMean:
    """APPFL: w ← w + (α/N)·Σ s(τ)·(x − w), differences from the current version instead of the client's base."""

    alpha: float
    staleness: Callable[[int], float]
    wants: Form = "parameters"

    def __post_init__(self) -> None:
        check_real("fedbuff: server_learning_rate", self.alpha, 0, above=True)

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs) -> None:
        former = values.clone()
        for x in inputs.entering:
            values.add_(x.values - former, alpha=self.alpha * self.staleness(x.staleness) / inputs.clients)


@dataclass(frozen=True, slots=True)
class DecayingMixing:
    """Plato: FedAsync with α ← α·s(τ) stored at every arrival, so that α decays for good."""

    alpha: float
    staleness: Callable[[int], float]
    wants: Form = "parameters"

    def __post_init__(self) -> None:
        check_real("fedasync: alpha", self.alpha, 0, 1, above=True)

    def init(self, values: Tensor) -> float:
        """The α stored."""
        return self.alpha

    def apply(self, values: Tensor, state: float, inputs: Inputs) -> float:
        for x in inputs.entering:
            state *= self.staleness(x.staleness)
            values.lerp_(x.values, state)
        return state
