"""What a publication measures in a simulated run: on the model that learns, or by a model of divergence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedasync.core import Coordinator, Strategy
from fedasync.publication.modelled import ModelledDivergence
from fedasync.streams import Stream

if TYPE_CHECKING:
    from fedasync.federated.arrays import Arrays


def measuring(
    strategy: Strategy, divergence: ModelledDivergence | None, seed: int, arrays: Arrays | None = None
) -> Callable[[Coordinator, float], dict[str, float]] | None:
    """A function that takes the measures which a coordinator asks for; None for a publication that never measures.

    To be called with the time when the new model is there, before it is committed. Raises WorkloadError where the
    workload does.
    """
    if not strategy.publication.measures:
        return None

    def draw(measure: str, version: int) -> float:
        return Stream(seed, f"divergence {measure}").uniform(version)

    def measured(coordinator: Coordinator, now: float) -> dict[str, float]:
        asked, version = coordinator.asks, coordinator.version + 1
        if not asked:
            return {}
        if arrays is not None:
            return arrays.measure(asked, version)
        if divergence is None:
            raise AssertionError("a timing-only run whose publication measures has a model of divergence")
        return divergence.measure(asked, version, coordinator.published, now, draw)

    return measured
