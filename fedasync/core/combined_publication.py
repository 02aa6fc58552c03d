"""Publication rules made of others: and, or, a minimum interval, a longest one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer
from fedasync.core.measured_publication import (
    DeterminantDoubled,
    Disagreement,
    Distance,
    EpisodeEnd,
    FeatureCosine,
    Kl,
    MinEigenvalueDoubled,
    VisitsDoubled,
)
from fedasync.core.publication import EveryN, EveryVersion, Exponential, InFlight, Linear, Rule, State


def _check_inner(rule: Rule, inner: Sequence[object]) -> None:
    check_choice("publication: in_flight", rule.in_flight, InFlight)
    if not inner:
        raise ValueError(f"publication {rule.kind!r}: rules must hold at least one rule, got none")
    for each in inner:
        if not isinstance(each, Rule):
            raise ValueError(f"publication {rule.kind!r}: got {each!r} as a rule; EveryN(4), say, would do")
        if each.in_flight != "continue":
            raise ValueError(
                f"publication {rule.kind!r}: in_flight belongs to the outermost rule, got in_flight = "
                f"{each.in_flight!r} on {each.kind!r} inside it; in_flight on {rule.kind!r} would do"
            )


def _joined(names: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*names)


class _OfSeveral(Rule):
    __slots__ = ()

    rules: tuple[Publication, ...]

    def wants(self, state: State) -> frozenset[str]:
        return _joined([rule.wants(state) for rule in self.rules if rule.decided(state) is None])

    @property
    def measures(self) -> frozenset[str]:
        return _joined([rule.measures for rule in self.rules])

    @property
    def references(self) -> frozenset[str]:
        return _joined([rule.references for rule in self.rules])


@dataclass(frozen=True, slots=True)
class AllOf(_OfSeveral):
    """Every one of the rules is due; one that is not tested at this version (``check_every``) is not."""

    rules: tuple[Publication, ...]
    in_flight: InFlight = "continue"
    kind: Literal["all_of"] = "all_of"

    def __post_init__(self) -> None:
        _check_inner(self, self.rules)

    def decided(self, state: State) -> bool | None:
        decided = [rule.decided(state) for rule in self.rules]
        return False if False in decided else None if None in decided else True

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return all(rule.due(state, measured) for rule in self.rules)

    @property
    def most_lag(self) -> float:
        return max(rule.most_lag for rule in self.rules)


@dataclass(frozen=True, slots=True)
class AnyOf(_OfSeveral):
    """At least one of the rules is due."""

    rules: tuple[Publication, ...]
    in_flight: InFlight = "continue"
    kind: Literal["any_of"] = "any_of"

    def __post_init__(self) -> None:
        _check_inner(self, self.rules)

    def decided(self, state: State) -> bool | None:
        decided = [rule.decided(state) for rule in self.rules]
        return True if True in decided else None if None in decided else False

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return any(rule.due(state, measured) for rule in self.rules)

    @property
    def most_lag(self) -> float:
        return min(rule.most_lag for rule in self.rules)


class _Around(Rule):
    __slots__ = ()

    rule: Publication

    def wants(self, state: State) -> frozenset[str]:
        return self.rule.wants(state)

    def fires(self, state: State, measured: Mapping[str, float]) -> bool:
        return self.rule.due(state, measured)

    @property
    def measures(self) -> frozenset[str]:
        return self.rule.measures

    @property
    def references(self) -> frozenset[str]:
        return self.rule.references


@dataclass(frozen=True, slots=True)
class AtLeast(_Around):
    """The rule, at least ``versions`` after the last publication."""

    rule: Publication
    versions: int
    in_flight: InFlight = "continue"
    kind: Literal["at_least"] = "at_least"

    def __post_init__(self) -> None:
        check_integer("publication: versions", self.versions, 1)
        _check_inner(self, [self.rule])

    def decided(self, state: State) -> bool | None:
        return False if state.lag < self.versions else self.rule.decided(state)

    @property
    def most_lag(self) -> float:
        return max(self.rule.most_lag, self.versions - 1)


@dataclass(frozen=True, slots=True)
class ForceAfter(_Around):
    """The rule, or ``versions`` since the last publication (the released code forces after 1,000 to 10,000 steps)."""

    rule: Publication
    versions: int
    in_flight: InFlight = "continue"
    kind: Literal["force_after"] = "force_after"

    def __post_init__(self) -> None:
        check_integer("publication: versions", self.versions, 1)
        _check_inner(self, [self.rule])

    def decided(self, state: State) -> bool | None:
        return True if state.lag >= self.versions else self.rule.decided(state)

    @property
    def most_lag(self) -> float:
        return min(self.rule.most_lag, self.versions - 1)


@dataclass(frozen=True, slots=True)
class WithinStaleness(_Around):
    """The rule, and whenever the published version would lag by more than ``eta`` versions."""

    rule: Publication
    eta: int
    in_flight: InFlight = "continue"
    kind: Literal["within_staleness"] = "within_staleness"

    def __post_init__(self) -> None:
        check_integer("publication: eta", self.eta, 0)
        _check_inner(self, [self.rule])

    def decided(self, state: State) -> bool | None:
        return True if state.lag > self.eta else self.rule.decided(state)

    @property
    def most_lag(self) -> float:
        return min(self.rule.most_lag, self.eta)


Publication = (
    EveryVersion
    | EveryN
    | Linear
    | Exponential
    | EpisodeEnd
    | Disagreement
    | Kl
    | FeatureCosine
    | Distance
    | VisitsDoubled
    | DeterminantDoubled
    | MinEigenvalueDoubled
    | AllOf
    | AnyOf
    | AtLeast
    | ForceAfter
    | WithinStaleness
)
