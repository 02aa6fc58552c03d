"""A world before any run: how long leases take, who holds how much data, who is online, how fast the links are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from fedasync.simulation.closed_forms import expected_order_statistic
from fedasync.simulation.population import Clients, Direction, Population

EVERYBODY = "all clients"
MOST_LEASES, MOST_CLIENTS, MOST_POINTS, MOMENTS = 4000, 1000, 1500, 193
"""What is looked at of each tier and seed: leases; clients for the share online; points of a scatter; and when."""

LONGEST_S = 1e100
SHOWN_TURNS = 1_000
"""How often clients come and go in what is shown, at most."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tier:
    """What was seen of one class of clients, over all seeds."""

    name: str
    clients: int
    share: float
    durations_s: Floats
    """Of single leases, in order, with the server's link to themselves."""
    downlink: Floats | None
    """Bytes a second, in order; None for no limit of the clients' own."""
    uplink: Floats | None
    online: Floats
    """Share online at each of the ``moments_s``, in the first seed."""


@dataclass(frozen=True)
class World:
    """A population realised for some seeds, as far as it is drawn."""

    title: str
    seeds: tuple[int, ...]
    tiers: tuple[Tier, ...]
    moments_s: Floats
    regions: Floats
    """[regions, moments]: share online of each region, in the first seed; no rows without outages."""
    pace: tuple[Floats, Floats, NDArray[np.int64]]
    """Of the first seed's clients: samples, seconds for the mean number of samples, tier."""
    links: Mapping[Direction, float]
    """The server's own link (bytes/s) where it is shared."""
    ceilings: Mapping[int, float]
    """n → E[max of n]/E[t] of n leases of random clients."""

    @property
    def is_always_online(self) -> bool:
        return all(bool((tier.online == 1).all()) for tier in self.tiers)


def look(title: str, by_seed: Mapping[int, Clients], horizon_s: float) -> World:
    """Draw from realised populations what the figures show; ``horizon_s`` is how long clients come and go."""
    first = next(iter(by_seed.values()))
    moments_s = np.linspace(0.0, horizon_s, MOMENTS)
    all_names = [tier.name for tier in first.population.classes] or [EVERYBODY]
    everybody = {seed: _members(clients, len(all_names)) for seed, clients in by_seed.items()}
    # A small share of few clients may be none.
    places = [place for place in range(len(all_names)) if len(next(iter(everybody.values()))[place])]
    names = [all_names[place] for place in places]
    members = {seed: [own[place] for place in places] for seed, own in everybody.items()}
    online, of_region = _online(first, members[next(iter(by_seed))], moments_s)
    tiers = []
    for place, name in enumerate(names):
        own = {seed: members[seed][place] for seed in by_seed}
        down, up = (_rates(by_seed, own, direction) for direction in get_args(Direction))
        durations = [_durations(clients, own[seed]) for seed, clients in by_seed.items()]
        for clients, drawn in zip(by_seed.values(), durations, strict=True):
            _check_lengths(clients, drawn)
        count = len(next(iter(own.values())))
        tiers.append(
            Tier(name, count, count / first.count, np.sort(np.concatenate(durations)), down, up, online[place])
        )
    population = first.population
    links: dict[Direction, float] = {}
    if population.server_downlink_bytes_per_second is not None:
        links["downlink"] = population.server_downlink_bytes_per_second
    if population.server_uplink_bytes_per_second is not None:
        links["uplink"] = population.server_uplink_bytes_per_second
    tier_of = np.empty(first.count, np.int64)
    for place, own_clients in enumerate(next(iter(members.values()))):
        tier_of[own_clients] = place
    typical_s = np.broadcast_to(first.typical_s(), (first.count,))
    return World(
        title,
        tuple(by_seed),
        tuple(tiers),
        moments_s,
        of_region,
        (np.asarray(first.samples, np.float64), typical_s, tier_of),
        links,
        {n: _ceiling(first, tiers, n) for n in (10, 100)},
    )


def _check_lengths(clients: Clients, durations_s: Floats) -> None:
    longest_s = float(durations_s.max())
    if not longest_s < LONGEST_S:
        parts = clients.largest()
        key = max(parts, key=parts.__getitem__)
        raise ValueError(
            f"{key}: a lease of {longest_s:.3g} s was drawn ({key} is up to {parts[key]:.3g}); less than "
            f"{LONGEST_S:g} s can be shown"
        )


