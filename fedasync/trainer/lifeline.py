"""A child process ends when its parent does, however that ended, and whatever the child is doing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

VARIABLE = "FEDASYNC_LIFELINE"
"""Set by a parent that holds the other end of the child's standard input and writes nothing there."""


def end_with_parent(grace_s: float = 2.0) -> None:
    """Watch the standard input, where the parent has asked for it.

    ``grace_s`` after its end the process is killed, with all of its process group where it leads one; until then it may
    end by itself.
    """
    if os.environ.get(VARIABLE):
        threading.Thread(target=_watch, args=(grace_s,), name="lifeline", daemon=True).start()


def _watch(grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    time.sleep(grace_s)
    print("the parent process has gone; so this one ends", file=sys.stderr, flush=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
