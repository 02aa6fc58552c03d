"""A small cluster on which much goes wrong, the systems that run on it, and what holds of every run of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

from fedasync.core import EventLog, Strategy
from fedasync.core.log import CONSUMED
from fedasync.core.publication import InFlight
from fedasync.simulation.cluster import Cluster, ClusterSettings, Faults, Prompts
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Lognormal
from fedasync.strategies.rollouts import areal, nemo_rl, one_step_overlap, prime_rl, synchronous_rl, trl, verl

from .ideal import cluster, prompts

BATCH, VERSIONS = 4, 6
MOST_EVENTS = 100_000
END_S = 1e6
"""Nobody waits that long: a run that gets there would go on for ever."""
WAYS = get_args(InFlight)
SYSTEMS: dict[str, Strategy] = {
    "synchronous_rl": synchronous_rl(batch=BATCH),
    "one_step_overlap": one_step_overlap(batch=BATCH),
    "areal": areal(batch=BATCH, eta=2),
    "areal that waits": areal(batch=BATCH, eta=2, max_staleness=3, at_bound="wait"),
    "verl": verl(mini_batch=BATCH, trigger_parameter_sync_step=2, staleness_threshold=0.5),
    "prime_rl": prime_rl(batch=BATCH, max_off_policy_steps=2),
    "nemo_rl in order": nemo_rl(batch=BATCH, sampler="in_order", max_trajectory_age_steps=2),
    "trl": trl(batch=BATCH, max_staleness=1, queue=8),
}


def system(name: str, way: InFlight) -> Strategy:
    """With what becomes of work in flight when a version is published."""
    strategy = SYSTEMS[name]
    return replace(strategy, publication=replace(strategy.publication, in_flight=way))


def small(**knobs: Any) -> Cluster:
    """Two servers of eight sequences; a step takes 0.5 s, new weights 0.3 s."""
    weights = Weights(transfer=False, load_s=0.3, **knobs.pop("weights", {}))
    return cluster(**{"servers": 2, "slots": 8, "train_s": 0.5, "weights": weights, **knobs})


def pairs(**knobs: Any) -> Prompts:
    """Two answers of a second or so to each prompt."""
    return prompts(answers=2, **{"answer_tokens": Lognormal(1000.0, 0.7), **knobs})


class Watched(ClusterSimulation):
    """Fails, and does not hang, when the clock stands still for ever."""

    looks = 0

    def _fill(self) -> None:
        self.looks += 1
        assert self.looks < MOST_EVENTS, f"no end at {self.now} s: {self.explain()}"
        super()._fill()


def scenario(
    strategy: Strategy,
    of: Cluster | None = None,
    asked: Prompts | None = None,
    faults: Faults | None = None,
    *,
    versions: int = VERSIONS,
    seed: int = 0,
) -> ClusterSimulation:
    """A run that ends, whose books balance."""
    settings = ClusterSettings(versions=versions, time_s=END_S)
    of, asked, faults = of or small(), asked or pairs(), faults or Faults()
    simulation = Watched(strategy, of, asked, settings, faults, seed, EventLog())
    simulation.run()
    assert simulation.ended, "the run does not say what ended it"
    assert simulation.ended != "time", f"it would have gone on for ever: {simulation.explain()}"
    check_books(simulation, asked)
    return simulation


def check_books(simulation: ClusterSimulation, asked: Prompts) -> None:
    """No work is lost or invented; no group is trained twice, and no prompt more often than there are epochs."""
    coordinator = simulation.coordinator
    ledger = coordinator.ledger
    assert ledger.imbalance == 0
    assert ledger.in_flight == coordinator.in_flight
    trained = [(lease, prompt) for _, kind, lease, prompt, *_ in simulation.log.rows() if kind == CONSUMED]
    assert len(trained) == ledger.consumed == len({lease for lease, _ in trained})
    assert len(trained) == coordinator.version * BATCH
    if asked.epochs is not None or asked.count is None:
        assert max(Counter(prompt for _, prompt in trained).values(), default=0) <= (asked.epochs or 1)
    for shares in simulation.trainer.use.shares().values():
        known = [share for share in shares.values() if share is not None]
        assert len(known) == (len(shares) if coordinator.version else 0), shares
        assert not known or (min(known) > -1e-12 and abs(sum(known) - 1) < 1e-9), shares
