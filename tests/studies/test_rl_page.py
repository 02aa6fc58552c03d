"""What docs/rl.md shows works as it stands there."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from fedasync.rl.models import POLICIES
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser
from fedasync.rl.tasks import TASKS
from fedasync.studies.trainer_experiment import planned
from fedasync.studies.trainer_file import load
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings

from .running import Command, runs, summary

PAGE = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_experiment_of_the_page_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(blocks("toml")[0])
    plans = planned(load(tmp_path / "e.toml"), tmp_path)
    assert len(plans) == 4
    assert [each.parts.settings.versions for each in plans] == [60] * 4


def test_a_task_of_ones_own_learns_on_virtual_time(
    folder: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks("python")
    (folder / "count.py").write_text(code)
    (folder / "s.toml").write_text(blocks("toml")[1])
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    assert fedasync("sim", "s.toml").status == 0
    made = runs(Path("results/s"))
    assert len(made) == 4
    assert {summary(each)["versions"] for each in made.values()} == {6}
    assert Path("results/s/figures/final_by_axis.png").is_file()
    assert Path("results/s/final.md").is_file()


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ("objective", Objective),
        ("optimiser", Optimiser),
        ("prompts", PromptSettings),
        ("processes", ProcessSettings),
        ("run", RunSettings),
    ],
)
def test_the_page_names_every_key(table: str, kind: type) -> None:
    told = PAGE.split("### `[sampling]`")[1].split("## A task of your own")[0]
    rows = [row for row in told.splitlines() if row.startswith(f"| `{table}.")]
    named = {name for row in rows for name in re.findall(r"`(?:\w+\.)?(\w+)`", row)}
    missing = {field.name for field in fields(kind)} - named
    assert missing == set()


def test_the_page_names_every_kind() -> None:
    for kind in (*TASKS, *POLICIES):
        assert f"`{kind}`" in PAGE
