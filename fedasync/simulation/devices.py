"""Classes of devices (tiers), and the dealing of devices to clients who hold more or less data."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sin, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer
from fedasync.simulation.groups import check_shares, counts, dealt, order
from fedasync.simulation.laws import Law, Normal, Values
from fedasync.streams import Stream

LAWS = ("duration_s", "seconds_per_sample", "slowness", "downlink_bytes_per_second", "uplink_bytes_per_second")
"""What a tier may say of its own, in place of the population's."""


@dataclass(frozen=True)
class Tier:
    """A class of devices: its share of the clients, or their number, and its own laws where it has some."""

    name: str
    share: float | None = None
    count: int | None = None
    duration_s: Law | None = None
    seconds_per_sample: Law | None = None
    slowness: Law | None = None
    downlink_bytes_per_second: Law | None = None
    uplink_bytes_per_second: Law | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.count is None):
            raise ValueError(f"tier {self.name!r}: give either share or count")
        if self.count is not None:
            check_integer(f"tier {self.name!r}: count", self.count, 1)
        for name in LAWS:
            if isinstance(getattr(self, name), Values):
                raise ValueError(
                    f"tier {self.name!r}: {name}: a list of values says nothing of who is in the tier; "
                    "any other law, or empirical, would do"
                )


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Raise ValueError for names that repeat, and for shares that are no whole."""
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tiers: two are called {name!r}; different names would do")
    by_share = [tier.share for tier in tiers if tier.share is not None]
    if by_share and len(by_share) < len(tiers):
        raise ValueError("tiers: some have a share and others a count; one or the other for all would do")
    if by_share:
        check_shares("tiers: shares", by_share)


def deal_tiers(tiers: Sequence[Tier], clients: int, seed: int) -> array[int]:
    """The tier of each client, by its place among the tiers. Raises ValueError when counts do not make the clients."""
    if tiers[0].count is None:
        return dealt(counts([tier.share or 0.0 for tier in tiers], clients), Stream(seed, "tier"))
    numbers = [tier.count or 0 for tier in tiers]
    if sum(numbers) != clients:
        raise ValueError(f"tiers: counts add up to {sum(numbers)} for {clients} clients; the same number would do")
    return dealt(numbers, Stream(seed, "tier"))


# -- phones ----------------------------------------------------------------------------------------------------

TierPreset = Literal["flash_femnist", "flash_celeba", "flash_reddit", "flash_shakespeare"]

_PHONES = (("slow phone", 18820), ("middle phone", 16428), ("fast phone", 159))
"""Classes of FLASH (Yang et al., WWW 2021) and the weights that its code gives them for phones it does not know."""

_BATCH_MS: dict[str, tuple[int, tuple[tuple[float, float], ...]]] = {
    "flash_femnist": (10, ((1642, 99.5), (588, 23.9), (179, 2.3))),
    "flash_celeba": (10, ((5392, 982.5), (1355, 54.6), (561, 20.3))),
    "flash_reddit": (10, ((2596, 335.5), (916, 20.6), (527.7, 49.0))),
    "flash_shakespeare": (100, ((28621, 1720.7), (13579, 104.6), (10681, 125.6))),
}
"""Samples a batch, and mean and standard deviation of a batch's training time (ms) as measured on each class."""


def preset(name: TierPreset) -> tuple[Tier, ...]:
    """Three classes of phone with FLASH's measured training times; a client's speed is drawn once (ours)."""
    batch, times = _BATCH_MS[name]
    total = sum(weight for _, weight in _PHONES)
    return tuple(
        Tier(phone, weight / total, seconds_per_sample=Normal(mean / batch / 1e3, sd / batch / 1e3, below="redraw"))
        for (phone, weight), (mean, sd) in zip(_PHONES, times, strict=True)
    )


# -- devices and data ------------------------------------------------------------------------------------------


def correlated(
    time_s: NDArray[np.float64], samples: Sequence[float], correlation: float, seed: int
) -> NDArray[np.int64]:
    """Which device each client gets, so that the rank correlation of its time and its samples is as asked for.

    Devices are made without regard to data and then dealt: a reordering (Iman & Conover 1982), so all that holds of the
    devices together, tiers and marginal laws included, stays exactly as it was. Ranks follow a Gaussian copula: for
    Spearman's ρ its parameter is 2·sin(πρ/6). At ±1 the order of the devices is that of the samples, or its reverse.

    Raises ValueError where all devices or all clients are alike.
    """
    from scipy.special import ndtri

    if time_s.min() == time_s.max():
        raise ValueError(
            "slowness_samples_correlation needs clients of different speed: a law of slowness or seconds_per_sample "
            "that is not constant, tiers, or capacity"
        )
    if min(samples) == max(samples):
        raise ValueError("slowness_samples_correlation needs clients with different numbers of samples")
    count = len(samples)
    ties = order(Stream(seed, "samples tie"), count)
    by_samples = ties[np.argsort(np.asarray(samples, np.float64)[ties], kind="stable")]
    scores = ndtri((np.arange(count) + 0.5) / count)
    wanted = np.empty(count)
    wanted[by_samples] = scores
    r = 2 * sin(pi * correlation / 6)
    r = max(-1.0, min(1.0, r)) if abs(correlation) < 1 else float(correlation)
    if abs(r) < 1:
        own = np.empty(count)
        own[order(Stream(seed, "device"), count)] = scores
        wanted = r * wanted + sqrt(1 - r * r) * own
    else:
        wanted *= r
    device_of = np.empty(count, np.int64)
    device_of[np.argsort(wanted, kind="stable")] = np.argsort(time_s, kind="stable")
    return device_of
