"""What the pages show works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedasync.cli import main
from fedasync.strategies import FEDERATED, ROLLOUTS
from fedasync.studies.build import build
from fedasync.studies.study import load

ROOT = Path(__file__).parent.parent
SMALL = """
[study]
title = "from the page"
seeds = 1
[run]
time_s = 40.0
evaluate_every_s = 20.0
[population]
duration_s = { kind = "exponential", mean = 5.0 }
"""
DIGITS = '[workload]\nkind = "digits"\nclients = 12\n'


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fedasync", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(("head", "rows"), [("strategy", FEDERATED), ("for a cluster", ROLLOUTS)])
def test_the_readme_has_a_row_for_every_strategy_and_no_other(head: str, rows: tuple[Any, ...]) -> None:
    table = (ROOT / "README.md").read_text().split(f"| {head} | admission |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [row.__name__ for row in rows]


def test_a_strategy_of_ones_own_runs_as_the_page_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("docs/strategies.md", "python")
    (tmp_path / "trimmed.py").write_text(code)
    toml = blocks("docs/strategies.md", "toml")[-1]
    (tmp_path / "own.toml").write_text(SMALL + DIGITS + toml)
    monkeypatch.chdir(tmp_path)
    assert run(["sim", "own.toml", "--jobs", "1"], monkeypatch) == 0


def test_a_workload_of_ones_own_runs_as_the_page_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("docs/workloads.md", "python")
    (tmp_path / "wine.py").write_text(code)
    (toml,) = blocks("docs/workloads.md", "toml")
    (tmp_path / "own.toml").write_text(SMALL + toml + '[strategy]\nname = "fedfa"\nconcurrency = 5\nwindow = 3\n')
    monkeypatch.chdir(tmp_path)
    assert run(["sim", "own.toml", "--jobs", "1"], monkeypatch) == 0


def test_the_study_of_the_page_can_be_read_and_built(tmp_path: Path) -> None:
    (text,) = blocks("docs/studies.md", "toml")
    (tmp_path / "study.toml").write_text(text)
    plans = list(load(tmp_path / "study.toml").plans())
    assert len(plans) == 4 * 2 * 5
    assert {build(plan.config, "here").settings.time_s for plan in plans} == {600.0, 900.0}


def test_the_population_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    population = next(block for block in blocks("docs/populations.md", "toml") if "[population]" in block)
    timing = '[study]\ntitle = "timing"\nseeds = 1\n[run]\ntime_s = 200.0\n'
    strategy = '[strategy]\nname = "fedbuff"\nconcurrency = 100\n'
    (tmp_path / "population.toml").write_text(timing + population + strategy)
    monkeypatch.chdir(tmp_path)
    assert run(["sim", "population.toml", "--jobs", "1"], monkeypatch) == 0


def test_no_page_has_an_open_place_or_a_dead_link() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        assert not re.findall(r"^[A-Z]{4,}$", text, re.MULTILINE), page
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page}: {link}"
