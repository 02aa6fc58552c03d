"""Conservation of staleness, in whole numbers, for any durations.

With n leases always in flight and T versions, the staleness of all that arrived plus the ages of the n in flight is
T·(n − 1) when a slot is given out again after the server step, and T·n when before: every version ages every lease in
flight by one. FedFa makes a version an arrival once its window is full, and counts as K = 1 with T its versions.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedasync.core import KINDS, Concurrency, Sliding, Strategy, Tumbling
from fedasync.simulation.federated import FederatedSimulation
from fedasync.simulation.laws import Constant, Law
from fedasync.simulation.population import Population
from fedasync.strategies import fedasync, fedbuff, fedfa

from .worlds import LAW_NAMES, column, play, timing, total_staleness

quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
Redispatch = Literal["after_step", "before_step"]


def strategies(n: int, k: int, redispatch: Redispatch) -> list[Strategy]:
    return [
        fedasync(concurrency=n, redispatch=redispatch),
        fedbuff(concurrency=n, buffer_size=k, redispatch=redispatch),
        fedfa(concurrency=n, window=k, redispatch=redispatch),
        fedfa(concurrency=n, window=k, warm_up="average_what_is_there", redispatch=redispatch),
    ]


@pytest.mark.parametrize("redispatch", ["after_step", "before_step"])
@pytest.mark.parametrize("rule", range(4), ids=["fedasync", "fedbuff", "fedfa", "fedfa_from_the_first"])
@quick
@given(
    law=st.sampled_from(LAW_NAMES),
    n=st.integers(1, 12),
    spare=st.integers(0, 4),
    k=st.integers(1, 8),
    end_s=st.floats(0.5, 12),
    selection=st.sampled_from(["random_idle", "same_client"]),
    seed=st.integers(0, 2**32),
)
def test_staleness_is_conserved_exactly(
    laws: dict[str, Law],
    rule: int,
    redispatch: Redispatch,
    law: str,
    n: int,
    spare: int,
    k: int,
    end_s: float,
    selection: str,
    seed: int,
) -> None:
    strategy = strategies(n, k, redispatch)[rule]
    population = Population(n + spare, laws[law])
    simulation = play(strategy, population, seed=seed, time_s=end_s, selection=selection)
    coordinator = simulation.coordinator
    assert coordinator.in_flight == n
    assert total_staleness(simulation) == coordinator.version * (n if redispatch == "before_step" else n - 1)
    arrived = len(column(simulation.log, "lease", "delivered"))
    expected_versions = {0: arrived, 1: arrived // k, 2: max(0, arrived - k + 1), 3: arrived}[rule]
    assert coordinator.version == expected_versions


@pytest.mark.parametrize("law", LAW_NAMES)
@pytest.mark.parametrize(("n", "k"), [(20, 5), (10, 10), (30, 1)])
def test_mean_staleness_tends_to_n_minus_1_over_k_whatever_the_law(
    laws: dict[str, Law], law: str, n: int, k: int
) -> None:
    """The law bounds the distance: what is missing is the ages of n leases."""
    updates = 40 * n
    simulation = play(timing(Concurrency(n), Tumbling(k)), Population(n, laws[law]), updates=updates)
    consumed = column(simulation.log, "staleness", "consumed")
    ages = sum(simulation.coordinator.version - lease.base_version for lease in simulation.coordinator.leases)
    assert consumed.sum() == len(consumed) // k * (n - 1) - ages
    assert consumed.mean() == pytest.approx((n - 1) / k, rel=0.15)


def ties(simulation: FederatedSimulation) -> int:
    """Over the committed steps: arrivals at the same instant before the one that completed the buffer."""
    log = simulation.log
    lost = 0
    at_this_instant: Counter[float] = Counter()
    for time_s, kind in zip(column(log, "time_s"), column(log, "kind"), strict=True):
        if KINDS[kind] == "delivered":
            at_this_instant[time_s] += 1
        elif KINDS[kind] == "committed":
            lost += at_this_instant[time_s] - 1
    return lost


@quick
@given(
    law=st.sampled_from(LAW_NAMES),
    n=st.integers(1, 12),
    buffer=st.sampled_from([Tumbling(1), Tumbling(3), Sliding(3), Sliding(2, "average_what_is_there")]),
    seed=st.integers(0, 2**32),
)
def test_looking_at_simultaneous_arrivals_together_breaks_the_law_by_the_ties_alone(
    laws: dict[str, Law], law: str, n: int, buffer: Tumbling | Sliding, seed: int
) -> None:
    """Slots of a tie that still stand empty at a step do not age: each lacks one from T·(n − 1)."""
    strategy = timing(Concurrency(n, simultaneous="together"), buffer)
    simulation = play(strategy, Population(n, laws[law]), seed=seed, time_s=8.0)
    times = column(simulation.log, "time_s", "delivered")
    missing = simulation.coordinator.version * (n - 1) - total_staleness(simulation)
    assert missing == ties(simulation)
    if len(np.unique(times)) == len(times):
        assert missing == 0


def test_equal_clients_without_a_gate_are_not_fedavg_and_with_one_they_are() -> None:
    """n = K = 10 and equal times: nine of ten restart from the old model unless all arrivals are looked at first."""
    for together, mean in ((False, 0.9), (True, 0.0)):
        admission = Concurrency(10, simultaneous="together" if together else "one_by_one")
        population = Population(10, samples=Constant(1.0), seconds_per_sample=Constant(2.0))
        simulation = play(timing(admission, Tumbling(10)), population, versions=50, selection="same_client")
        tau = column(simulation.log, "staleness", "consumed")[10:]
        assert tau.mean() == mean


@pytest.mark.parametrize("selection", ["random_idle", "same_client"])
def test_one_client_that_restarts_before_the_step_is_always_one_version_late(selection: str) -> None:
    strategy = timing(Concurrency(1, redispatch="before_step"), Tumbling(1))
    simulation = play(strategy, Population(1, Constant(1.0)), updates=20, selection=selection)
    assert list(column(simulation.log, "staleness", "consumed")) == [0] + [1] * 19


def test_zero_durations_give_strictly_sequential_work_without_staleness() -> None:
    simulation = play(timing(Concurrency(1), Tumbling(1)), Population(3, Constant(0.0)), updates=30)
    kinds = [KINDS[kind] for kind in column(simulation.log, "kind")]
    assert kinds[:-1] == ["admitted", "delivered", "consumed", "committed", "published"] * 30
    assert set(column(simulation.log, "staleness", "consumed")) == {0}
