"""Measures without a policy: how fast versions drift apart, as a model with a few rates (ours)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, floor, log1p

from fedasync.core.bounds import check_integer, check_real

Draw = Callable[[str, int], float]
"""A uniform number in [0, 1) for a measure and a version."""


@dataclass(frozen=True)
class ModelledDivergence:
    """Measures for publication rules in a run that has no model; a rate that is None is not modelled.

    With lag = versions between the new one and the published one:

        kl              kl_per_version · lag^kl_power
        distance        distance_per_version · lag^distance_power (1/2: steps in random directions)
        disagreement    1 − exp(−disagreement_rate · lag)
        feature_cosine  exp(−feature_rate · lag)

    and, gathered since the start:

        episodes        ⌊episodes_per_s · time⌋
        visit_doublings of ``pairs`` pairs of state and action that are visited evenly, ``visits_per_version`` a version
        log_det         d · log(1 + x/d), min_eigenvalue x/d, where x = information_per_version · version: the trace of
                        an information matrix of d = ``dimension`` that grows evenly (each block of it the same)

    ``spread`` s multiplies the first four by a factor between 1 − s and 1 + s (a share stays ≤ 1, a cosine ≤ 1),
    drawn for each version: the uniform number is the runtime's.
    """

    kl_per_version: float | None = None
    kl_power: float = 1.0
    distance_per_version: float | None = None
    distance_power: float = 0.5
    disagreement_rate: float | None = None
    feature_rate: float | None = None
    episodes_per_s: float | None = None
    pairs: int | None = None
    visits_per_version: float = 1.0
    dimension: int | None = None
    information_per_version: float = 1.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        rates = ("kl_per_version", "distance_per_version", "disagreement_rate", "feature_rate", "episodes_per_s")
        for name in rates:
            if getattr(self, name) is not None:
                check_real(f"divergence: {name}", getattr(self, name), 0)
        for name in ("kl_power", "distance_power"):
            check_real(f"divergence: {name}", getattr(self, name), 0, above=True)
        for name in ("pairs", "dimension"):
            if getattr(self, name) is not None:
                check_integer(f"divergence: {name}", getattr(self, name), 1)
        for name in ("visits_per_version", "information_per_version"):
            check_real(f"divergence: {name}", getattr(self, name), 0)
        check_real("divergence: spread", self.spread, 0, 1)

    @property
    def names(self) -> frozenset[str]:
        """What is modelled."""
        known = {
            "kl": self.kl_per_version,
            "distance": self.distance_per_version,
            "disagreement": self.disagreement_rate,
            "feature_cosine": self.feature_rate,
            "episodes": self.episodes_per_s,
            "visit_doublings": self.pairs,
            "log_det": self.dimension,
            "min_eigenvalue": self.dimension,
        }
        return frozenset(name for name, rate in known.items() if rate is not None)

    def refusal(self, names: Iterable[str]) -> str | None:
        """Why these measures cannot be given, in one line; None when they can."""
        missing = sorted(name for name in names if _plain(name) not in self.names)
        if not missing:
            return None
        wanted = sorted({_NEEDED.get(_plain(name), "a measure that is modelled") for name in missing})
        given = ", ".join(sorted(self.names)) or "nothing"
        return f"divergence models {given}, not {', '.join(missing)}; {', '.join(wanted)} would do"

    def measure(
        self, names: Iterable[str], version: int, published: int, time_s: float, draw: Draw | None = None
    ) -> dict[str, float]:
        """The measures named, of ``version`` against the published one, at that time.

        Raises ValueError for one that is not modelled, and for a spread without ``draw``.
        """
        names = sorted(names)
        if (refusal := self.refusal(names)) is not None:
            raise ValueError(refusal)
        return {name: self._one(name, version, version - published, time_s, draw) for name in names}

    def _one(self, name: str, version: int, lag: int, time_s: float, draw: Draw | None) -> float:
        match _plain(name):
            case "kl":
                return (self.kl_per_version or 0.0) * float(lag**self.kl_power) * self._factor(name, version, draw)
            case "distance":
                moved = (self.distance_per_version or 0.0) * float(lag**self.distance_power)
                return moved * self._factor(name, version, draw)
            case "disagreement":
                share = 1.0 - exp(-(self.disagreement_rate or 0.0) * lag)
                return min(1.0, share * self._factor(name, version, draw))
            case "feature_cosine":
                return min(1.0, exp(-(self.feature_rate or 0.0) * lag) * self._factor(name, version, draw))
            case "episodes":
                return float(floor((self.episodes_per_s or 0.0) * time_s))
            case "visit_doublings":
                return float(self._doublings(version))
            case "log_det":
                d = self.dimension or 1
                return d * log1p(self.information_per_version * version / d)
            case _:
                return self.information_per_version * version / (self.dimension or 1)

    def _factor(self, name: str, version: int, draw: Draw | None) -> float:
        if not self.spread:
            return 1.0
        if draw is None:
            raise ValueError(f"divergence: a spread of {self.spread:g} needs a draw; spread = 0 would do")
        return 1.0 + self.spread * (2.0 * draw(name, version) - 1.0)

    def _doublings(self, version: int) -> int:
        """Every pair in turn: the first of them have one visit more than the others."""
        pairs = self.pairs or 1
        rounds, more = divmod(floor(self.visits_per_version * version), pairs)
        return more * (rounds + 1).bit_length() + (pairs - more) * rounds.bit_length()


_NEEDED = {
    "kl": "kl_per_version",
    "distance": "distance_per_version",
    "disagreement": "disagreement_rate",
    "feature_cosine": "feature_rate",
    "episodes": "episodes_per_s",
    "visit_doublings": "pairs",
    "log_det": "dimension",
    "min_eigenvalue": "dimension",
}


def _plain(name: str) -> str:
    """A measure's name without the number of its block."""
    head, _, last = name.rpartition("_")
    return head if last.isdigit() else name
