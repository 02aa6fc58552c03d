"""Publication rules that measure: what the new version would do otherwise, or what was learnt since the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.core.publication import InFlight, Rule, State

LOG_2 = log(2.0)


class Measuring(Rule):
    """A rule that looks at measures, at every ``check_every``-th version."""

    __slots__ = ()

    check_every: int

    def decided(self, state: State) -> bool | None:
        return None if state.version % self.check_every == 0 else False

    def wants(self, state: State) -> frozenset[str]:
        return self.measures


def _check_measuring(rule: Measuring) -> None:
    check_integer("publication: check_every", rule.check_every, 1)
    check_choice("publication: in_flight", rule.in_flight, InFlight)


@dataclass(frozen=True, slots=True)
class Disagreement(Measuring):
    """The two versions choose different actions on more than this share of states.

    0.5 of 512 states in the released Atari script, tested at every 8th update; 0.05 and 0.25 were used too.
    """

    above: float = 0.5
    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["disagreement"] = "disagreement"

    def __post_init__(self) -> None:
        check_real("publication: above", self.above, 0, 1, below=True)
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return measured["disagreement"] > self.above

    @property
    def measures(self) -> frozenset[str]:
        return frozenset({"disagreement"})


@dataclass(frozen=True, slots=True)
class Kl(Measuring):
    """KL(new ‖ published), mean over states and action dimensions, is larger than this.

    1.5 in the released MuJoCo scripts (256 states); 0.08 to 2.5 were swept.
    """

    above: float = 1.5
    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["kl"] = "kl"

    def __post_init__(self) -> None:
        check_real("publication: above", self.above, 0)
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return measured["kl"] > self.above

    @property
    def measures(self) -> frozenset[str]:
        return frozenset({"kl"})


@dataclass(frozen=True, slots=True)
class FeatureCosine(Measuring):
    """The features of the two versions, cosine per state and then averaged, are less alike than this.

    0.98 in the released Atari and sepsis scripts (512 states, every 8th update), 0.90 for MuJoCo (256 states).
    """

    below: float = 0.98
    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["feature_cosine"] = "feature_cosine"

    def __post_init__(self) -> None:
        check_real("publication: below", self.below, -1, 1, above=True)
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return measured["feature_cosine"] < self.below

    @property
    def measures(self) -> frozenset[str]:
        return frozenset({"feature_cosine"})


@dataclass(frozen=True, slots=True)
class Distance(Measuring):
    """The weights have moved by more than this part of the published weights' norm (ours)."""

    above: float
    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["distance"] = "distance"

    def __post_init__(self) -> None:
        check_real("publication: above", self.above, 0)
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return measured["distance"] > self.above

    @property
    def measures(self) -> frozenset[str]:
        return frozenset({"distance"})


@dataclass(frozen=True, slots=True)
class EpisodeEnd(Measuring):
    """An episode has ended since the last publication."""

    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["episode_end"] = "episode_end"

    def __post_init__(self) -> None:
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return measured["episodes"] > state.measured.get("episodes", 0.0)

    @property
    def measures(self) -> frozenset[str]:
        return frozenset({"episodes"})

    @property
    def references(self) -> frozenset[str]:
        return self.measures


@dataclass(frozen=True, slots=True)
class VisitsDoubled(Measuring):
    """Some pair of state and action has been visited 1, 2, 4, 8, … times, since the last publication."""

    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["visits_doubled"] = "visits_doubled"

    def __post_init__(self) -> None:
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return measured["visit_doublings"] > state.measured.get("visit_doublings", 0.0)

    @property
    def measures(self) -> frozenset[str]:
        return frozenset({"visit_doublings"})

    @property
    def references(self) -> frozenset[str]:
        return self.measures


@dataclass(frozen=True, slots=True)
class DeterminantDoubled(Measuring):
    """det(Λ + I) of the information matrix, in any of its ``blocks``, has doubled since the last publication.

    The measure is its natural logarithm, ``log_det``; with several blocks (of steps in an episode, as the released
    code keeps them) ``log_det_0``, ``log_det_1``, …
    """

    blocks: int = 1
    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["determinant_doubled"] = "determinant_doubled"

    def __post_init__(self) -> None:
        check_integer("publication: blocks", self.blocks, 1)
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return any(measured[name] >= state.measured.get(name, 0.0) + LOG_2 for name in self.measures)

    @property
    def measures(self) -> frozenset[str]:
        return block_names("log_det", self.blocks)

    @property
    def references(self) -> frozenset[str]:
        return self.measures


@dataclass(frozen=True, slots=True)
class MinEigenvalueDoubled(Measuring):
    """The smallest eigenvalue of the information matrix Λ, in any of its ``blocks``, has doubled (from 0: is > 0).

    The measure is ``min_eigenvalue``; with several blocks ``min_eigenvalue_0``, ``min_eigenvalue_1``, …
    """

    blocks: int = 1
    check_every: int = 1
    in_flight: InFlight = "continue"
    kind: Literal["min_eigenvalue_doubled"] = "min_eigenvalue_doubled"

    def __post_init__(self) -> None:
        check_integer("publication: blocks", self.blocks, 1)
        _check_measuring(self)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return any(measured[name] > 0 and measured[name] >= 2 * state.measured.get(name, 0.0) for name in self.measures)

    @property
    def measures(self) -> frozenset[str]:
        return block_names("min_eigenvalue", self.blocks)

    @property
    def references(self) -> frozenset[str]:
        return self.measures


def block_names(measure: str, blocks: int) -> frozenset[str]:
    """What a measure is called in each block of an information matrix."""
    return frozenset({measure} if blocks == 1 else {f"{measure}_{block}" for block in range(blocks)})
