"""The parts of a step add up to its time, in every run, whatever the trainer was at when it crashed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import EveryN, EveryVersion, Strategy
from fedasync.runs.step_times import PARTS as OTHER
from fedasync.runs.time_shares import TRAINER
from fedasync.simulation.cluster import Cluster, Faults
from fedasync.simulation.cluster.faults import SyncFails, TrainerCrash
from fedasync.simulation.cluster.runtime import ClusterSimulation
from fedasync.simulation.cluster.training import Trainer
from fedasync.simulation.cluster.weights import Weights
from fedasync.strategies.rollouts import areal, one_step_overlap, synchronous_rl

from .ideal import cluster, play, prompts

BATCH = 8
PARTS = ("train_s", *OTHER.values())
SWITCH_S = 0.2
COLOCATED = {"generation_gpus": 2, "training_gpus": 2, "colocated": True, "switch_s": SWITCH_S}
SYNCHRONOUS = synchronous_rl(batch=BATCH)
SYSTEMS: dict[str, tuple[Strategy, dict[str, object]]] = {
    "synchronous": (SYNCHRONOUS, {}),
    "colocated": (SYNCHRONOUS, COLOCATED),
    "colocated, poll": (SYNCHRONOUS, {**COLOCATED, "weights": Weights(transfer=False, load_s=0.3, poll_s=0.1)}),
    "colocated, each fourth": (replace(areal(batch=BATCH, eta=4), publication=EveryN(4)), COLOCATED),
    "colocated ahead": (areal(batch=BATCH, eta=2), COLOCATED),
    "areal": (areal(batch=BATCH, eta=2), {}),
    "areal, servers drain": (replace(areal(batch=BATCH, eta=2), publication=EveryVersion("continue")), {}),
    "overlap, servers drain": (one_step_overlap(batch=BATCH), {}),
    "one by one": (areal(batch=BATCH, eta=2), {"weights": Weights(transfer=False, load_s=0.3, order="one_by_one")}),
}
CRASHES = st.lists(
    st.tuples(st.floats(0.0, 4.0), st.sampled_from([0.0, 0.05, 0.3, 1.0, 3.0]), st.booleans()), max_size=4
)


def of(**knobs: object) -> Cluster:
    """Two servers of eight sequences; a step takes 0.5 s, new weights 0.3 s."""
    weights = knobs.pop("weights", Weights(transfer=False, load_s=0.3))
    return cluster(**{"servers": 2, "slots": 8, "train_s": 0.5, "weights": weights, **knobs})


def steps(simulation: ClusterSimulation) -> dict[str, np.ndarray]:
    """A metric's values, version by version."""
    table = simulation.trainer.times.table()
    return {name: table.filter(table["name"] == name)["value"].to_numpy() for name in table["name"].unique()}


def check(simulation: ClusterSimulation) -> dict[str, np.ndarray]:
    """The law: parts add up step by step, and over the run to what the shares say."""
    found = steps(simulation)
    parts = np.array([found[name] for name in PARTS])
    assert (parts >= 0).all()
    np.testing.assert_allclose(parts.sum(axis=0), found["step_s"], atol=1e-9)
    assert found["step_s"].sum() == pytest.approx(simulation.now)
    shares = simulation.trainer.use.shares()
    assert set(PARTS) == {name for names in TRAINER.values() for name in names}
    for what, names in TRAINER.items():
        spent_s = sum(found[name].sum() for name in names)
        assert shares["trainer"][what] == pytest.approx(spent_s / simulation.now, abs=1e-9), what
    for parts_of_one in shares.values():
        assert sum(share or 0.0 for share in parts_of_one.values()) == pytest.approx(1.0)
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_parts_of_every_step_add_up(name: str) -> None:
    strategy, knobs = SYSTEMS[name]
    found = check(play(strategy, of(**knobs), prompts(0.7), versions=12))
    assert set(found["down_s"]) == set(found["lost_s"]) == {0.0}
    assert set(found["train_s"]) == {0.5}
    switches = [0.0] * 12 if "colocated" not in name else [SWITCH_S, *[2 * SWITCH_S] * 11]
    np.testing.assert_allclose(found["switch_s"], switches, atol=1e-9)
    sync_s = 0.0 if name == "one by one" else 0.4 if "poll" in name else 0.3
    published = np.diff(found["publications"], prepend=0.0)
    assert published.sum() == (3 if "fourth" in name else 12)
    if "drain" not in name:  # else it lasts until the last running answer has ended
        np.testing.assert_allclose(found["sync_s"], [0.0, *sync_s * published[:-1]], atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SYSTEMS)), CRASHES, st.sampled_from([0.0, 0.4]), st.sampled_from([0.0, 0.15]))
