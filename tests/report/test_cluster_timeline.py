"""The trainer's lane of a cluster's timeline: all of its time, in the order in which things happened."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from fedasync.report import Report, cluster_timeline
from fedasync.report.cluster_figures import PARTS
from fedasync.report.cluster_timeline import steps
from fedasync.runs.run import Run
from fedasync.simulation.cluster import Cluster, Faults, Prompts, simulate_cluster
from fedasync.simulation.cluster.decoding import FixedSpeed
from fedasync.simulation.cluster.faults import TrainerCrash
from fedasync.simulation.cluster.training import Trainer
from fedasync.simulation.cluster.weights import Weights
from fedasync.simulation.laws import Constant
from fedasync.strategies.rollouts import synchronous_rl

SWITCH_S = 0.2


def turns(*crashes: TrainerCrash) -> Run:
    """Answers take 1 s, training 0.5 s, a switch 0.2 s, new weights 0.3 s."""
    cluster = Cluster(
        generation_gpus=2,
        training_gpus=2,
        colocated=True,
        switch_s=SWITCH_S,
        decoding=FixedSpeed(tokens_per_second=1000.0, max_running=8),
        trainer=Trainer(step_s=0.5),
        weights=Weights(transfer=False, load_s=0.3),
    )
    asked = Prompts(answers=1, prompt_tokens=Constant(0.0), answer_tokens=Constant(1000.0))
    faults = Faults(trainer_crashes=crashes)
    return simulate_cluster(synchronous_rl(batch=8), cluster, asked, versions=4, faults=faults)


def bars(run: Run) -> list[tuple[float, float, str]]:
    """Of the trainer's lane, from left to right: begin, end, what."""
    figure = cluster_timeline([run], Report())
    (ax,) = [ax for ax in figure.axes if ax.get_ylabel() == "trainer"]
    from matplotlib.colors import to_rgba

    names = {to_rgba(colour): name for name, colour in PARTS["trainer"].items()}
    found: list[Any] = sorted((bar.get_x(), bar.get_x() + bar.get_width(), bar.get_facecolor()) for bar in ax.patches)
    return [(begin, end, names[colour]) for begin, end, colour in found]


def test_a_colocated_trainer_switches_after_training_and_after_the_new_weights() -> None:
    run = turns()
    drawn = bars(run)
    cycle = ["waiting", "training", "switching", "syncing", "switching"]
    assert [what for *_, what in drawn] == (cycle * 4)[:-2]
    assert drawn[0][0] == pytest.approx(0.0)
    assert all(end == pytest.approx(begin) for (_, end, _), (begin, *_) in pairwise(drawn))
    lengths = {what: end - begin for begin, end, what in drawn}
    seconds = {"waiting": 1.0, "training": 0.5, "switching": SWITCH_S, "syncing": 0.3}
    assert lengths == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("at_s", "order"),
    [
        (1.4, ["waiting", "training", "down", "training", "switching"]),  # in the first step, a part of which is lost
        (1.95, ["syncing", "switching", "waiting", "down", "training", "switching"]),  # before the second
    ],
)
def test_a_crash_is_drawn_and_the_lane_has_no_gap(at_s: float, order: list[str]) -> None:
    run = turns(TrainerCrash(at_s, 0.6, keeps_rollouts=True))
    done = steps(run)
    assert [what for what, _ in done[at_s > 1.7].parts] == order
    before_s = 0.0
    for step in done:
        assert sum(seconds for _, seconds in step.parts) == pytest.approx(step.committed_s - before_s)
        before_s = step.committed_s
    drawn = bars(run)
    assert [what for *_, what in drawn].count("down") == 1
    assert all(end == pytest.approx(begin) for (_, end, _), (begin, *_) in pairwise(drawn))
    legend = [text.get_text() for text in cluster_timeline([run], Report()).legends[0].get_texts()]
    assert {"down", "switching"} <= set(legend)
