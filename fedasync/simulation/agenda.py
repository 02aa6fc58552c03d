"""Calls at moments of virtual time, on SimPy's agenda."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter

import simpy


def call_at(env: simpy.Environment, time_s: float, call: Callable[[simpy.Event], None]) -> simpy.Event:
    """Call at the given time or, where the sum of two floats misses it, at the next number after it."""
    now = env.now
    delay = time_s - now
    while now + delay < time_s:
        delay = nextafter(delay, inf)
    event = env.timeout(delay)
    event.callbacks.append(call)
    return event
