"""Where the model comes to rest when clients are of different speed: who counts arrivals, and who counts clients.

All clients are always at work, client i of mean time Tᵢ, and pull the model towards their own centres cᵢ. What counts
every arrival alike rests at Σ pᵢ·cᵢ with pᵢ ∝ 1/Tᵢ; what remembers every client at Σ cᵢ/N.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest

from fedasync.core import Constant, Polynomial
from fedasync.runs.run import Run
from fedasync.simulation import laws
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import STRATEGIES
from fedasync.workloads import Quadratic

CENTRES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
TIMES_S = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
N = len(CENTRES)
BY_ARRIVALS = sum(c / t for c, t in zip(CENTRES, TIMES_S, strict=True)) / sum(1 / t for t in TIMES_S)
BY_CLIENTS = sum(CENTRES) / N
SEEDS = 6

ARRIVALS: dict[str, dict[str, Any]] = {
    "fedasync": {"alpha": 0.1, "proximal_mu": 0.0, "staleness": Constant()},
    "fedbuff": {"buffer_size": 3, "server_learning_rate": 0.3, "staleness": Constant()},
    "fedfa": {"window": 3},
}
CLIENTS: dict[str, dict[str, Any]] = {"area": {}, "mifa": {"buffer_size": 3}, "ca2fl": {"buffer_size": 3}}


def run(name: str, seed: int = 0, time_s: float = 300.0, **knobs: Any) -> Run:
    strategy = STRATEGIES[name](**{"concurrency": N, **(ARRIVALS | CLIENTS)[name], **knobs})
    population = Population(N, laws.Exponential(1.0), slowness=laws.Values(TIMES_S))
    workload = Quadratic(N, CENTRES, contraction=0.8)
    return simulate(
        strategy, population, workload, seed=seed, time_s=time_s, evaluate_every_s=5.0, selection="same_client"
    )


def rest(found: Run) -> list[tuple[str, float, float]]:
    return [
        (form["formula"], form["predicted"], form["measured"])
        for form in found.summary["closed_forms"]
        if form["name"] == "model, mean of the later half"
    ]


@pytest.mark.parametrize("name", [*ARRIVALS, *CLIENTS])
def test_the_model_rests_where_theory_says(name: str) -> None:
    """Over seeds, within four standard errors (and a thousandth, for those that come to a standstill)."""
    formula, expected, other = (
        ("Σ pᵢ·cᵢ", BY_ARRIVALS, BY_CLIENTS) if name in ARRIVALS else ("Σ cᵢ / N", BY_CLIENTS, BY_ARRIVALS)
    )
    late = []
    for seed in range(SEEDS):
        found = run(name, seed)
        w = found.metrics.filter(found.metrics["name"] == "w")["value"].to_numpy()
        late.append(w[len(w) // 2 :].mean())
        ((said, predicted, measured),) = rest(found)
        assert said == formula
        assert predicted == pytest.approx(expected, rel=1e-12)
        assert measured == pytest.approx(late[-1], rel=1e-12)
    mean, error = np.mean(late), np.std(late, ddof=1) / sqrt(SEEDS)
    assert abs(mean - expected) < 4 * error + 1e-3
    assert abs(mean - other) > 10 * error
    assert abs(mean - other) > 0.8 * abs(BY_CLIENTS - BY_ARRIVALS)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("fedbuff", {"staleness": Polynomial(0.5)}),
        ("fedasync", {"proximal_mu": 0.1}),
        ("fedfa", {"concurrency": N - 1}),
        ("mifa", {"concurrency": N - 1, "wait_for_all": False}),
    ],
    ids=["weights by staleness", "proximal", "one waits", "one waits, remembered"],
)
def test_nothing_is_said_where_neither_mean_holds(name: str, knobs: dict[str, Any]) -> None:
    assert rest(run(name, time_s=60.0))
    assert not rest(run(name, time_s=60.0, **knobs))
