"""One study for several threads: two seeds of a workload that is sound, and of one whose client 3 raises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..studies.running import LEARNING, Ended, changed

SOUND_AND_ILL = (
    changed(LEARNING, ("seeds = 1", "seeds = 2"))
    + """
[[axis]]
name = "state"
points = [
  { label = "sound", workload = { kind = "quadratic", clients = 8, dimensions = 99, dtype = "float32" } },
  { label = "ill", workload = { kind = "mine.Broken", clients = 8 } },
]
"""
)


@dataclass(frozen=True)
class Made:
    """The study made by the installed command in two processes: its folder, and how the command ended."""

    folder: Path
    end: Ended