def _members(clients: Clients, tiers: int) -> list[NDArray[np.int64]]:
    if clients.tier_of is None:
        return [np.arange(clients.count)]
    tier_of = np.asarray(clients.tier_of)
    return [np.flatnonzero(tier_of == place) for place in range(tiers)]


def some(of: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Evenly spaced ones, all of them when there are few."""
    return of if len(of) <= most else of[np.linspace(0, len(of) - 1, most).astype(np.int64)]


def _rates(by_seed: Mapping[int, Clients], own: Mapping[int, NDArray[np.int64]], name: Direction) -> Floats | None:
    """Bandwidths of a tier's clients in order, infinite where only some have no limit; None where none has one."""
    found = []
    for seed, clients in by_seed.items():
        rates = clients.bandwidth(name)
        if rates is not None:
            found.append(np.asarray(rates)[own[seed]])
    known = np.sort(np.concatenate(found)) if found else np.empty(0)
    return known if len(known) and np.isfinite(known).any() else None


def _durations(clients: Clients, members: NDArray[np.int64]) -> Floats:
    chosen = some(members, MOST_LEASES)
    turns = max(1, -(-MOST_LEASES // max(1, len(chosen))))
    found = [
        clients.work_s(client, turn, turn * len(chosen) + place) + clients.alone_s(client)
        for turn in range(turns)
        for place, client in enumerate(chosen.tolist())
    ]
    return np.array(found)


def _online(clients: Clients, members: Sequence[NDArray[np.int64]], moments_s: Floats) -> tuple[list[Floats], Floats]:
    """The share online at each moment of each tier, and of each region."""
    if clients.presence is None:
        return [np.ones(len(moments_s)) for _ in members], np.empty((0, len(moments_s)))
    seen: dict[int, Floats] = {}

    def states(client: int) -> Floats:
        if client not in seen:
            assert clients.presence is not None
            seen[client] = np.array([clients.presence(client, float(t))[0] for t in moments_s], np.float64)
        return seen[client]

    tiers = [np.mean([states(client) for client in some(own, MOST_CLIENTS).tolist()], axis=0) for own in members]
    if clients.region_of is None:
        return tiers, np.empty((0, len(moments_s)))
    region_of = np.asarray(clients.region_of)
    regions = [np.flatnonzero(region_of == region) for region in range(int(region_of.max()) + 1)]
    chosen = [some(own, MOST_CLIENTS // len(regions) + 1).tolist() for own in regions if len(own)]
    return tiers, np.array([np.mean([states(client) for client in own], axis=0) for own in chosen])


def _ceiling(clients: Clients, tiers: Sequence[Tier], n: int) -> float:
    """E[max of n]/E[t]: from the one law that all leases follow, or else from the leases that were drawn."""
    if clients.are_alike and clients.law is not None:
        mean_s = clients.mean_work_s(0)
        largest_s = clients.slowness[0] * expected_order_statistic(clients.law, n, n) + clients.fixed_s[0]
        return largest_s / mean_s if mean_s else 1.0
    values = np.concatenate([tier.durations_s for tier in tiers])
    weights = np.concatenate(
        [np.full(len(tier.durations_s), tier.share / max(1, len(tier.durations_s))) for tier in tiers]
    )
    order = np.argsort(values, kind="stable")
    below = np.minimum(1.0, np.concatenate([[0.0], np.cumsum(weights[order])]))
    mean = float((values * weights).sum())
    return float((values[order] * np.diff(below**n)).sum()) / mean if mean else 1.0


def times(ratio: float) -> str:
    """A ratio at three significant digits: ``2.00×``."""
    return f"{ratio:#.3g}".removesuffix(".") + "×"


def horizon_s(run_s: float | None, population: Population | None = None) -> float:
    """How long to watch clients come and go: as long as the run, or two days; ``SHOWN_TURNS`` turns at most."""
    wanted_s = 2 * 86400.0 if run_s is None else run_s
    if population is None:
        return wanted_s
    turns_s = [law.turn_s(wanted_s) for law in (population.availability, population.outages) if law is not None]
    return min([wanted_s, *(SHOWN_TURNS * turn_s for turn_s in turns_s)])