def test_parts_add_up_whenever_the_trainer_crashes(
    name: str, spans: list[tuple[float, float, bool]], evaluate_s: float, latency_s: float
) -> None:
    """Crashes at any moment and for any time, also anew at the very moment of a restart, or in an evaluation."""
    strategy, knobs = SYSTEMS[name]
    at_s, crashes = 0.0, []
    for after_s, restart_s, keeps_rollouts in spans:
        at_s += after_s
        crashes.append(TrainerCrash(at_s, restart_s, keeps_rollouts))
        at_s += restart_s
    trainer = Trainer(step_s=0.5, evaluate_s=evaluate_s, latency_s=latency_s)
    faults = Faults(trainer_crashes=tuple(crashes))
    of_this = of(**knobs, trainer=trainer)
    found = check(play(strategy, of_this, prompts(0.7), versions=6, evaluate_every=2, faults=faults))
    over_s = found["step_s"].sum()
    before = [crash for crash in crashes if crash.at_s + crash.restart_s < over_s]
    assert found["down_s"].sum() >= sum(crash.restart_s for crash in before) - 1e-9
    assert set(found["train_s"]) == {0.5}


@pytest.mark.parametrize(
    ("at_s", "parts"),
    [
        (0.4, {"wait_s": 1.0, "down_s": 1.0, "lost_s": 0.0}),  # while it waits: generation goes on
        (1.3, {"wait_s": 1.0, "down_s": 1.0, "lost_s": 0.3}),  # in its step
        (1.6, {"wait_s": 1.0, "down_s": 1.0, "lost_s": 0.6}),  # as its GPUs begin to switch
    ],
)
def test_of_a_crash_a_step_has_the_time_down_and_the_part_that_is_lost(at_s: float, parts: dict[str, float]) -> None:
    """Answers take 1 s; training 0.5 s and the switch 0.2 s. The whole step is made again."""
    faults = Faults(trainer_crashes=(TrainerCrash(at_s, 1.0, keeps_rollouts=True),))
    found = check(play(SYNCHRONOUS, of(**COLOCATED), prompts(0.0), versions=2, faults=faults))
    expected = {**parts, "train_s": 0.5, "switch_s": SWITCH_S, "sync_s": 0.0}
    if at_s < 1.0:
        expected["wait_s"] = at_s  # what it waited for is there when it is back
    expected |= dict.fromkeys(("save_s", "evaluate_s", "measure_s"), 0.0)
    assert {name: found[name][0] for name in PARTS} == pytest.approx(expected)


@pytest.mark.parametrize(("at_s", "sync_s", "switch_s"), [(1.8, 0.1, 0.2), (2.1, 0.3, 0.3)])
def test_what_goes_on_while_the_trainer_is_down_counts_as_down(at_s: float, sync_s: float, switch_s: float) -> None:
    """Commit at 1.7 s, weights until 2.0 s, GPUs switch until 2.2 s, whether somebody waits for it or not."""
    faults = Faults(trainer_crashes=(TrainerCrash(at_s, 1.0, keeps_rollouts=True),))
    found = check(play(SYNCHRONOUS, of(**COLOCATED), prompts(0.0), versions=2, faults=faults))
    told = {name: found[name][1] for name in ("sync_s", "switch_s", "down_s", "lost_s", "train_s")}
    expected = {"sync_s": sync_s, "switch_s": switch_s, "down_s": 1.0, "lost_s": 0.0, "train_s": 0.5}
    assert told == pytest.approx(expected)


def test_retries_of_a_sync_are_sync() -> None:
    faults = Faults(sync_fails=SyncFails(1.0, timeout_s=0.2, retry_s=0.1, most_retries=2))
    found = check(play(SYNCHRONOUS, of(), prompts(0.5), versions=4, faults=faults))
    np.testing.assert_allclose(found["sync_s"], [0.0, *[3 * 0.2 + 2 * 0.1] * 3], atol=1e-9)


def test_an_evaluation_is_no_waiting() -> None:
    """Every second version is followed by 0.4 s of evaluation, beside which generation (1 s) goes on."""
    trainer = Trainer(step_s=0.5, evaluate_s=0.4)
    weights = Weights(transfer=False)
    simulation = play(SYNCHRONOUS, of(trainer=trainer, weights=weights), prompts(0.0), versions=5, evaluate_every=2)
    found = check(simulation)
    np.testing.assert_allclose(found["evaluate_s"], [0.0, 0.0, 0.4, 0.0, 0.4], atol=1e-9)
    np.testing.assert_allclose(found["wait_s"], [1.0, 1.0, 0.6, 1.0, 0.6], atol=1e-9)
    assert simulation.now == pytest.approx(5 * 1.5)  # the last version is not waited for


def test_an_evaluation_in_which_the_trainer_dies_counts_until_then() -> None:
    """Version 1 at 1.5 s, an evaluation from there on, a crash 0.1 s later for 1 s."""
    faults = Faults(trainer_crashes=(TrainerCrash(1.6, 1.0, keeps_rollouts=True),))
    of_this = of(trainer=Trainer(step_s=0.5, evaluate_s=0.4), weights=Weights(transfer=False))
    found = check(play(SYNCHRONOUS, of_this, prompts(0.0), versions=2, evaluate_every=1, faults=faults))
    assert found["evaluate_s"][1] == pytest.approx(0.1)
    assert found["down_s"][1] == pytest.approx(1.0)
    assert found["wait_s"][1] == pytest.approx(0.0, abs=1e-9)  # what it waited for came while it was down
