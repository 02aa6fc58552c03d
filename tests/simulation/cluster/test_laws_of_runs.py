"""Laws of whole runs of a cluster, on the ideal system: 64 slots, batches of 64 single answers, 1 s of training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import pytest

from fedasync.core import Barrier, Cohort, EveryVersion, StalenessBudget, Strategy, Tumbling
from fedasync.runs.measures import event_table
from fedasync.simulation.cluster.runtime import ClusterSimulation

from .ideal import BATCH, SLOTS, cluster, play, prompts


def budget(
    eta: int | None, *, batch: int = BATCH, limit: int | None = SLOTS, in_batches: bool = False, **rest: Any
) -> Strategy:
    """New weights interrupt what runs, which costs an ideal server nothing."""
    admission = StalenessBudget(eta, batch, limit, in_batches=in_batches)
    rest = {"publication": EveryVersion("interrupt"), **rest}
    return Strategy("budget", admission, Tumbling(batch, rest.pop("order", "arrival")), None, **rest)


@cache
def system(
    sigma: float, eta: int, versions: int = 400, train_s: float = 1.0, order: str = "arrival"
) -> ClusterSimulation:
    return play(budget(eta, order=order), cluster(train_s=train_s), prompts(sigma), versions=versions, seed=1)


def column(simulation: ClusterSimulation, name: str, kind: str) -> np.ndarray:
    events = event_table(simulation.log)
    return events.filter(events["kind"] == kind)[name].to_numpy()


def step_s(simulation: ClusterSimulation) -> float:
    return simulation.now / simulation.coordinator.version


# -- the table of step times -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "eta", "seconds", "room"),
    [
        (0.0, 0, 2.0, 0.0),
        (0.0, 1, 1.0, 0.003),  # and the first batch, which nothing overlaps
        (0.0, 2, 1.0, 0.003),
        (0.0, 8, 1.0, 0.003),
        (0.5, 0, 3.95, 0.03),
        (0.5, 1, 1.45, 0.03),
        (0.5, 2, 1.02, 0.02),
        (0.5, 4, 1.01, 0.02),
        (0.5, 8, 1.01, 0.02),
        (1.0, 0, 8.17, 0.05),
        (1.0, 1, 1.40, 0.05),
        (1.0, 2, 1.03, 0.03),
        (1.0, 4, 1.01, 0.03),
        (1.0, 8, 1.01, 0.03),
    ],
)
def test_step_times_of_the_table_are_met(sigma: float, eta: int, seconds: float, room: float) -> None:
    assert step_s(system(sigma, eta)) == pytest.approx(seconds, rel=room, abs=1e-9)


@pytest.mark.parametrize(("sigma", "seconds"), [(0.0, 1.0), (0.5, 2.95), (1.0, 7.19)])
def test_one_step_overlap_takes_the_longer_of_training_and_generation(sigma: float, seconds: float) -> None:
    overlap = play(
        budget(1, in_batches=True, publication=EveryVersion("continue")), asked=prompts(sigma), versions=400, seed=1
    )
    assert step_s(overlap) == pytest.approx(seconds, rel=0.05 if sigma else 0.003)


def test_overlap_gains_less_the_heavier_the_tail_and_streaming_keeps_its_gain() -> None:
    """1.34 and 1.14 times in the table for one-step overlap; 2.7 and 5.8 for a budget of 1."""
    gains = []
    for sigma in (0.5, 1.0):
        overlap = play(budget(1, in_batches=True), asked=prompts(sigma), versions=400, seed=1)
        gains.append((step_s(system(sigma, 0)) / step_s(overlap), step_s(system(sigma, 0)) / step_s(system(sigma, 1))))
    (mild, mild_streamed), (heavy, heavy_streamed) = gains
    assert mild == pytest.approx(1.34, rel=0.04)
    assert heavy == pytest.approx(1.14, rel=0.04)
    assert heavy_streamed > mild_streamed > 2.5


# -- (i) the bounds of 0 and 1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("train_s", [0.0, 1.0])
def test_a_budget_of_0_is_the_synchronous_system_event_for_event(sigma: float, train_s: float) -> None:
    """Three ways to say it: the gate, batches that wait for each other, and rounds with a barrier."""
    gate = budget(0, limit=None)
    in_batches = replace(gate, admission=StalenessBudget(0, BATCH, in_batches=True))
    rounds = replace(gate, admission=Cohort(BATCH), buffer=Barrier())
    logs = [
        event_table(play(s, cluster(train_s=train_s), prompts(sigma, answers=2), versions=20, seed=3).log)
        for s in (gate, in_batches, rounds)
    ]
    assert logs[0].equals(logs[1])
    assert logs[0].equals(logs[2])
    assert set(logs[0].filter(logs[0]["kind"] == "consumed")["staleness"]) == {0}


@pytest.mark.parametrize("eta", [1, 2, 5])
@pytest.mark.parametrize("train_s", [0.5, 1.0, 3.0])
def test_without_a_tail_a_budget_of_1_or_more_is_one_step_overlap(eta: int, train_s: float) -> None:
    """The same commits at the same times, whatever was asked for ahead."""
    gate, overlap = (
        play(strategy, cluster(train_s=train_s), prompts(0.0), versions=30)
        for strategy in (budget(eta), budget(1, in_batches=True))
    )
    assert column(gate, "time_s", "committed").tolist() == pytest.approx(
        column(overlap, "time_s", "committed").tolist()
    )


# -- (ii) monotone, and no better than the floor ---------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("train_s", [0.5, 2.0])
def test_a_larger_budget_never_makes_steps_longer_and_none_beats_the_floor(sigma: float, train_s: float) -> None:
    times = [step_s(system(sigma, eta, 150, train_s)) for eta in (0, 1, 2, 4, 8)]
    assert all(later <= sooner + 0.02 for sooner, later in pairwise(times))
    assert min(times) >= max(train_s, 1.0) * 0.98  # B·E[L]/slots = 1 s, to its sampling error


# -- (iv), (v) age ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "eta"), [(0.5, 1), (1.0, 1), (0.5, 2), (1.0, 4)])
def test_mean_age_is_work_held_over_batch_and_at_most_eta_but_the_oldest_is_older(sigma: float, eta: int) -> None:
    """Little's law within half a version: what the trainer is stepping on counts as neither in flight nor buffered."""
    simulation = system(sigma, eta)
    events = event_table(simulation.log)
    moves = events.filter(events["kind"].is_in(["admitted", "consumed"]))
    held = np.where(moves["kind"].to_numpy() == "admitted", 1, -1).cumsum()
    times = moves["time_s"].to_numpy()
    mean_held = held[:-1] @ np.diff(times) / (times[-1] - times[0])
    ages = column(simulation, "staleness", "consumed")
    training = simulation.trainer.use.shares()["trainer"]["training"]
    assert abs(ages.mean() - (mean_held / BATCH - training)) <= 0.5
    assert ages.mean() <= eta
    assert ages.max() > eta


