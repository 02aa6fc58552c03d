"""Publication, the fourth decision: when do workers see a new version, and what becomes of work in flight?

A rule is a frozen value. Before a version is committed it says which measures it wants, ``asks``, and, given them,
whether the version is published, ``due``. Counters alone decide where they can, so that a measure, which may cost
passes over data, is taken only where its value can matter. Rules nest; ``in_flight`` belongs to the outermost one.

The rules and their defaults follow the low-switching-cost work (arXiv 2112.06424: online and deployed policy), as its
authors' released code has them; what is ours says so. A measure compares the version about to be made
with the published one:

    disagreement      share of states on which the two choose different actions
    kl                mean KL(new ‖ published) of their action distributions, in nats
    feature_cosine    mean cosine of their features of the same states
    distance          ‖w − w_published‖ / ‖w_published‖
    episodes, visit_doublings, log_det, min_eigenvalue
                      counts and information gathered since the start: rules look at what they gained since the last
                      publication (version 0 is published with 0 of each)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from fedasync.core.bounds import check_choice, check_integer, check_real

InFlight = Literal["continue", "interrupt", "abort"]
"""Work in flight goes on from its old base; goes on under the new version (the runtime swaps it in); is cancelled."""

NOTHING: frozenset[str] = frozenset()


class State(NamedTuple):
    """What a rule may look at."""

    version: int
    """The version that the commit makes."""
    published: int
    """The version that workers see."""
    publications: int
    """How often a version was published (version 0 does not count)."""
    measured: Mapping[str, float]
    """The rule's ``references`` at the last publication; one that is missing was 0."""

    @property
    def lag(self) -> int:
        """Versions between the new one and the one that workers see; ≥ 1."""
        return self.version - self.published


class Rule:
    """What all rules share."""

    __slots__ = ()

    in_flight: InFlight
    """What becomes of work in flight when a version is published."""
    kind: str

    def asks(self, state: State) -> frozenset[str]:
        """Measures without which ``due`` cannot answer, and those to be remembered if it says yes."""
        decided = self.decided(state)
        if decided is False:
            return NOTHING
        return self.references if decided else self.references | self.wants(state)

    def due(self, state: State, measured: Mapping[str, float]) -> bool:
        """Whether the new version is published. ``measured`` holds all that ``asks`` named (KeyError otherwise)."""
        decided = self.decided(state)
        return self.fires(state, measured) if decided is None else decided

    def decided(self, state: State) -> bool | None:
        """What the counters alone decide; None where measures do."""
        raise NotImplementedError

    def wants(self, state: State) -> frozenset[str]:
        """Measures that decide where counters do not."""
        return NOTHING

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        """What those measures decide."""
        raise NotImplementedError

    @property
    def measures(self) -> frozenset[str]:
        """All that the rule may ever ask for."""
        return NOTHING

    @property
    def references(self) -> frozenset[str]:
        """Measures whose values at the last publication matter."""
        return NOTHING

    @property
    def most_lag(self) -> float:
        """The published version never lags by more versions, whatever is measured (inf: no bound)."""
        return inf


@dataclass(frozen=True, slots=True)
class EveryVersion(Rule):
    """Workers see every version."""

    in_flight: InFlight = "continue"
    kind: Literal["every_version"] = "every_version"

    def __post_init__(self) -> None:
        check_choice("publication: in_flight", self.in_flight, InFlight)

    def decided(self, state: State) -> bool:
        return True

    @property
    def most_lag(self) -> float:
        return 0


@dataclass(frozen=True, slots=True)
class EveryN(Rule):
    """Every n-th version."""

    n: int
    in_flight: InFlight = "continue"
    kind: Literal["fixed"] = "fixed"

    def __post_init__(self) -> None:
        check_integer("publication: n", self.n, 1)
        check_choice("publication: in_flight", self.in_flight, InFlight)

    def decided(self, state: State) -> bool:
        return state.lag >= self.n

    @property
    def most_lag(self) -> float:
        return self.n - 1


@dataclass(frozen=True, slots=True)
class Linear(Rule):
    """After min(start + k·increment, most) versions, where k publications were made before.

    The released code starts at 100 learner updates, adds 100, and stops growing at 10,000.
    """

    start: int = 100
    increment: int = 100
    most: int = 10_000
    in_flight: InFlight = "continue"
    kind: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        check_integer("publication: start", self.start, 1)
        check_integer("publication: increment", self.increment, 0)
        check_integer("publication: most", self.most, self.start)
        check_choice("publication: in_flight", self.in_flight, InFlight)

    def decided(self, state: State) -> bool:
        return state.lag >= min(self.start + state.publications * self.increment, self.most)

    @property
    def most_lag(self) -> float:
        return self.most - 1 if self.increment else self.start - 1


@dataclass(frozen=True, slots=True)
class Exponential(Rule):
    """At the first version ≥ base^k, where k publications were made before: 1, 2, 4, 8, … with base 2.

    Alone and with base ≥ 2 it makes ⌊log_base T⌋ + 1 publications in T versions.
    """

    base: float = 2.0
    in_flight: InFlight = "continue"
    kind: Literal["exponential"] = "exponential"

    def __post_init__(self) -> None:
        check_real("publication: base", self.base, 1, above=True)
        check_choice("publication: in_flight", self.in_flight, InFlight)

    def decided(self, state: State) -> bool:
        try:
            return state.version >= float(self.base) ** state.publications
        except OverflowError:
            return False
