"""A population of clients as arrays: who is how fast, how well connected, how reliable."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import mul
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.federated.selection import Presence
from fedasync.simulation.availability import Always, Availability, Labels
from fedasync.simulation.devices import LAWS, Tier, TierPreset, check_tiers, correlated, deal_tiers, preset
from fedasync.simulation.groups import uniforms_of
from fedasync.simulation.laws import Constant, Law, Values
from fedasync.simulation.outages import InRegions, Outages
from fedasync.simulation.recorded import Capacity
from fedasync.streams import Stream

WhenOffline = Literal["lose", "pause"]
Direction = Literal["downlink", "uplink"]


@dataclass(frozen=True)
class Population:
    """What is known of the clients before a run.

    The work of a lease takes ``slowness × (duration_s + seconds_per_sample × samples)`` plus the model's bytes over the
    client's downlink and uplink. ``duration_s`` is drawn for every lease; all other laws once for each client.
    ``samples`` counts only in a timing-only run: a workload brings its own.

    ``tiers`` (or a preset of them) are classes of devices with laws of their own in place of the population's;
    ``capacity`` brings recorded speeds and bandwidths instead. ``slowness_samples_correlation`` is Spearman's rank
    correlation, over clients, of the time that a lease takes and the number of samples: 1 gives the slowest device to
    the client with most data.

    ``server_downlink_bytes_per_second`` and ``server_uplink_bytes_per_second`` are the server's own link, shared by
    all transfers under way (see ``network``). Clients of a region go dark together by ``outages``.

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
    tiers: tuple[Tier, ...] = ()
    tier_preset: TierPreset | None = None
    slowness_samples_correlation: float = 0.0
    capacity: Capacity | None = None
    server_downlink_bytes_per_second: float | None = None
    server_uplink_bytes_per_second: float | None = None
    outages: Outages | None = None

    def __post_init__(self) -> None:
        if self.clients is not None:
            check_integer("clients", self.clients, 1)
        check_choice("when_offline", self.when_offline, WhenOffline)
        self._check_devices()
        check_real("slowness_samples_correlation", self.slowness_samples_correlation, -1, 1)
        for name in ("server_downlink_bytes_per_second", "server_uplink_bytes_per_second"):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), 0, above=True)
        for name in ("dropout_probability", "crash_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.dropout_probability + self.crash_probability > 1:
            raise ValueError("dropout_probability + crash_probability must be ≤ 1")
        if self.model_bytes is not None:
            check_integer("model_bytes", self.model_bytes, 0)

    def _check_devices(self) -> None:
        check_tiers(self.tiers)
        if self.tier_preset is not None:
            check_choice("tier_preset", self.tier_preset, TierPreset)
            if self.tiers:
                raise ValueError("give either tiers or tier_preset")
        if self.capacity is not None and (self.tiers or self.tier_preset):
            raise ValueError("capacity says how fast each client is: give either it or tiers")
        if self.capacity is not None and (self.downlink_bytes_per_second or self.uplink_bytes_per_second):
            raise ValueError("capacity brings the bandwidth of each client: give either it or bandwidths")
        idle = [tier.name for tier in self.classes if tier.duration_s is None and tier.seconds_per_sample is None]
        if self.duration_s is None and self.seconds_per_sample is None and self.capacity is None:
            if not self.classes:
                raise ValueError("clients take no time: give duration_s, seconds_per_sample, or both")
            if idle:
                raise ValueError(
                    f"clients of tier {idle[0]!r} take no time: give duration_s, seconds_per_sample, or both"
                )

    @property
    def classes(self) -> tuple[Tier, ...]:
        """The tiers, those of a preset included."""
        return self.tiers if self.tier_preset is None else preset(self.tier_preset)

    @property
    def has_network(self) -> bool:
        """A lease's time depends on the size of the model."""
        names = ("downlink_bytes_per_second", "uplink_bytes_per_second")
        own = any(getattr(each, name) is not None for each in (self, *self.classes) for name in names)
        return own or self.capacity is not None or self.shares_link

    @property
    def shares_link(self) -> bool:
        """Transfers wait for each other at the server."""
        return self.server_downlink_bytes_per_second is not None or self.server_uplink_bytes_per_second is not None


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
        labels: Labels | None = None,
    ) -> None:
        self.population = population
        self.count = _count(population, samples)
        self._seed = seed
        self._losses = Stream(seed, "dropout")
        self._moments = Stream(seed, "dropout moment")
        self.samples = self._samples(samples)
        self.tier_of = deal_tiers(population.classes, self.count, seed) if population.classes else None
        """Each client's place in ``population.classes``; None without tiers."""
        self._durations = self._duration_laws()
        self.slowness, self._per_sample = self._of_tiers("slowness"), self._of_tiers("seconds_per_sample")
        recorded = population.capacity
        self._compute_s = None if recorded is None else recorded.compute_s(self.count)
        self._device_of: Sequence[int] = range(self.count)
        if population.slowness_samples_correlation:
            self._deal_devices()
        self.model_bytes = population.model_bytes if model_bytes is None else model_bytes
        fixed_s = np.asarray(self.slowness) * np.asarray(self._per_sample) * np.asarray(self.samples, np.float64)
        if self._compute_s is not None:
            fixed_s += np.asarray(self.slowness) * np.asarray(self._compute_s)
        down_s, up_s = self._transfers()
        self.transfers_s = (down_s, up_s) if population.shares_link else None
        """Seconds that each client's own link takes to move the model down, and up, where the server's is shared."""
        self._own_transfer_s: array[float] | None = None
        if not population.shares_link and population.has_network:
            own_s = np.asarray(down_s) + np.asarray(up_s)
            self._own_transfer_s = array("d", own_s.tobytes())
            fixed_s += own_s
        self.fixed_s: array[float] = array("d", fixed_s.tobytes())
        """Seconds of a lease beside its drawn duration: samples, recorded computing, and network unless shared."""
        own = population.availability.presence(self.count, seed, labels)
        regional = None if population.outages is None else InRegions(population.outages, own, self.count, seed)
        self.region_of = None if regional is None else regional.region_of
        """Each client's region; None without outages."""
        self.presence: Presence | None = own if regional is None else regional
        self._unreliable = population.dropout_probability > 0 or population.crash_probability > 0
        self.work_s = self._work(Stream(seed, "duration_s"))
        """(client, turn, lease number) → seconds that the ``turn``-th lease of a client takes uninterrupted, without
        transfers where the server's link is shared."""

    @property
    def law(self) -> Law | None:
        """The law that every lease's duration is drawn from, whoever works; None when clients have their own."""
        law = self._durations[0]
        return None if len(self._durations) > 1 or isinstance(law, Values) else law

    @property
    def are_alike(self) -> bool:
        """Every lease's work follows one law, whoever does it, and whatever else is under way."""
        alike = self.law is not None and len(set(self.slowness)) == len(set(self.fixed_s)) == 1
        return alike and not self.population.shares_link

    def duration_law(self, client: int) -> Law:
        """The law of the drawn part of a client's leases."""
        return self._durations[self.tier_of[client] if self.tier_of and len(self._durations) > 1 else 0]

    def mean_work_s(self, client: int) -> float:
        """E[tᵢ] of a client's leases (with the server's link to itself)."""
        law = self.duration_law(client)
        mean_s: float = law.values[client] if isinstance(law, Values) and law.by == "client" else law.mean
        return self.slowness[client] * mean_s + self.fixed_s[client] + self.alone_s(client)

    def alone_s(self, client: int) -> float:
        """Seconds of a lease's transfers where the server's link is shared, when nobody shares it; else 0."""
        if self.transfers_s is None:
            return 0.0
        down, up = self.population.server_downlink_bytes_per_second, self.population.server_uplink_bytes_per_second
        size, (down_s, up_s) = self.model_bytes or 0, self.transfers_s
        return max(down_s[client], size / (down or inf)) + max(up_s[client], size / (up or inf))

    @property
    def instant(self) -> list[int]:
        """The clients whose work takes no time at all."""
        if self.law is not None and self.law.mean > 0 and min(self.slowness) > 0:
            return []
        return [client for client in range(self.count) if self.mean_work_s(client) == 0]

    @property
    def is_plain(self) -> bool:
        """Every lease ends with a result, after ``work_s``."""
        return self.presence is None and not self._unreliable and not self.population.shares_link

    def loss(self, client: int, turn: int) -> tuple[str | None, float]:
        """Why a client's ``turn``-th lease will bring nothing (None: it will), and the part of its work till then."""
        if not self._unreliable:
            return None, 1.0
        u = self._losses.uniform(client, turn)
        if u >= self.population.dropout_probability + self.population.crash_probability:
            return None, 1.0
        failure = "dropout" if u < self.population.dropout_probability else "crash"
        return failure, self._moments.uniform(client, turn)

    def lease_s(self, client: int, turn: int, lease_id: int, share: float) -> float:
        """``work_s`` of a lease that computes only a share of the full local work; transfers are whole all the same."""
        whole_s = self.work_s(client, turn, lease_id)
        if share == 1:
            return whole_s
        transfer_s = 0.0 if self._own_transfer_s is None else self._own_transfer_s[client]
        return transfer_s + share * (whole_s - transfer_s)

    def fate(self, client: int, turn: int, lease_id: int, now: float, share: float = 1.0) -> Fate:
        """When and how a lease that starts now, and computes a share of the full local work, ends."""
        failure, part = self.loss(client, turn)
        work_s = self.lease_s(client, turn, lease_id, share) * part
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
        law, slowness, fixed_s = self._durations[0], self.slowness, self.fixed_s
        if len(self._durations) > 1 and self.tier_of is not None:
            uniform, tier_of = stream.uniforms(self.count), self.tier_of
            quantiles = [each.quantile for each in self._durations]
            return lambda client, turn, _: (
                slowness[client] * quantiles[tier_of[client]](uniform(client, turn)) + fixed_s[client]
            )
        if isinstance(law, Values):
            values, by_client = law.values, law.by == "client"

            def listed(client: int, turn: int, lease_id: int) -> float:
                return slowness[client] * values[client if by_client else lease_id % len(values)] + fixed_s[client]

            return listed
        if isinstance(law, Constant):
            return lambda client, turn, lease_id: slowness[client] * law.value + fixed_s[client]
        uniform, quantile = stream.uniforms(self.count), law.quantile
        plain = self.population.slowness == Constant(1.0) and not any(tier.slowness for tier in self.population.classes)
        if plain and not any(fixed_s):
            return lambda client, turn, _: quantile(uniform(client, turn))
        return lambda client, turn, _: slowness[client] * quantile(uniform(client, turn)) + fixed_s[client]

    def _samples(self, samples: Sequence[int] | None) -> Sequence[float]:
        if samples is None:
            return self._realise(self.population.samples, "samples")
        for client, n in enumerate(samples):
            if n < 1:
                raise ValueError(f"client {client} has {n} training samples; every client needs at least 1")
        return samples

    def _duration_laws(self) -> list[Law]:
        """One law for everybody, or one a tier."""
        shared = self.population.duration_s or Constant(0.0)
        if isinstance(shared, Values) and shared.by == "client":
            _one_each("duration_s", shared, self.count)
        own = [tier.duration_s for tier in self.population.classes]
        if not any(own):
            return [shared]
        if isinstance(shared, Values):
            raise ValueError("duration_s: a list of values for all clients and a tier's own law do not go together")
        return [law or shared for law in own]

    def largest(self) -> dict[str, float]:
        """The largest number that each key gives to the time of a lease: seconds, or slowness as a factor."""
        laws = [max(law.values) if isinstance(law, Values) else law.quantile(1 - 2.0**-53) for law in self._durations]
        size, (down_s, up_s) = self.model_bytes or 0, self._transfers()
        served = ("server_downlink_bytes_per_second", "server_uplink_bytes_per_second")
        return {
            "slowness": max(self.slowness),
            "duration_s": max(laws),
            "seconds_per_sample": max(map(mul, self._per_sample, self.samples)),
            "capacity": max(self._compute_s or [0.0]),
            "downlink_bytes_per_second": max(down_s, default=0.0),
            "uplink_bytes_per_second": max(up_s, default=0.0),
            **{name: size / (getattr(self.population, name) or inf) for name in served},
        }

    def typical_s(self) -> NDArray[np.float64]:
        """Seconds that each client works on a lease of the mean number of samples, without transfers."""
        law = self._durations[0]
        drawn_s = np.array(law.values if isinstance(law, Values) and law.by == "client" else [law.mean])
        if len(self._durations) > 1 and self.tier_of is not None:
            drawn_s = np.array([each.mean for each in self._durations])[np.asarray(self.tier_of)]
        recorded_s = 0.0 if self._compute_s is None else np.asarray(self._compute_s)
        mean_n = sum(self.samples) / self.count
        found: NDArray[np.float64] = np.asarray(self.slowness) * (
            drawn_s + np.asarray(self._per_sample) * mean_n + recorded_s
        )
        return found

    def _deal_devices(self) -> None:
        """Deal the devices anew, so that who has more data is slower, or quicker."""
        population = self.population
        for name in LAWS[:3]:
            if isinstance(law := getattr(population, name), Values) and law.by == "client":
                raise ValueError(f"{name} lists who is how fast: slowness_samples_correlation has no meaning here")
        typical_s = self.typical_s()
        if typical_s.min() == typical_s.max():
            raise ValueError(
                f"slowness_samples_correlation = {population.slowness_samples_correlation:g} needs clients of "
                f"different speed, and all take {typical_s[0]:g} s: a law of slowness or seconds_per_sample that is "
                "not constant, tiers, or capacity would do"
            )
        dealt = correlated(typical_s, self.samples, population.slowness_samples_correlation, self._seed)
        self._device_of = array("q", dealt.tobytes())
        if self.tier_of is not None:
            self.tier_of = array("i", np.asarray(self.tier_of)[dealt].tobytes())
        self.slowness = array("d", np.asarray(self.slowness)[dealt].tobytes())
        self._per_sample = array("d", np.asarray(self._per_sample)[dealt].tobytes())
        if self._compute_s is not None:
            self._compute_s = array("d", np.asarray(self._compute_s)[dealt].tobytes())

    def _of_tiers(self, name: str) -> array[float]:
        """One number for each client, from the law of its tier where that has one."""
        shared: Law | None = getattr(self.population, name)
        own: list[Law | None] = [getattr(tier, name) for tier in self.population.classes]
        if self.tier_of is None or not any(own):
            return self._realise(shared, name)
        if isinstance(shared, Values):
            raise ValueError(f"{name}: a list of values for all clients and a tier's own law do not go together")
        missing = inf if name.endswith("per_second") else 0.0  # no bandwidth given: a transfer takes no time
        quantiles = [None if law is None else law.quantile for law in (each or shared for each in own)]
        found, tiers = array("d"), iter(self.tier_of)
        for uniforms in uniforms_of(Stream(self._seed, name), self.count):
            for u in uniforms:
                quantile = quantiles[next(tiers)]
                found.append(missing if quantile is None else quantile(u))
        return found

    def _realise(self, law: Law | None, name: str) -> array[float]:
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
        found = array("d")
        for uniforms in uniforms_of(Stream(self._seed, name), self.count):
            found.extend(map(law.quantile, uniforms))
        return found

    def bandwidth(self, name: Direction) -> array[float] | None:
        """Bytes a second of each client's own ``downlink`` or ``uplink``; None where it has no limit."""
        if self.population.capacity is not None:
            recorded = self.population.capacity.bytes_per_second(self.count)
            return array("d", (recorded[device] for device in self._device_of))
        field = f"{name}_bytes_per_second"
        if all(getattr(each, field) is None for each in (self.population, *self.population.classes)):
            return None
        rates = self._of_tiers(field)
        for client, rate in enumerate(rates):
            if rate <= 0:
                raise ValueError(f"{field}: client {client} has {rate:g}; every client needs more than 0")
        return rates

    def _transfers(self) -> tuple[array[float], array[float]]:
        """Seconds that each client's own link takes to move the model down, and up."""
        if self.population.has_network and self.model_bytes is None:
            raise ValueError(
                "a network needs model_bytes: the size of the model that travels (a timing-only run has none)"
            )
        size = self.model_bytes or 0
        down, up = (self.bandwidth(name) for name in get_args(Direction))
        nothing = array("d", bytes(8 * self.count if self.population.has_network else 0))
        return (
            nothing if down is None else array("d", (size / rate for rate in down)),
            nothing if up is None else array("d", (size / rate for rate in up)),
        )


def _one_each(name: str, law: Values, clients: int) -> None:
    if len(law.values) != clients:
        raise ValueError(f"{name}: {len(law.values)} values for {clients} clients; one for each client would do")


def _count(population: Population, samples: Sequence[int] | None) -> int:
    if samples is None:
        if population.clients is None and population.capacity is not None:
            return population.capacity.rows
        if population.clients is None and all(tier.count for tier in population.tiers) and population.tiers:
            return sum(tier.count or 0 for tier in population.tiers)
        if population.clients is None:
            raise ValueError("population: clients is missing; an integer ≥ 1 would do (a workload would bring it)")
        return population.clients
    if population.clients not in (None, len(samples)):
        raise ValueError(f"population.clients = {population.clients}, but the workload has {len(samples)} clients")
    return len(samples)
