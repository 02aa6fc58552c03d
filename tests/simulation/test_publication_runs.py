"""Publication rules in whole runs: what they measure, what they count, and what rarer publishing costs in staleness."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import polars as pl
import pytest

from fedasync.aggregation.model import Contribution
from fedasync.core import (
    AllOf,
    AnyOf,
    Disagreement,
    Distance,
    EpisodeEnd,
    EveryN,
    Exponential,
    FeatureCosine,
    Kl,
    Publication,
    VisitsDoubled,
    WithinStaleness,
)
from fedasync.federated.arrays import WorkloadError
from fedasync.publication import ModelledDivergence
from fedasync.runs.run import Run
from fedasync.simulation import laws
from fedasync.simulation.population import Population
from fedasync.simulation.settings import Settings
from fedasync.simulation.simulate import simulate
from fedasync.strategies import FEDERATED, fedasync, fedbuff
from fedasync.workloads import Digits, LocalTraining, Quadratic
from fedasync.workloads.protocol import Task

from .rows import CLIENTS, row

UNEVEN = Population(CLIENTS, laws.Lognormal(1.0, 0.6), slowness=laws.Uniform(0.5, 2.0))


@cache
def digits() -> Digits:
    return Digits(clients=CLIENTS, hidden=8, local=LocalTraining(steps=3, batch_size=16, learning_rate=0.1))


def timing(rule: Publication, divergence: ModelledDivergence | None = None, **more: Any) -> Run:
    settings = Settings(**{"versions": 60, "divergence": divergence, **more})
    return simulate(fedbuff(concurrency=4, buffer_size=2, publication=rule), UNEVEN, settings=settings, seed=5)


def learning(rule: Publication, versions: int = 60) -> Run:
    strategy = fedbuff(concurrency=4, buffer_size=2, publication=rule)
    return simulate(strategy, UNEVEN, digits(), versions=versions, seed=5)


def published(run: Run) -> list[int]:
    return list(run.events.filter(pl.col("kind") == "published")["version"].to_list())


def weights(run: Run) -> bytes:
    assert run.model is not None
    return bytes(run.model.values.numpy().tobytes())


# -- timing only ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [made.__name__ for made in FEDERATED if made.__name__ != "rennala"])
def test_every_row_takes_a_publication(name: str) -> None:
    """Modelled so that it fires at every third version, it is the fixed rule, event for event.

    Rennala uses nothing that is not from the current version: workers must see every one.
    """
    rule: Publication = Distance(0.25)
    if row(name).max_staleness is not None:  # a bound on staleness needs one on the lag
        rule = WithinStaleness(rule, 2)
    divergence = ModelledDivergence(distance_per_version=0.1, distance_power=1.0)
    fixed = simulate(row(name, publish_every=3), UNEVEN, versions=20, seed=1)
    measured = simulate(row(name, publication=rule), UNEVEN, versions=20, seed=1, divergence=divergence)
    assert measured.events.equals(fixed.events)
    assert measured.summary["publications"] == fixed.summary["publications"] == 20 // 3
    assert fixed.summary["checks"] == 0


def test_the_counters_are_those_of_the_log() -> None:
    run = timing(Exponential())
    assert published(run) == [1, 2, 4, 8, 16, 32]
    assert (run.summary["publications"], run.summary["checks"]) == (6, 0)
    run = timing(Kl(2.5, check_every=2), ModelledDivergence(kl_per_version=1.0))
    assert published(run) == list(range(4, 61, 4)), "due from the third version on, looked at every second"
    assert (run.summary["publications"], run.summary["checks"]) == (15, 30)


def test_short_circuits_save_checks_in_a_run() -> None:
    model = ModelledDivergence(kl_per_version=1.0)
    assert timing(AllOf((EveryN(5), Kl(1.0))), model).summary["checks"] == 12
    assert timing(AnyOf((EveryN(5), Kl(99.0))), model).summary["checks"] == 48


def test_episodes_and_visits_are_modelled_too() -> None:
    run = timing(EpisodeEnd(), ModelledDivergence(episodes_per_s=0.2))
    times = run.events.filter(pl.col("kind") == "published")["time_s"].to_list()
    assert len(times) == len({int(0.2 * time_s) for time_s in times}), "one publication at most an episode"
    assert run.summary["publications"] == len({int(0.2 * time_s) for time_s in committed(run)} - {0})
    assert published(timing(VisitsDoubled(), ModelledDivergence(pairs=1))) == [1, 2, 4, 8, 16, 32]


def committed(run: Run) -> list[float]:
    return list(run.events.filter(pl.col("kind") == "committed")["time_s"].to_list())


def test_luck_is_the_seeds() -> None:
    model = ModelledDivergence(kl_per_version=1.0, spread=0.9)
    one, same = (timing(Kl(3.0), model) for _ in range(2))
    assert one.events.equals(same.events)
    assert one.summary["publications"] > 60 // 4 or published(one) != list(range(4, 61, 4))
    other = simulate(
        fedbuff(concurrency=4, buffer_size=2, publication=Kl(3.0)), UNEVEN, versions=60, divergence=model, seed=6
    )
    assert published(other) != published(one)


# -- learning ------------------------------------------------------------------------------------------------------


def test_rarer_publishing_by_distance_is_staler() -> None:
    """Publications fall and staleness rises with the threshold, from every version to none."""
    runs = [learning(Distance(above), 40) for above in (0.0, 0.04, 0.08, 1e9)]
    counts = [run.summary["publications"] for run in runs]
    stale = [run.summary["staleness"]["mean"] for run in runs]
    assert counts[0] == 40
    assert counts[-1] == 0
    assert all(more > fewer for more, fewer in pairwise(counts)), counts
    assert all(less < more for less, more in pairwise(stale)), stale
    assert stale[-1] == pytest.approx(39 / 2), "all start from version 0: the mean of 0 … 39"
    assert all(run.summary["checks"] == 40 for run in runs)


@pytest.mark.parametrize("rule", [Distance(0.0), Kl(0.0), FeatureCosine(1.0)], ids=lambda rule: rule.kind)
def test_a_threshold_that_any_change_passes_is_every_version(rule: Publication) -> None:
    often, every = learning(rule, 25), learning(EveryN(1), 25)
    assert often.events.equals(every.events)
    assert weights(often) == weights(every)


class Still(Digits):
    def train(self, task: Task) -> Contribution:
        return Contribution(task.model.values.clone(), "parameters", 1)


def test_nothing_is_published_while_the_model_stands_still() -> None:
    """Clients that learn nothing bring the version that they started from, again and again."""
    still = Still(clients=CLIENTS, hidden=8)
    rule = AnyOf((Distance(0.0), Kl(0.0), FeatureCosine(1.0), Disagreement(0.0)))
    run = simulate(fedbuff(concurrency=4, buffer_size=2, publication=rule), UNEVEN, still, versions=12, seed=5)
    assert (run.summary["publications"], run.summary["checks"]) == (0, 48)


@pytest.mark.parametrize("rule", [Disagreement(0.1), Kl(0.05), FeatureCosine(0.98)], ids=lambda rule: rule.kind)
def test_behaviour_is_measured_on_the_workload(rule: Publication) -> None:
    run = learning(rule)
    assert 0 < run.summary["publications"] < 30
    assert run.summary["checks"] == 60
    again = learning(rule)
    assert again.events.equals(run.events)
    assert weights(again) == weights(run)


def test_within_staleness_the_lag_is_bounded_in_a_run() -> None:
    run = learning(WithinStaleness(Distance(1e9), 3))
    assert published(run) == list(range(4, 61, 4))
    assert run.summary["checks"] == 45


def test_work_in_flight_is_aborted_by_a_publication_of_any_kind() -> None:
    rule = Distance(0.05, in_flight="abort")
    run = learning(rule)
    reasons = run.events.filter(pl.col("kind") == "cancelled")["reason"].unique().to_list()
    assert reasons == ["aborted by a publication"]
    assert run.summary["publications"] > 0


def test_a_server_that_takes_its_time_measures_the_model_that_it_commits() -> None:
    strategy = fedbuff(concurrency=4, buffer_size=2, publication=Distance(0.0))
    run = simulate(strategy, UNEVEN, digits(), versions=15, server_step_s=0.3, seed=5)
    assert published(run) == list(range(1, 16))


def test_distance_needs_no_comparison_of_the_workloads_own() -> None:
    workload = Quadratic(CLIENTS, dimensions=3, contraction=0.8, start=5.0, seed=2)
    counts = [
        simulate(fedasync(concurrency=4, publication=Distance(above)), UNEVEN, workload, versions=60, seed=1).summary[
            "publications"
        ]
        for above in (0.0, 0.2, 1.0)
    ]
    assert counts[0] == 60
    assert counts[0] > counts[1] > counts[2]


# -- what is refused -----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "nothing to measure on": (
        lambda: timing(Kl()),
        "publication 'kl' measures kl, which a timing-only run cannot; a workload, or divergence, would do",
    ),
    "another divergence": (
        lambda: timing(Kl(), ModelledDivergence(feature_rate=0.1)),
        "measures kl: divergence models feature_cosine, not kl; kl_per_version would do",
    ),
    "a divergence beside a workload": (
        lambda: simulate(
            fedasync(concurrency=2),
            UNEVEN,
            Quadratic(CLIENTS),
            versions=3,
            divergence=ModelledDivergence(kl_per_version=1.0),
        ),
        "divergence models what a workload measures: it is for timing-only runs",
    ),
    "a workload that cannot compare": (
        lambda: simulate(fedasync(concurrency=2, publication=Kl()), UNEVEN, Quadratic(CLIENTS), versions=3),
        "measures kl, and workload Quadratic has no compare",
    ),
    "a comparison without that measure": (
        lambda: simulate(fedasync(concurrency=2, publication=EpisodeEnd()), UNEVEN, digits(), versions=3),
        "measures episodes, and compare of workload Digits gives disagreement, feature_cosine, kl, not episodes",
    ),
    "both ways to say it": (
        lambda: fedasync(concurrency=2, publish_every=2, publication=EveryN(2)),
        "publish_every = 2 and a publication both say when clients see a version; one of them would do",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_refused_before_the_run(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(ValueError, match=words.replace("(", r"\(")) as raised:
        make()
    assert "\n" not in str(raised.value)


class Quadratics(Quadratic):
    """Its comparison fails, or makes no number, when the model has moved."""

    fails = False

    def compare(self, published: Any, current: Any) -> dict[str, float]:
        if published is current:
            return {"kl": 0.0}
        if self.fails:
            raise RuntimeError("no policy here")
        return {"kl": float("nan")}


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (True, "version 1: compare raised RuntimeError: no policy here"),
        (False, "version 1: compare returned kl = nan; a finite number would do"),
    ],
)
def test_a_comparison_that_fails_is_the_workloads_error(fails: bool, words: str) -> None:
    workload = Quadratics(CLIENTS)
    workload.fails = fails
    with pytest.raises(WorkloadError, match=words):
        simulate(fedasync(concurrency=2, publication=Kl()), UNEVEN, workload, versions=3)
