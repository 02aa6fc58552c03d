"""A population of clients as arrays: who is how fast, how well connected, how reliable."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from fedasync.core.bounds import check_choice, check_integer
from fedasync.simulation.availability import Always, Availability, Presence
from fedasync.simulation.laws import Constant, Law, Values
from fedasync.simulation.streams import Stream

WhenOffline = Literal["lose", "pause"]


@dataclass(frozen=True)
class Population:
    """What is known of the clients before a run.

    The work of a lease takes ``slowness × (duration_s + seconds_per_sample × samples)`` plus the model's bytes over the
    client's downlink and uplink. ``duration_s`` is drawn for every lease; all other laws once for each client.
    ``samples`` counts only in a timing-only run: a workload brings its own.

    A lease is given up with ``dropout_probability`` at a uniform moment of its work, and the server hears of it; with
    ``crash_probability`` it falls silent, and only a lease time-out gives the slot back. A client that goes offline
    loses its work, or pauses until it is back.
    """

    clients: int | None = None
    duration_s: Law | None = None
    seconds_per_sample: Law | None = None
    slowness: Law = Constant(1.0)
    samples: Law = Constant(1.0)
    downlink_bytes_per_second: Law | None = None
    uplink_bytes_per_second: Law | None = None
    model_bytes: int | None = None
    availability: Availability = Always()
    when_offline: WhenOffline = "lose"
    dropout_probability: float = 0.0
    crash_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.clients is not None:
            check_integer("clients", self.clients, 1)
        check_choice("when_offline", self.when_offline, WhenOffline)
        if self.duration_s is None and self.seconds_per_sample is None:
            raise ValueError("clients take no time: give duration_s, seconds_per_sample, or both")
        for name in ("dropout_probability", "crash_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.dropout_probability + self.crash_probability > 1:
            raise ValueError("dropout_probability + crash_probability must be ≤ 1")
        if self.model_bytes is not None:
            check_integer("model_bytes", self.model_bytes, 0)

    @property
    def has_network(self) -> bool:
        return self.downlink_bytes_per_second is not None or self.uplink_bytes_per_second is not None


class Fate(NamedTuple):
    """What becomes of a lease: when the client is done with it, and the reason if it brings no result."""

    end_s: float
    failure: str | None = None
    silent: bool = False
    """The server is not told."""


class Clients:
    """A population realised for one seed: an array a law, and the fate of every lease.

    Raises ValueError when clients, workload and network do not fit together.
    """

    def __init__(
        self,
        population: Population,
        seed: int,
        samples: Sequence[int] | None = None,
        model_bytes: int | None = None,
    ) -> None:
        self.population = population
        self.count = _count(population, samples)
        self._losses = Stream(seed, "dropout")
        self._moments = Stream(seed, "dropout moment")
        self.samples = self._samples(samples, seed)
        slowness = self._realise(population.slowness, "slowness", seed)
        per_sample = self._realise(population.seconds_per_sample, "seconds_per_sample", seed)
        transfer = self._transfer_s(seed, population.model_bytes if model_bytes is None else model_bytes)
        self.slowness = slowness
        self.fixed_s = array(
            "d", (s * p * n + t for s, p, n, t in zip(slowness, per_sample, self.samples, transfer, strict=True))
        )
        """Seconds of a lease beside its drawn duration: samples and network."""
        self.presence: Presence | None = population.availability.presence(self.count, seed)
        self._duration = population.duration_s or Constant(0.0)
        if isinstance(self._duration, Values) and self._duration.by == "client":
            _one_each("duration_s", self._duration, self.count)
        self._unreliable = population.dropout_probability > 0 or population.crash_probability > 0
        self.work_s = self._work(Stream(seed, "duration_s"))
        """(client, turn, lease number) → seconds that the ``turn``-th lease of a client takes uninterrupted."""

    @property
    def law(self) -> Law | None:
        """The law that every lease's duration is drawn from, whoever works; None when clients have their own."""
        return None if isinstance(self._duration, Values) else self._duration

    @property
    def are_alike(self) -> bool:
        """Every lease's work follows one law, whoever does it."""
        return self.law is not None and len(set(self.slowness)) == len(set(self.fixed_s)) == 1

    def mean_work_s(self, client: int) -> float:
        """E[tᵢ] of a client's leases."""
        law = self._duration
        mean_s = law.values[client] if isinstance(law, Values) and law.by == "client" else law.mean
        return self.slowness[client] * mean_s + self.fixed_s[client]

    @property
    def instant(self) -> list[int]:
        """The clients whose work takes no time at all."""
        if self.law is not None and self.law.mean > 0 and min(self.slowness) > 0:
            return []
        return [client for client in range(self.count) if self.mean_work_s(client) == 0]

    @property
    def is_plain(self) -> bool:
        """Every lease ends with a result, after ``work_s``."""
        return self.presence is None and not self._unreliable

    def fate(self, client: int, turn: int, lease_id: int, now: float) -> Fate:
        """When and how a lease that starts now ends."""
        work_s = self.work_s(client, turn, lease_id)
        failure = None
        if self._unreliable:
            u = self._losses.uniform(client, turn)
            if u < self.population.dropout_probability + self.population.crash_probability:
                failure = "dropout" if u < self.population.dropout_probability else "crash"
                work_s *= self._moments.uniform(client, turn)
        if self.presence is None:
            return Fate(now + work_s, failure, failure == "crash")
        online, until = self.presence(client, now)
        at = now
        while work_s > until - at or not online:
            if online:
                if self.population.when_offline == "lose":
                    return Fate(until, "offline")
                work_s -= until - at
            if until == inf:
                return Fate(inf, "offline", silent=True)
            at = until
            online, until = self.presence(client, at)
        return Fate(at + work_s, failure, failure == "crash")

    def _work(self, stream: Stream) -> Callable[[int, int, int], float]:
        """As a closure over what it needs, since it is called for every lease."""
        law, slowness, fixed_s = self._duration, self.slowness, self.fixed_s
        if isinstance(law, Values):
            values, by_client = law.values, law.by == "client"

            def listed(client: int, turn: int, lease_id: int) -> float:
                return slowness[client] * values[client if by_client else lease_id % len(values)] + fixed_s[client]

            return listed
        if isinstance(law, Constant):
            return lambda client, turn, lease_id: slowness[client] * law.value + fixed_s[client]
        uniform, quantile = stream.uniforms(self.count), law.quantile
        if self.population.slowness == Constant(1.0) and not any(fixed_s):
            return lambda client, turn, _: quantile(uniform(client, turn))
        return lambda client, turn, _: slowness[client] * quantile(uniform(client, turn)) + fixed_s[client]

    def _samples(self, samples: Sequence[int] | None, seed: int) -> Sequence[float]:
        if samples is None:
            return self._realise(self.population.samples, "samples", seed)
        for client, n in enumerate(samples):
            if n < 1:
                raise ValueError(f"client {client} has {n} training samples; every client needs at least 1")
        return samples

    def _realise(self, law: Law | None, name: str, seed: int) -> array[float]:
        """One number for each client."""
        if law is None:
            return array("d", bytes(8 * self.count))
        if isinstance(law, Constant):
            return array("d", [law.value]) * self.count
        if isinstance(law, Values):
            if law.by != "client":
                raise ValueError(f"{name} is drawn once for each client: by = 'lease' has no meaning here")
            _one_each(name, law, self.count)
            return array("d", law.values)
        stream = Stream(seed, name)
        return array("d", (law.quantile(stream.uniform(client)) for client in range(self.count)))

    def _transfer_s(self, seed: int, model_bytes: int | None) -> Sequence[float]:
        if not self.population.has_network:
            return array("d", bytes(8 * self.count))
        if model_bytes is None:
            raise ValueError(
                "a network needs model_bytes: the size of the model that travels (a timing-only run has none)"
            )
        total = array("d", bytes(8 * self.count))
        for name in ("downlink_bytes_per_second", "uplink_bytes_per_second"):
            law = getattr(self.population, name)
            if law is None:
                continue
            for client, rate in enumerate(self._realise(law, name, seed)):
                if rate <= 0:
                    raise ValueError(f"{name}: client {client} has {rate:g}; every client needs more than 0")
                total[client] += model_bytes / rate
        return total


def _one_each(name: str, law: Values, clients: int) -> None:
    if len(law.values) != clients:
        raise ValueError(f"{name}: {len(law.values)} values for {clients} clients; one for each client would do")


def _count(population: Population, samples: Sequence[int] | None) -> int:
    if samples is None:
        if population.clients is None:
            raise ValueError("population: clients is missing; an integer ≥ 1 would do (a workload would bring it)")
        return population.clients
    if population.clients not in (None, len(samples)):
        raise ValueError(f"population.clients = {population.clients}, but the workload has {len(samples)} clients")
    return len(samples)
