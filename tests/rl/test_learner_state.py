from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl import learner_state
from fedasync.rl.learner import Learner
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser

from .tiny import Llama, Mlp, Walk, groups, problem

torch.set_num_threads(1)


def assert_same(one: Learner, other: Learner) -> None:
    own = other.weights()
    assert (one.version, one.steps) == (other.version, other.steps)
    assert all(torch.equal(each, own[name]) for name, each in one.weights().items())


@settings(deadline=None, max_examples=8)
@given(
    before=st.integers(0, 3),
    kind=st.sampled_from(["adamw", "sgd"]),
    momentum=st.sampled_from([0.0, 0.9]),
    trainable=st.sampled_from(["all", 1]),
    control=st.booleans(),
)
def test_after_a_restore_training_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, before: int, kind: Any, momentum: float, trainable: Any, control: bool
) -> None:
    """Wherever it was saved: in the middle of the warm-up, before the first step, in a learner that went on."""
    optimiser = Optimiser(
        1e-2, kind=kind, momentum=momentum, warm_up_steps=7, minibatches=2, trainable="all" if control else trainable
    )
    options: dict[str, Any] = {"optimiser": optimiser}
    if control:
        options |= {"environment": Walk(), "policy": Mlp(), "objective": Objective(advantages="gae")}
    whole = Learner(problem(**options), 0)
    for seed in range(before):
        whole.train(groups(seed, control=control))
    folder = tmp_path_factory.mktemp("run") / "saved"
    whole.save(folder)
    other = Learner(problem(**options), 0)
    other.train(groups(99, control=control))
    other.restore(folder)
    assert_same(other, whole)
    for seed in range(before, before + 3):
        assert whole.train(groups(seed, control=control)) == other.train(groups(seed, control=control))
    assert_same(other, whole)


def test_a_save_replaces_the_one_before_and_nothing_else_is_left(tmp_path: Path) -> None:
    learner = Learner(problem(), 0)
    (tmp_path / ".saved.new").mkdir()  # of a process that ended in the middle
    for seed in range(2):
        learner.train(groups(seed))
        learner.save(tmp_path / "saved")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == ["learner.json", "learner.safetensors"]
    other = Learner(problem(), 0)
    other.restore(tmp_path / "saved")
    assert_same(other, learner)


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(problem(), 0)
    learner.save(tmp_path / "saved")

    def full(path: Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(learner_state, "_flush", full)
        learner.train(groups(0))
        with pytest.raises(OSError, match="no space left"):
            learner.save(tmp_path / "saved")
    other = Learner(problem(), 0)
    other.restore(tmp_path / "saved")
    assert other.version == 0


def test_what_another_learner_saved_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    learner = Learner(problem(), 0)
    learner.train(groups(0))
    learner.save(tmp_path / "saved")
    unlike = {
        "saved with seed 0, and here it is 1": Learner(problem(), 1),
        "saved with optimiser 'adamw', and here it is 'sgd'": Learner(problem(optimiser=Optimiser(0.1, kind="sgd")), 0),
        "is not of this policy": Learner(problem(policy=Llama(layers=1)), 0),
        "saved by another policy": Learner(problem(policy=Llama(layers=3)), 0),
    }
    for message, other in unlike.items():
        before = other.weights()
        with pytest.raises(ValueError, match=message) as caught:
            other.restore(tmp_path / "saved")
        assert "\n" not in str(caught.value)
        assert other.version == 0
        assert all(torch.equal(each, before[name]) for name, each in other.weights().items())


@pytest.mark.parametrize("broken", ["missing", "json", "tensors"])
def test_a_folder_that_holds_no_learner_is_refused(tmp_path: Path, broken: str) -> None:
    learner = Learner(problem(), 0)
    learner.save(tmp_path / "saved")
    if broken == "missing":
        (tmp_path / "saved").rename(tmp_path / "elsewhere")
    else:
        name = {"json": learner_state.ABOUT, "tensors": learner_state.TENSORS}[broken]
        (tmp_path / "saved" / name).write_bytes(b"{")
    with pytest.raises(ValueError, match="holds no saved learner"):
        learner.restore(tmp_path / "saved")


def test_what_is_said_beside_the_tensors(tmp_path: Path) -> None:
    learner = Learner(problem(optimiser=Optimiser(1e-2, epochs=2)), 3)
    learner.train(groups(0))
    learner.save(tmp_path / "saved")
    told = json.loads((tmp_path / "saved" / learner_state.ABOUT).read_text())
    assert told == {"format": 1, "optimiser": "adamw", "seed": 3, "steps": 2, "version": 1}
