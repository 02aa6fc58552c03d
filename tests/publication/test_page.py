"""The page of publication: every rule has its row, and what it shows runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from fedasync.cli import main
from fedasync.core import Publication
from fedasync.publication import ModelledDivergence

PAGE = (Path(__file__).parent.parent.parent / "docs" / "publication.md").read_text()
SMALL = """
[study]
title = "from the page"
seeds = 1
"""
LEARNS = """
[run]
versions = 20
[population]
duration_s = { kind = "exponential", mean = 5.0 }
[workload]
kind = "digits"
clients = 12
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def table(head: str) -> str:
    return PAGE.split(f"| {head} |")[1].split("\n\n")[0]


def run(study: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    (folder / "study.toml").write_text(study)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["fedasync", "sim", "study.toml", "--jobs", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_table_has_every_rule_with_its_keys() -> None:
    written: dict[str, set[str]] = {}
    for line in table("kind").splitlines()[2:]:
        kinds, _, keys = line.strip("|").split("|")
        for kind in re.findall(r"`(\w+)`", kinds):
            written[kind] = set(re.findall(r"`(\w+)`", keys))
    shared = {"in_flight", "kind", "check_every"}
    rules: tuple[Any, ...] = get_args(Publication)
    of_kind = {next(f.default for f in fields(rule) if f.name == "kind"): rule for rule in rules}
    assert written == {kind: {f.name for f in fields(rule)} - shared for kind, rule in of_kind.items()}


def test_the_table_has_every_rate_of_the_model() -> None:
    keys = re.findall(
        r"`(\w+)`", "\n".join(line.split("|")[1] for line in table("key of `divergence`").splitlines()[2:])
    )
    assert sorted(keys) == sorted(field.name for field in fields(ModelledDivergence))


def test_the_strategy_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(SMALL + LEARNS + blocks("toml")[0], tmp_path, monkeypatch) == 0


def test_the_timing_only_study_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(SMALL + blocks("toml")[1], tmp_path, monkeypatch) == 0


def test_the_comparison_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(compile(code, "docs/publication.md", "exec"), {"__name__": "page"})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["every_version", "distance", "distance", "exponential"]
    counts = [int(line[1]) for line in lines]
    assert counts[0] == 40
    assert counts[0] > counts[1] > counts[2] > 0
    assert counts[3] == 6
    assert [int(line[2]) for line in lines] == [0, 40, 40, 0]
