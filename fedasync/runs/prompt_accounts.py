"""What became of every prompt: trained, on its way, dropped, or never issued; and which are never trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core.log import ADMITTED, CONSUMED, DELIVERED
from fedasync.runs.lease_arrays import Leases
from fedasync.runs.staleness_kinds import trained_rows
from fedasync.runs.verdicts import Verdict

FIRST = 10
"""Starved prompts that are named."""

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class PromptAccounts:
    """A log by prompt: arrays ``[issued prompts]``, in the order of their numbers.

    place: ``CONSUMED`` where any of its groups was trained; else the place of its last group (`Leases.place`).
    last: its last lease. attempts: its leases. kept: those that were not lost. issued_s: when it first was.
    """

    leases: Leases
    prompt: NDArray[np.int64]
    place: NDArray[np.int8]
    last: NDArray[np.int64]
    attempts: NDArray[np.int64]
    kept: NDArray[np.int64]
    issued_s: NDArray[np.float64]
    again: NDArray[np.bool_]
    """``[leases]``: its prompt's lease before this one was lost, so that it was issued once more."""

    @classmethod
    def of(cls, leases: Leases) -> PromptAccounts:
        """The accounts of a log."""
        prompt, first, at, attempts = np.unique(
            leases.worker, return_index=True, return_inverse=True, return_counts=True
        )
        order = np.argsort(at, kind="stable")
        ends = np.cumsum(attempts)
        last = order[ends - 1] if len(order) else np.zeros(0, np.int64)
        same = at[order][1:] == at[order][:-1]
        again = np.zeros(len(leases), np.bool_)
        again[order[1:]] = same & leases.lost[order[:-1]]
        trained = np.bincount(at, leases.consumed, len(prompt)) > 0
        return cls(
            leases,
            prompt,
            np.where(trained, np.int8(CONSUMED), leases.place[last]).astype(np.int8),
            last,
            attempts,
            np.bincount(at, ~leases.lost, len(prompt)).astype(np.int64),
            leases.admitted_s[first],
            again,
        )

    def conservation(self, prompts: int | None = None) -> dict[str, Any]:
        """``prompts`` and ``groups`` by place: ``in flight``, ``buffered``, ``trained``, ``dropped`` by reason.

        ``prompts`` is the size of the data set; with it, ``unissued`` are those that never were given out.
        """
        unissued = {} if prompts is None else {"unissued": prompts - len(self.prompt)}
        return {
            "prompts": {**unissued, **self._places(self.place, self.last)},
            "groups": self._places(self.leases.place, np.arange(len(self.leases))),
        }

    def _places(self, place: NDArray[np.int8], lease: NDArray[np.int64]) -> dict[str, Any]:
        lost = lease[np.isin(place, (ADMITTED, DELIVERED, CONSUMED), invert=True)]
        dropped = Counter(self.leases.why_lost(int(each)) for each in lost)
        return {
            "in flight": int(np.count_nonzero(place == ADMITTED)),
            "buffered": int(np.count_nonzero(place == DELIVERED)),
            "trained": int(np.count_nonzero(place == CONSUMED)),
            "dropped": dict(sorted(dropped.items())),
        }

    def starvation(self, end_s: float) -> dict[str, Any]:
        """Prompts that were issued, never trained, and are not on their way at the end (``end_s``).

        How many (``prompts``), the `FIRST` that were issued, the ``longest_s`` since such a first issue, and the
        ``most_attempts`` that such a prompt had.
        """
        there = np.flatnonzero(np.isin(self.place, (ADMITTED, DELIVERED, CONSUMED), invert=True))
        there = there[np.argsort(self.issued_s[there], kind="stable")]
        return {
            "prompts": len(there),
            "longest_s": float(end_s - self.issued_s[there[0]]) if len(there) else None,
            "most_attempts": int(self.attempts[there].max()) if len(there) else None,
            "first": [
                {
                    "prompt": int(self.prompt[at]),
                    "since_s": float(end_s - self.issued_s[at]),
                    "attempts": int(self.attempts[at]),
                    "reason": self.leases.why_lost(int(self.last[at])),
                }
                for at in there[:FIRST]
            ],
        }

    def reissues(self) -> dict[str, int]:
        """Groups issued because their prompt's group before was lost, of how many prompts, and the most of one."""
        own = np.bincount(np.searchsorted(self.prompt, self.leases.worker[self.again]), minlength=len(self.prompt))
        return {
            "groups": int(np.count_nonzero(self.again)),
            "prompts": int(np.count_nonzero(own)),
            "most": int(own.max(initial=0)),
        }

    def verdict(self, prompts: int | None = None, epochs: int | None = None) -> Verdict:
        """Every prompt of the data set is in one place, and none was kept more often than there are epochs."""
        told = self.conservation(prompts)
        places = told["prompts"]
        dropped = sum(places["dropped"].values())
        parts = {name: count for name, count in places.items() if name != "dropped"} | {"dropped": dropped}
        whole = len(self.prompt) if prompts is None else prompts
        strangers = 0 if prompts is None else int(np.count_nonzero((self.prompt < 0) | (self.prompt >= prompts)))
        twice = 0 if epochs is None else int(np.count_nonzero(self.kept > epochs))
        groups = sum(count for name, count in told["groups"].items() if name != "dropped")
        groups += sum(told["groups"]["dropped"].values())
        holds = (
            strangers == twice == 0
            and min(parts.values()) >= 0
            and sum(parts.values()) == whole
            and groups == len(self.leases)
        )
        words = [f"{whole} prompts = {' + '.join(f'{n} {name}' for name, n in parts.items() if n) or 0}"]
        words += [f"{strangers} that the data set does not have"] if strangers else []
        words += [f"{twice} used more often than in {epochs} epochs"] if twice else []
        return Verdict("conservation of prompts", bool(holds), "; ".join(words))


def rollout_verdict(leases: Leases, columns: Columns, end_s: float) -> Verdict:
    """The table of rollouts tells of the log's leases: their prompts, bases, times and versions, and leaves none out.

    columns: ``lease, prompt, base_version, first_version, last_version, start_s, end_s`` of the table.
    """
    lease = columns["lease"]
    known = (lease >= 0) & (lease < len(leases))
    at = np.where(known, lease, 0)
    odd = ~known
    if len(leases):
        ends, trained = columns["end_s"], trained_rows(leases, at, columns["end_s"])
        odd |= (columns["prompt"] != leases.worker[at]) | (columns["base_version"] != leases.base_version[at])
        odd |= (columns["start_s"] < leases.admitted_s[at]) | (ends > end_s) | (ends < columns["start_s"])
        odd |= columns["first_version"] > columns["last_version"]
        odd |= trained & (columns["last_version"] > leases.used_version[at])
    else:
        trained = np.zeros(len(lease), np.bool_)
    with_answers = np.bincount(at[trained & known], minlength=len(leases)) > 0
    without = int(np.count_nonzero(leases.consumed & ~with_answers))
    wrong = int(np.count_nonzero(odd))
    words = [f"{len(lease)} answers of {len(leases)} groups"]
    words += [f"{wrong} that contradict the log"] if wrong else []
    words += [f"{without} trained groups without an answer that ended"] if without else []
    return Verdict("rollouts agree with the log", wrong == without == 0, ", ".join(words))
