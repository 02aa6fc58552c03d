"""A rollout worker's loop: decoding steps, and between two of them what the controller wants."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

from fedasync.rl.engine import Engine, Iteration, LoadError
from fedasync.trainer.channels import ChannelError, WeightChannel
from fedasync.trainer.link import EOF, Link, poll
from fedasync.trainer.messages import Message, failed, finished, iterations, requests_of


def serve(
    engine: Engine,
    link: Link,
    channel: WeightChannel,
    *,
    pulse_s: float = 1.0,
    iterations_s: float = 0.5,
    iterations_rows: int = 256,
    load_timeout_s: float = 20.0,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Generate until ``stop``, or until the controller has gone; whether it was told to stop.

    Says ``ready``, then ``finished`` after each decoding step that ended answers, ``pulse`` every ``pulse_s``,
    ``iterations`` when there are ``iterations_rows`` or the first is ``iterations_s`` old, and ``loaded``. Weights that
    cannot be had are told as ``failed`` (not fatal), and the old ones stay; what the engine raises is raised.
    """
    worker = _Worker(engine, link, channel, load_timeout_s, clock)
    link.send(Message("ready", {"version": engine.version}))
    pulse_at_s, rows_at_s = clock(), inf
    rows: list[Iteration] = []
    while True:
        busy = engine.running + engine.waiting > 0
        for _, received in poll([link], 0.0 if busy else max(0.0, min(pulse_at_s, rows_at_s) - clock())):
            if received is EOF or received.kind == "stop":
                return received is not EOF
            worker.obey(received)
        worker.load_when_drained()
        if busy and (answers := engine.step()):
            link.send(finished(answers))
        rows += engine.take_iterations()
        now_s = clock()
        if rows:
            rows_at_s = min(rows_at_s, now_s + iterations_s)
        if len(rows) >= iterations_rows or now_s >= rows_at_s:
            link.send(iterations(rows))
            rows, rows_at_s = [], inf
        if now_s >= pulse_at_s:
            worker.pulse()
            pulse_at_s = now_s + pulse_s


class _Worker:
    """An engine that obeys messages; of the loads that wait for running answers, the newest counts."""

    def __init__(
        self, engine: Engine, link: Link, channel: WeightChannel, load_timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self.engine, self.link, self.channel = engine, link, channel
        self.load_timeout_s, self.clock = load_timeout_s, clock
        self._load: dict[str, Any] | None = None

    def obey(self, message: Message) -> None:
        """Raises ValueError for a message that it does not know."""
        match message.kind:
            case "submit":
                self.engine.submit(requests_of(message))
            case "withdraw":
                self.engine.withdraw(message.header["answers"])
            case "load":
                self._load = message.header
                self.engine.hold(self._load["drain"])
            case kind:
                raise ValueError(f"a rollout worker knows no message {kind!r}")

    def load_when_drained(self) -> None:
        """Do what the newest ``load`` asked for, if its time has come."""
        asked = self._load
        if asked is None or (asked["drain"] and self.engine.running):
            return
        self._load = None
        start_s = self.clock()
        try:
            weights, version = self.channel.get(asked["version"], self.load_timeout_s)
            self.engine.load(weights, version, asked["kv"])
        except (ChannelError, LoadError) as error:
            self.link.send(failed(error, fatal=False, version=asked["version"]))
        else:
            seconds = self.clock() - start_s
            self.link.send(Message("loaded", {"version": version, "asked": asked["version"], "seconds": seconds}))
        self.engine.hold(False)

    def pulse(self) -> None:
        engine = self.engine
        header = {"running": engine.running, "waiting": engine.waiting, "version": engine.version}
        self.link.send(Message("pulse", {**header, "clock_s": self.clock()}))
