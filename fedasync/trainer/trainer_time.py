"""What the trainer of a real run spends its time on, booked as it says what it has done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedasync.core import Step
from fedasync.runs.step_times import StepTimes

PARTS = {
    "waiting": "wait_s",
    "syncing": "sync_s",
    "evaluating": "evaluate_s",
    "saving": "save_s",
    "down": "down_s",
    "lost": "lost_s",
}
"""What a step's time is spent on besides ``train_s``, and the metrics that say how long; they add up to ``step_s``."""


class TrainerTime:
    """Seconds by what they were spent on, of the run (``spent_s``) and of each step (``steps``).

    A trainer that is at nothing else waits: whatever ends says how long it took, and what was before is waiting.
    """

    def __init__(self) -> None:
        self.steps = StepTimes(PARTS)
        self.spent_s = dict.fromkeys(("training", *PARTS), 0.0)
        self._booked_s = 0.0
        """Everything before is booked."""

    def spent(self, what: str, seconds: float, now: float) -> None:
        """The trainer was at this for so long, until now."""
        began_s = max(self._booked_s, now - seconds)
        self._book("waiting", began_s - self._booked_s)
        self._book(what, now - began_s)
        self._booked_s = now

    def trained(self, step: Step, train_s: float, measure_s: float, tokens: float, now: float) -> None:
        """It has made a step, and then measured what a publication asks."""
        measure_s = min(measure_s, now - self._booked_s)
        train_s = min(train_s, now - measure_s - self._booked_s)
        self.steps.begin(step, train_s, tokens)
        self.spent("training", train_s, now - measure_s)
        self.spent("evaluating", measure_s, now)

    def died(self, at_s: float, now: float) -> None:
        """What came after the checkpoint was lost when it died, and nobody was there until now."""
        self._book("lost", at_s - self._booked_s)
        self._book("down", now - at_s)
        self._booked_s = now

    def begins(self, now: float) -> None:
        """The run begins, or goes on, now."""
        self._booked_s = now

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint just after a commit."""
        return {"steps": self.steps.state(), "spent_s": dict(self.spent_s), "booked_s": self._booked_s}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.steps.load(state["steps"])
        self.spent_s = dict(state["spent_s"])
        self._booked_s = state["booked_s"]

    def _book(self, what: str, seconds: float) -> None:
        self.spent_s[what] += seconds
        if what in PARTS:
            self.steps.spent(what, seconds)
