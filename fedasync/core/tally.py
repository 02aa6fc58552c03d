"""What some strategies want counted of the leases in flight: samples that have not ended, and base versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fedasync.core.admission import StalenessBudget
from fedasync.core.events import Lease
from fedasync.core.strategy import Strategy


class Tally:
    """Counts over the leases in flight, kept beside the ledger by a coordinator whose strategy asks for them.

    ``samples`` is how many a lease has at most; None where admission does not count them.
    """

    def __init__(self, samples: int | None) -> None:
        self.samples_in_flight = 0
        self.bases: Counter[int] = Counter()
        """How many leases started from a version."""
        self._most = samples
        self._left: dict[int, int] = {}
        """Samples of a lease that have not ended."""

    def checked(self, samples: int | None) -> int:
        """Samples of a new lease: None are as many as the admission says. Raises ValueError for more, or for none."""
        if self._most is None or samples is None:
            return self._most or 0
        if not 1 <= samples <= self._most:
            raise ValueError(
                f"a lease of {samples} samples, of which the admission gives it {self._most}; 1 to that many would do"
            )
        return samples

    def admitted(self, lease: Lease, samples: int) -> None:
        if self._most is not None:
            self._left[lease.id] = samples
            self.samples_in_flight += samples
        self.bases[lease.base_version] += 1

    def ended(self, lease: Lease) -> None:
        self.samples_in_flight -= self._left.pop(lease.id, 0)
        self.bases[lease.base_version] -= 1
        if not self.bases[lease.base_version]:
            del self.bases[lease.base_version]

    def sample_done(self, lease_id: int) -> None:
        """One sample fewer of a lease in flight. Raises ValueError when all of its samples have ended before."""
        if self._most is None:
            return
        if not self._left[lease_id]:
            raise ValueError(f"lease {lease_id}: all of its samples have ended before")
        self._left[lease_id] -= 1
        self.samples_in_flight -= 1

    def state(self) -> list[list[int]]:
        """Plain data, for a snapshot: lease and samples that have not ended."""
        return [[lease_id, left] for lease_id, left in self._left.items()]

    def load(self, leases: Iterable[Lease], left: Iterable[tuple[int, int]]) -> None:
        """Count the leases of a snapshot, and the samples that ``state`` wrote."""
        samples = dict(left)
        for lease in leases:
            self.admitted(lease, samples.get(lease.id, 0))


def tally_of(strategy: Strategy) -> Tally | None:
    """A tally where the strategy needs one: admission by samples, or a bound that steps wait for."""
    admission = strategy.admission
    if isinstance(admission, StalenessBudget) and admission.limit_samples is not None:
        return Tally(admission.samples)
    return Tally(None) if strategy.at_bound == "wait" else None
