"""``fedasync sim`` on fedasync_study.toml with one process: 20 runs, five seeds of four strategies."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from protocol import UPDATES, mark

from fedasync.cli import app

STUDY = Path(__file__).with_suffix(".toml")
RUNS = 20


def sim(*arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(SystemExit):
        status = app(["sim", str(STUDY), "--jobs", "1", "--out", folder, *arguments], standalone_mode=False)
        if status:
            sys.exit(f"the study ended with status {status}")


if __name__ == "__main__":
    sim("--seeds", "1", "--set", "run.updates=100")
    mark("start")
    sim()
    mark("end", updates=RUNS * UPDATES)