@pytest.mark.parametrize(("eta", "mean"), [(4, 3.99), (8, 7.94)])
def test_a_closed_gate_holds_eta_batches_and_the_mean_age_is_eta(eta: int, mean: float) -> None:
    """Training of 2 s against generation of 1 s: the gate is what holds generation back."""
    simulation = system(1.0, eta, 400, 2.0)
    assert step_s(simulation) == pytest.approx(2.0, rel=0.01)
    assert column(simulation, "staleness", "consumed")[100 * BATCH :].mean() == pytest.approx(mean, abs=0.07)


# -- selection -------------------------------------------------------------------------------------------------


def test_oldest_first_keeps_the_mean_age_and_trims_its_tail() -> None:
    ages = {
        order: column(system(1.0, 4, 400, 2.0, order), "staleness", "consumed")[100 * BATCH :]
        for order in ("arrival", "oldest_first")
    }
    assert ages["oldest_first"].mean() == pytest.approx(ages["arrival"].mean(), abs=0.05)
    assert np.quantile(ages["oldest_first"], 0.99) < np.quantile(ages["arrival"], 0.99)
    assert ages["oldest_first"].max() < ages["arrival"].max()


@pytest.mark.parametrize(
    ("eta", "bound", "seconds", "age", "dropped", "length_ratio"),
    [(4, 4, 1.05, 1.88, 0.04, 0.81), (2, 2, 1.16, 1.37, 0.13, 0.64)],
)
def test_dropping_bounds_the_age_and_starves_the_long(
    eta: int, bound: int, seconds: float, age: float, dropped: float, length_ratio: float
) -> None:
    simulation = play(budget(eta, max_staleness=bound), asked=prompts(1.0), versions=600, seed=1)
    ledger, goal = simulation.coordinator.ledger, np.array(simulation.answers.goal)
    ages = column(simulation, "staleness", "consumed")
    assert ages.max() <= bound
    assert step_s(simulation) == pytest.approx(seconds, rel=0.04)
    assert ages.mean() == pytest.approx(age, abs=0.12)
    share = ledger.rejected["stale"] / (ledger.rejected["stale"] + ledger.consumed)
    assert share == pytest.approx(dropped, abs=0.02)
    trained = goal[column(simulation, "lease", "consumed")].mean()
    finished = goal[np.concatenate([column(simulation, "lease", kind) for kind in ("consumed", "rejected")])].mean()
    assert trained / finished == pytest.approx(length_ratio, abs=0.06)


def test_without_a_bound_what_is_trained_is_as_long_as_what_is_generated() -> None:
    simulation = system(1.0, 4)
    goal = np.array(simulation.answers.goal)
    ratio = goal[column(simulation, "lease", "consumed")].mean() / 1000.0
    error = goal.std() / 1000.0 / sqrt(len(goal))
    assert abs(ratio - 1.0) <= 4 * error


@pytest.mark.parametrize("eta", [0, 2])
def test_groups_that_teach_nothing_are_generated_and_replaced(eta: int) -> None:
    """A share of them, whatever their lengths: what is trained is as long as what is generated."""
    simulation = play(budget(eta), asked=prompts(0.5, filtered_share=0.3), versions=120, seed=2)
    ledger = simulation.coordinator.ledger
    ended = ledger.rejected["filtered"] + ledger.consumed + ledger.buffered
    assert abs(ledger.rejected["filtered"] / ended - 0.3) <= 4 * sqrt(0.3 * 0.7 / ended)
    assert ledger.consumed == 120 * BATCH


def test_filtering_makes_a_gate_of_0_send_waves_and_a_wider_one_hides_them() -> None:
    """Replacements start when the first of the batch have ended: η = 0 pays for one wave after the other."""
    plain, filtered = (
        [step_s(play(budget(eta), asked=prompts(0.5, filtered_share=share), versions=100, seed=2)) for eta in (0, 4)]
        for share in (0.0, 0.3)
    )
    assert filtered[0] > 1.1 * plain[0]
    assert filtered[1] < 1.1 * max(1.0, 1.0 / 0.7)  # generation-bound: 1/0.7 s of work a step in 64 slots
