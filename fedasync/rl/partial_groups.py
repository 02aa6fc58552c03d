"""What becomes of a prompt group one of whose answers is lost: a dead server, a failed call, a lost reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedasync.core.bounds import check_integer


@dataclass(frozen=True, slots=True)
class RequireFull:
    """The whole group fails, and its prompt goes back to the queue: n answers, or none.

    Unless the answer was lost by the prompt's own fault that is none of the attempts after which it is given up. At a
    failure rate p of an answer, 1 − (1 − p)^n of the groups are lost: a third at 5 % and n = 8.
    """

    kind: Literal["require_full"] = "require_full"


@dataclass(frozen=True, slots=True)
class AllowShort:
    """The group is delivered with those that are left, if ``least`` are; the baseline of its advantages is theirs."""

    least: int = 2
    kind: Literal["allow_short"] = "allow_short"

    def __post_init__(self) -> None:
        check_integer("allow_short: least", self.least, 1)


@dataclass(frozen=True, slots=True)
class Refill:
    """The answer alone is generated again, from its prompt."""

    kind: Literal["refill"] = "refill"


PartialGroups = RequireFull | AllowShort | Refill
