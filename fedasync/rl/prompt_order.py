"""Which prompt of a data set stands at which place of the whole order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedasync.streams import Draws

Integers = NDArray[np.int64]


class PromptOrder:
    """Prompts 0 … ``count`` − 1 once an epoch, in an order drawn anew for each (``shuffle``) or as numbered, for
    ``epochs`` (None: without end). Without ``count`` every prompt is a new one.
    """

    def __init__(self, count: int | None, epochs: int | None, *, shuffle: bool, seed: int) -> None:
        self.count = count
        self._epochs, self._shuffle = epochs, shuffle
        self._draws = Draws(seed, "prompt order")
        self._shuffled: dict[int, tuple[Integers, Integers]] = {}

    def prompt_at(self, position: int) -> tuple[int, int] | None:
        """The prompt that comes at a place ≥ 0 of the whole order, and its epoch; None when the data are exhausted."""
        if self.count is None:
            return position, 0
        epoch, place = divmod(position, self.count)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return (int(self.shuffled(epoch)[0][place]) if self._shuffle else place), epoch

    def shuffled(self, epoch: int) -> tuple[Integers, Integers]:
        """The prompts of an epoch in order, and the place of each."""
        found = self._shuffled.get(epoch)
        if found is None:
            count = self.count or 0
            order = np.argsort(self._draws.bits(epoch, np.arange(count)), kind="stable")
            places = np.empty(count, np.int64)
            places[order] = np.arange(count)
            found = self._shuffled[epoch] = (order, places)
            if len(self._shuffled) > 3:
                del self._shuffled[next(iter(self._shuffled))]
        return found
