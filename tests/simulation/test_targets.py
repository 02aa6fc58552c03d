"""Evaluation on its grid, targets, and runs that stop when they are reached."""

from __future__ import annotations

from typing import Any

import pytest

from fedasync.core import Constant
from fedasync.runs.run import Run
from fedasync.simulation.laws import Exponential
from fedasync.simulation.population import Population
from fedasync.simulation.simulate import simulate
from fedasync.strategies import fedasync

from .worlds import Mapped, constant_times, series

STEPS = fedasync(concurrency=1, alpha=1.0, staleness=Constant(), proximal_mu=0.0)


def climb(seconds: float = 1.0, **arguments: Any) -> Run:
    """One client, w + 1 every ``seconds``."""
    return simulate(STEPS, constant_times(seconds), Mapped(1, lambda _, w: w + 1), **arguments)


def test_a_grid_point_at_the_time_of_an_event_sees_the_model_after_it() -> None:
    run = climb(time_s=3.0, evaluate_every_s=0.5)
    assert series(run) == {0.0: 0, 0.5: 0, 1.0: 1, 1.5: 1, 2.0: 2, 2.5: 2, 3.0: 3}


def test_the_last_model_is_evaluated_off_the_grid_too() -> None:
    assert series(climb(updates=5, evaluate_every_s=2.0)) == {0.0: 0, 2.0: 2, 4.0: 4, 5.0: 5}
    assert series(climb(time_s=2.25)) == {2.25: 2}
    assert series(climb(versions=3)) == {3.0: 3}


def test_a_target_is_reported_with_its_time_and_its_contributions() -> None:
    run = climb(time_s=6.0, evaluate_every_s=0.75, target={"w": 3.0})
    assert run.summary["targets"] == [{"metric": "w", "value": 3.0, "reached_s": 3.0, "reached_updates": 3}]
    missed = climb(time_s=6.0, evaluate_every_s=0.75, target={"w": 99.0}).summary["targets"]
    assert missed == [{"metric": "w", "value": 99.0, "reached_s": None, "reached_updates": None}]
    assert run.summary["time_s"] == 6.0


@pytest.mark.parametrize("grid", [{"evaluate_every_s": 1.0}, {}], ids=["grid", "end only"])
def test_a_target_of_an_unknown_metric_is_refused_even_when_nothing_waits_for_it(grid: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="target 'accuracy': the workload has no such metric; it has"):
        climb(time_s=5.0, target={"accuracy": 0.9}, **grid)


def test_a_target_that_the_start_meets_already_says_nothing_and_is_refused() -> None:
    with pytest.raises(ValueError, match="is met by version 0 already"):
        climb(time_s=5.0, evaluate_every_s=1.0, target={"w": 0.0})


def test_a_run_that_stops_at_its_target_ends_at_the_grid_point_that_saw_it() -> None:
    run = climb(time_s=60.0, evaluate_every_s=0.75, target={"w": 4.0}, stop_at_target=True)
    assert (run.summary["time_s"], run.summary["ended"]) == (4.5, "target")
    assert run.summary["targets"][0]["reached_s"] == 4.5
    assert run.events["time_s"].to_list()[-1] <= 4.5
    assert max(series(run)) == 4.5
    assert all(verdict["holds"] for verdict in run.summary["verdicts"])


def test_a_run_with_several_targets_stops_at_the_last_of_them() -> None:
    class Two(Mapped):
        def evaluate(self, model: Any) -> dict[str, float]:
            w = float(model.values[0])
            return {"up": w, "once": 1.0 if w == 2 else 0.0}

    workload = Two(1, lambda _, w: w + 1)
    run = simulate(
        STEPS,
        constant_times(1.0),
        workload,
        time_s=60.0,
        evaluate_every_s=1.0,
        target={"up": 5.0, "once": 1.0},
        stop_at_target=True,
    )
    assert run.summary["time_s"] == 5.0


def test_a_target_seen_while_the_run_waits_for_its_end_stops_it_there() -> None:
    """Nothing happens after 4 s, the grid looks at 6 s, and the run could last until 7 s."""
    run = climb(seconds=4.0, time_s=7.0, evaluate_every_s=3.0, target={"w": 1.0}, stop_at_target=True)
    assert (run.summary["time_s"], run.summary["ended"]) == (6.0, "target")


def test_a_target_that_is_never_reached_stops_nothing() -> None:
    run = climb(time_s=5.0, evaluate_every_s=1.0, target={"w": 99.0}, stop_at_target=True)
    assert (run.summary["time_s"], run.summary["ended"]) == (5.0, "time")


def test_a_target_of_a_metric_that_the_workload_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="accuracy") as refused:
        climb(time_s=5.0, evaluate_every_s=1.0, target={"accuracy": 0.9}, stop_at_target=True)
    assert "'w'" in str(refused.value) or " w" in str(refused.value), "and what it has"


@pytest.mark.parametrize(
    "arguments",
    [
        {"time_s": 5.0, "evaluate_every_s": 1.0},
        {"time_s": 5.0, "target": {"w": 1.0}},
    ],
    ids=["no_target", "no_grid"],
)
def test_stopping_at_a_target_without_one_or_without_a_grid_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stop_at_target"):
        climb(stop_at_target=True, **arguments)


def test_the_same_run_goes_the_same_way_whether_it_may_stop_or_not() -> None:
    population = Population(4, Exponential(1.0))
    runs = [
        simulate(
            fedasync(concurrency=4),
            population,
            Mapped(4, lambda _, w: w + 1),
            time_s=40.0,
            evaluate_every_s=1.0,
            target={"w": 6.0},
            stop_at_target=stop,
        )
        for stop in (True, False)
    ]
    stopped, whole = (run.events for run in runs)
    assert len(stopped) < len(whole)
    assert whole.head(len(stopped)).equals(stopped)
