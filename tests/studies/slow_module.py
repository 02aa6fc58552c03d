"""A user's module that takes long: to be imported, or at work in a process that makes runs.

Which processes are slow is said by files in the working directory; each leaves a trace of itself.
"""

import os
import time
from pathlib import Path

from fedasync.core import Strategy
from fedasync.strategies import fedfa

_importers = Path("slow_importers")
if _importers.exists() and _importers.read_text() in (f"{os.getpid()}", f"children of {os.getppid()}"):
    Path(f"importing_{os.getpid()}").touch()
    time.sleep(60)


def mine(*, concurrency: int) -> Strategy:
    if Path("slow").exists() and Path("slow").read_text() != str(os.getpid()):
        Path(f"at_work_{os.getpid()}").touch()
        time.sleep(0.5)
    return fedfa(concurrency=concurrency)
