"""The test vectors: published numbers, found by the core, and what the command and its page say of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import get_args

import pytest

from fedasync.aggregation.conventions import FRAMEWORKS, FedAsyncConvention, FedBuffConvention, OnePlusRoot
from fedasync.aggregation.server_optimizers import Convention
from fedasync.strategies import fedbuff
from fedasync.studies.by_hand import ByHand, model_of, scalar
from fedasync.studies.conformance import Line, credited, footer, lines, rounded
from fedasync.studies.vectors import SECTIONS

from .running import Command, runs, summary

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "conformance.md").read_text()

FEDBUFF = {
    ("one step", "paper"): 1.35,
    ("one step", "flgo"): 1.35,
    ("one step", "asyncflsim"): 1.35,
    ("server_learning_rate = 0.1", "asyncflsim"): 1.035,
    ("one step", "federatedscope"): 1.35,
    ("s(τ) = (1 + τ)^(−1)", "federatedscope"): 1.275,
    ("one step", "normalised"): 1.466667,
    ("one step", "flsim"): 1.989949,
    ("one step", "plato"): 1.5,
    ("one step", "nvflare"): 1.2,
    ("s(τ) = 1", "paper"): 1.5,
    ("one step", "fedscale"): 1.133333,
    ("one step", "appfl"): 1.1,
    ("server_learning_rate = 0.9", "appfl"): 1.09,
}
FEDASYNC = {
    ("polynomial", "paper"): 0.88,
    ("polynomial, second arrival", "paper"): 0.796,
    ("polynomial", "plato"): 0.88,
    ("polynomial, second arrival", "plato"): 0.838,
    ("hinge", "paper"): 0.978182,
    ("hinge", "flgo"): 0.976,
    ("hinge, τ = 2", "paper"): 0.76,
    ("hinge, τ = 2", "flgo"): 0.76,
    ("constant", "paper"): 0.76,
}
ORDER = {
    ("starts and ends", ""): "S0@1 S1@3 E0@4 S2@5 E2@6 E1@8",
    ("staleness by arrival", ""): "0, 0, 2",
    ("mean staleness", ""): 0.666667,
    ("standard deviation of staleness", ""): 0.942809,
    ("mean in flight before an end", ""): 1.666667,
    ("at one instant: order", ""): "A@5, B@5",
    ("at one instant: w", ""): 1.25,
    ("at one instant: w, B first", ""): 1.0,
}
ROUNDS = {
    ("FedAvg", ""): "2.5, 3.5; counter 5",
    ("FedAvg, 0 samples", ""): "rejected: no samples; w = 1",
    ("FedAvg, a model is NaN", ""): "rejected: not finite; w = 1",
    ("FedAvg, a model is infinite", ""): "rejected: not finite; w = 1",
    ("FedAdam, τ = 0.001", "paper"): 0.990050,
    ("FedAdam", "paper"): 1.0,
    ("FedAdam", "flower"): 0.742460,
    ("FedAdam", "textbook"): 1.0,
}
TIME = {
    ("one way (s)", ""): 0.0266667,
    ("round trip (s)", ""): 0.0533333,
    ("a round of 3, deadline 5 s", ""): "5 s, 2 clients",
    ("FedBuff, K = 2", ""): "2 s, 2 clients",
    ("a round of 4", ""): "refused",
}
PUBLISHED = dict(zip([section.title for section in SECTIONS], (FEDBUFF, FEDASYNC, ORDER, ROUNDS, TIME), strict=True))


@pytest.fixture(scope="module")
def found() -> list[Line]:
    return lines()


def test_every_vector_comes_out_as_published(found: list[Line]) -> None:
    results = {title: {(x.case, x.convention): x.result for x in found if x.section == title} for title in PUBLISHED}
    assert {title: list(of) for title, of in results.items()} == {title: list(of) for title, of in PUBLISHED.items()}
    for title, published in PUBLISHED.items():
        for vector, value in published.items():
            expected = value if isinstance(value, str) else pytest.approx(value, abs=6e-7)
            assert results[title][vector] == expected, (title, vector)
    assert all(line.agrees for line in found)


def test_every_convention_has_a_vector_and_the_version_it_was_read_in(found: list[Line]) -> None:
    conventions = {"FedBuff": FedBuffConvention, "FedAsync": FedAsyncConvention, "rounds": Convention}
    for title, literal in conventions.items():
        own = [line for line in found if line.section == title and line.convention]
        assert {line.convention for line in own} == set(get_args(literal))
        for line in own:
            assert line.whose.startswith(FRAMEWORKS[line.convention]) or line.case == "s(τ) = 1"


def test_the_buffer_may_fill_in_any_order() -> None:
    """B's stale result first, or A's fresh one: the same step (up to rounding) in every convention of FedBuff."""
    for convention in get_args(FedBuffConvention):
        ends = []
        for order in (0, 1), (1, 0):
            run = ByHand(fedbuff(concurrency=2, buffer_size=2, convention=convention), scalar(0.0))
            leases = [run.start(client) for client in (0, 1)]
            for client in order:
                run.bring(leases[client], model_of(0.6 + client))
            ends.append(run.w)
        assert ends[0] == pytest.approx(ends[1], rel=1e-14)


# -- the command -----------------------------------------------------------------------------------------------


def test_json_is_all_of_the_output_and_says_the_same(fedasync: Command, found: list[Line]) -> None:
    end = fedasync("conformance", "--json")
    assert (end.status, end.err) == (0, "")
    told = json.loads(end.out)
    assert told["agrees"] is True
    assert list(told["given"]) == list(PUBLISHED)
    assert [Line(**vector) for vector in told["vectors"]] == found


def test_a_rule_that_computes_something_else_is_found(
    fedasync: Command, monkeypatch: pytest.MonkeyPatch, found: list[Line]
) -> None:
    monkeypatch.setattr(OnePlusRoot, "__call__", lambda self, tau: 1 / (1 + tau))
    end = fedasync("conformance")
    assert end.status == 1
    assert len(re.findall("│ NO ", end.out)) == 1
    (row,) = (line for line in end.out.splitlines() if "│ NO " in line)
    assert "nvflare" in row
    assert f"{len(found) - 1} of {len(found)} agree." in end.out
    end = fedasync("conformance", "--json")
    assert end.status == 1
    assert [x["convention"] for x in json.loads(end.out)["vectors"] if not x["agrees"]] == ["nvflare"]


def test_the_table_names_what_was_executed_and_what_was_read(fedasync: Command, found: list[Line]) -> None:
    end = fedasync("conformance")
    assert (end.status, end.err) == (0, "")
    told = " ".join(end.out.split())
    executed = "FLGo 0.4.4 (1.35); NVFlare 2.9.0 (1.2); APPFL 1.12.0 (1.1, 1.09)."
    assert f"* also confirmed by executing the released package: {executed}" in told
    read = told.split("Read in the source, not executed: ")[1].split("paper: ")[0]
    for name in ("AsyncFLSim", "FederatedScope", "FLSim 0.1.0", "Plato", "FedScale", "FLGo 0.4.4 (FedAsync)", "Flower"):
        assert name in read
    assert "APPFL" not in read
    assert len(re.findall(r"│ yes ", end.out)) == len(found)
    assert footer(found)[-1] == f"{len(found)} of {len(found)} agree."


def test_without_torch_the_remedy_is_one_line(fedasync: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    end = fedasync("conformance", "--json")
    assert (end.status, end.out) == (1, "")
    assert end.complaint.endswith("pip install 'fedasync[torch]'")


# -- the page --------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for of, text in fenced if of == language]


def test_the_page_has_the_vectors_and_what_they_are_given(found: list[Line]) -> None:
    table = PAGE.split("| --- | --- | --- | --- | --- |\n")[1].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()]
    assert rows == [
        (
            line.section,
            line.case,
            f"`{line.convention}`" if line.convention else "",
            credited(line).replace("*", r"\*"),
            rounded(line.result),
        )
        for line in found
    ]
    words = " ".join(PAGE.split())
    for section in SECTIONS:
        assert f"**{section.title}**: {section.given}" in words
    for literal in (FedBuffConvention, FedAsyncConvention, Convention):
        for convention in get_args(literal):
            assert f"`{convention}`" in PAGE.split("| row | `convention` |")[1]


def test_the_pages_scenario_is_the_file_and_prints_what_stands_there(fedasync: Command) -> None:
    (printed,) = (block for block in blocks("") if "admitted" in block)
    golden = DOCS / "scenarios" / "golden.toml"
    assert golden.read_text() in blocks("toml")
    end = fedasync("conformance", str(golden))
    assert [line.rstrip() for line in end.out.splitlines()] == printed.splitlines()


def test_the_pages_convention_works_in_a_study(fedasync: Command, folder: Path, study: Path) -> None:
    (strategy,) = (block for block in blocks("toml") if "convention" in block)
    study.write_text(
        '[study]\ntitle = "from the page"\nseeds = 1\n[run]\nupdates = 40\n[report]\nfigures = []\n'
        '[workload]\nkind = "quadratic"\nclients = 12\n[population]\nduration_s = { kind = "constant", value = 1.0 }\n'
        + strategy
    )
    assert fedasync("sim", "s.toml").status == 0
    (run,) = runs(folder / "results" / "s").values()
    assert summary(run)["consumed"] == 40
    assert json.loads((run / "config.json").read_text())["strategy"]["convention"] == "appfl"
