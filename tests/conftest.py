"""No test is judged by the clock: Hypothesis' deadline is off."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
