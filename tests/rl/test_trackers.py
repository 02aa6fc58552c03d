"""Trackers of metrics: what each needs, and what a learner's accelerator does with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedasync.rl import trackers
from fedasync.rl.placement import accelerator_of
from fedasync.rl.trackers import TRACKERS, start_settings, tracker_refusal


@pytest.fixture
def own_state() -> Iterator[None]:
    """Accelerate's state is the process's, and so no other test's."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def test_the_names_are_accelerates() -> None:
    from accelerate.utils import LoggerType

    assert {*TRACKERS, "all"} == {str(each) for each in LoggerType}


@pytest.mark.parametrize("name", TRACKERS)
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    said = tracker_refusal(name)
    assert said == f"tracker = {name!r} needs the package {name}: pip install {name.replace('_', '-')}"


@pytest.mark.parametrize("there", ["tensorboard", "tensorboardX"])
def test_either_package_of_tensorboard_would_do(monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: there if package == there else None)
    assert tracker_refusal("tensorboard") is None


@pytest.mark.parametrize("name", ["wndb", "all", ""])
def test_a_tracker_that_is_none(name: str) -> None:
    assert tracker_refusal(name) == f"tracker = {name!r}; {', '.join(map(repr, TRACKERS))} would do"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracked_run_has_its_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("WANDB_DIR", raising=False)
    folder = tmp_path / "eta-1_seed0" / "tracker"
    told = start_settings(name, folder)
    named = {"name": "eta-1_seed0"}
    assert told == {
        "tensorboard": {},  # which is given the folder
        "wandb": {"wandb": {**named, "dir": str(folder)}},
        "trackio": {"trackio": named},
    }.get(name)
    assert folder.is_dir() == (name == "wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert start_settings("wandb", folder) == {"wandb": named}
    assert start_settings(name, None) == {}


def test_an_accelerator_starts_its_tracker_in_the_folder(tmp_path: Path, own_state: None) -> None:
    made = accelerator_of(cpu=True, log_with="tensorboard", folder=tmp_path / "run" / "tracker")
    assert [each.name for each in made.trackers] == ["tensorboard"]
    made.log({"reward_mean": 0.5}, step=1)
    made.end_training()
    (file,) = tmp_path.rglob("events.out.tfevents*")
    assert file.is_relative_to(tmp_path / "run" / "tracker")


def test_an_accelerator_leaves_no_tracker_out_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate warns, and the metrics of the run are nowhere."""
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match="tracker = 'wandb' needs the package wandb: pip install wandb"):
        accelerator_of(cpu=True, log_with="wandb", folder=tmp_path)
