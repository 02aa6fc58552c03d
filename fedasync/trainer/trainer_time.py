"""What the trainer of a real run spends its time on, booked as it says what it has done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedasync.core import Step
from fedasync.runs.step_times import StepTimes


class TrainerTime:
    """Seconds of each step (``steps``) by what they were spent on, a part of `fedasync.runs.step_times.PARTS`.

    A trainer that is at nothing else waits: whatever ends says how long it took, and what was before is waiting.
    """

    def __init__(self) -> None:
        self.steps = StepTimes()
        self._booked_s = 0.0
        """Everything before is booked."""

    def spent(self, what: str, seconds: float, now: float) -> None:
        """The trainer was at this for so long, until now."""
        self.steps.spent(what, now - self._began(seconds, now))
        self._booked_s = now

    def trained(self, step: Step, train_s: float, measure_s: float, tokens: float, now: float) -> None:
        """It has made a step, and then measured what a publication asks."""
        measure_s = min(measure_s, now - self._booked_s)
        trained_s = now - measure_s
        self.steps.begin(step, trained_s - self._began(train_s, trained_s), tokens)
        self._booked_s = trained_s
        self.spent("measuring", measure_s, now)

    def died(self, at_s: float, now: float) -> None:
        """What came after the checkpoint was lost when it died, and nobody was there until now."""
        self.steps.spent("lost", at_s - self._booked_s)
        self.steps.spent("down", now - at_s)
        self._booked_s = now

    def begins(self, now: float) -> None:
        """The run begins, or goes on, now."""
        self._booked_s = now

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint just after a commit."""
        return {"steps": self.steps.state(), "booked_s": self._booked_s}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.steps.load(state["steps"])
        self._booked_s = state["booked_s"]

    def _began(self, seconds: float, now: float) -> float:
        """When that which has taken so long until now began; it waited until then."""
        began_s = max(self._booked_s, now - seconds)
        self.steps.spent("waiting", began_s - self._booked_s)
        return began_s
