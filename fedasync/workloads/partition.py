"""How the samples of one data set are dealt to clients: every sample to exactly one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer, check_real

MAXIMUM_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Iid:
    """Samples in random order, cut into equal parts: sizes differ by at most one."""

    kind: Literal["iid"] = "iid"

    def split(self, labels: NDArray[Any], clients: int, seed: int) -> list[NDArray[np.int64]]:
        """Indices into ``labels`` [N] for each client, ascending; the same for the same arguments.

        Raises ValueError if a client would be left without samples.
        """
        rng = _generator(labels, clients, seed)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@dataclass(frozen=True, slots=True)
class Dirichlet:
    """Label skew and size skew: each class is shared out in proportions drawn from Dir(``alpha``·1).

    Small ``alpha`` gives clients with few classes and very different sizes, large ``alpha`` tends to ``Iid``. The
    latent-Dirichlet split of Hsu, Qi and Brown (2019), "Measuring the Effects of Non-Identical Data Distribution
    for Federated Visual Classification", in the form of Yurochkin et al. (2019), section 4, and Li et al. (2022),
    "Federated Learning on Non-IID Data Silos", which draws clients' shares of a class (Hsu et al. draw a client's
    class mix and keep sizes equal). The whole split is drawn again until every client has ``minimum_samples``.
    """

    alpha: float
    minimum_samples: int = 1
    kind: Literal["dirichlet"] = "dirichlet"

    def __post_init__(self) -> None:
        check_real("Dirichlet: alpha", self.alpha, 0, above=True)
        check_integer("Dirichlet: minimum_samples", self.minimum_samples, 1)

    def split(self, labels: NDArray[Any], clients: int, seed: int) -> list[NDArray[np.int64]]:
        """Indices into ``labels`` [N] for each client, ascending; the same for the same arguments.

        Raises ValueError if no draw of ``MAXIMUM_DRAWS`` leaves every client with ``minimum_samples``.
        """
        rng = _generator(labels, clients, seed)
        if clients * self.minimum_samples > len(labels):
            raise ValueError(
                f"Dirichlet: {clients} clients with minimum_samples={self.minimum_samples} need"
                f" {clients * self.minimum_samples} samples and there are {len(labels)}:"
                " use fewer clients or a smaller minimum_samples"
            )
        of_class = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        sizes = np.array([len(members) for members in of_class])
        for _ in range(MAXIMUM_DRAWS):
            shares = rng.dirichlet(np.full(clients, float(self.alpha)), size=len(of_class))
            # Rounding the cumulated shares keeps each count within one of its share and the sums exact.
            ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
            ends[:, -1] = sizes
            counts = np.diff(ends, axis=1, prepend=0).sum(axis=0)
            if counts.min() >= self.minimum_samples:
                cut = [np.split(members, end[:-1]) for members, end in zip(of_class, ends, strict=True)]
                return [np.sort(np.concatenate(parts)) for parts in zip(*cut, strict=True)]
        raise ValueError(
            f"Dirichlet: none of {MAXIMUM_DRAWS} draws with alpha={self.alpha} over {clients} clients and"
            f" {len(labels)} samples gave every client minimum_samples={self.minimum_samples}:"
            " use a larger alpha, fewer clients or a smaller minimum_samples"
        )


@dataclass(frozen=True, slots=True)
class LabelShards:
    """Samples sorted by label and cut into equal shards, ``shards_per_client`` random ones for each client.

    The "pathological non-IID" split of McMahan et al. (2017), "Communication-Efficient Learning of Deep Networks
    from Decentralized Data", section 3 (there 200 shards, two a client).
    """

    shards_per_client: int = 2
    kind: Literal["label_shards"] = "label_shards"

    def __post_init__(self) -> None:
        check_integer("LabelShards: shards_per_client", self.shards_per_client, 1)

    def split(self, labels: NDArray[Any], clients: int, seed: int) -> list[NDArray[np.int64]]:
        """Indices into ``labels`` [N] for each client, ascending; the same for the same arguments.

        Raises ValueError if there are more shards than samples.
        """
        rng = _generator(labels, clients, seed)
        count = clients * self.shards_per_client
        if count > len(labels):
            raise ValueError(
                f"LabelShards: {clients} clients with shards_per_client={self.shards_per_client} need {count}"
                f" shards and there are {len(labels)} samples: use fewer clients or fewer shards_per_client"
            )
        shuffled = rng.permutation(len(labels))
        shards = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], count)
        hands = rng.permutation(count).reshape(clients, self.shards_per_client)
        return [np.sort(np.concatenate([shards[i] for i in hand])) for hand in hands]


Partition: TypeAlias = Iid | Dirichlet | LabelShards


def _generator(labels: NDArray[Any], clients: int, seed: int) -> np.random.Generator:
    """The stream of a split, after the checks that every partition shares."""
    check_integer("clients", clients, 1)
    check_integer("seed", seed, 0)
    if labels.ndim != 1:
        raise ValueError(f"labels must have shape [N], got {list(labels.shape)}")
    if clients > len(labels):
        raise ValueError(
            f"clients must be at most the number of samples, {len(labels)}, or some have no data; got {clients}"
        )
    # A stream of its own: other parts of a run may draw from the same seed.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(b"partition")))
