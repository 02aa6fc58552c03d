"""``fedasync world``: what it prints and writes, and what it refuses in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .running import LEARNING, TIMING, Command, changed, contents

TIERS = """
[[population.tiers]]
name = "quick"
share = 0.75
duration_s = { kind = "constant", value = 1.0 }

[[population.tiers]]
name = "slow"
share = 0.25
duration_s = { kind = "constant", value = 20.0 }

[strategy]"""

AXIS = """
[[axis]]
name = "tail"
key = "population.duration_s.mean"
values = [5.0, 20.0]
"""


def test_it_prints_the_tiers_and_the_ceilings_and_writes_png_and_svg(fedasync: Command, study: Path) -> None:
    study.write_text(changed(TIMING, ("[strategy]", TIERS)))
    done = fedasync("world", "s.toml")
    assert (done.status, done.err) == (0, "")
    for words in ("quick", "slow", "all clients", "E[max of 10] / E[t] = ", "E[max of 100] / E[t] = 3.48×"):
        assert words in done.out, words
    written = {path.name for path in Path("results/s/world").iterdir()}
    assert written == {"durations.png", "durations.svg"}
    assert not Path("results/s/runs").exists()


def test_a_second_look_writes_the_same_bytes(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    for out in ("one", "two"):
        assert fedasync("world", "s.toml", "--out", out).status == 0
    assert contents(Path("one")) == contents(Path("two"))


def test_a_workload_brings_its_clients(fedasync: Command, study: Path) -> None:
    study.write_text(LEARNING)
    done = fedasync("world", "s.toml", "--set", "population.slowness={kind='uniform', low=1, high=2}")
    assert done.status == 0
    assert " 8 " in done.out


def test_axes_are_left_aside_and_what_they_vary_can_be_set(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING + AXIS)
    base, other = fedasync("world", "s.toml"), fedasync("world", "s.toml", "--set", "population.duration_s.mean=1000.0")
    assert base.status == other.status == 0
    assert "Axes vary population.duration_s.mean: drawn is the base" in base.out
    means = [float(end.out.split("│ all clients │")[1].split("│")[1]) for end in (base, other)]
    assert means[1] == pytest.approx(100 * means[0], rel=0.01)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("clients = 8\n", "", "population: population: clients is missing"),
        (
            "[strategy]",
            TIERS.replace("0.25", "0.5"),
            "population: tiers: shares must add up to 1, got 0.75 + 0.5 = 1.25",
        ),
        (
            "[strategy]",
            TIERS.replace('"slow"', '"slow"\nshar = 2'),
            "population.tiers.1.shar: unknown key; did you mean 'share'?",
        ),
        (
            "[strategy]",
            TIERS.replace('"constant", value = 20.0', '"trace", name = "pai_job9"'),
            "trace: unknown name 'pai_job9'",
        ),
        (
            "[strategy]",
            'availability = { kind = "by_labels", p_min = 0.1, slot_s = 60.0 }\n[strategy]',
            "by_labels: a workload that says its clients' labels (client_labels) is needed",
        ),
        (
            "[strategy]",
            'capacity = { file = "no.csv", batch_size = 1, local_steps = 1 }\n[strategy]',
            "no.csv cannot be read",
        ),
        (
            "[strategy]",
            'outages = { kind = "off", regions = 1 }\n[strategy]',
            "population.outages.kind: got \"off\"; 'times', 'on_off'",
        ),
        ("[strategy]", "server_uplink_bytes_per_second = 10.0\n[strategy]", "a network needs model_bytes"),
    ],
)
def test_worlds_that_cannot_be_are_refused_in_one_line(
    fedasync: Command, study: Path, old: str, new: str, told: str
) -> None:
    study.write_text(changed(TIMING, (old, new)))
    done = fedasync("world", "s.toml")
    assert done.status == 2
    assert "s.toml" in done.complaint
    assert told in done.complaint


def test_the_study_runs_in_the_world_that_was_drawn(fedasync: Command, study: Path) -> None:
    study.write_text(changed(TIMING, ("[strategy]", TIERS)))
    assert fedasync("sim", "s.toml").status == 0


SIMS = sorted((Path(__file__).parents[2] / "sims").glob("*.toml"))


@pytest.mark.parametrize("path", SIMS, ids=[path.stem for path in SIMS])
def test_every_shipped_study_can_be_looked_at(fedasync: Command, path: Path) -> None:
    """By its name, as in the README; most have the strategy as an axis, and no table of one."""
    done = fedasync("world", path.stem, "--seeds", "1")
    assert (done.status, done.err) == (0, "")
    if "[cluster]" in path.read_text():
        assert "answers on a server" in done.out
        return
    assert "E[max of 10] / E[t] = " in done.out
    assert Path(f"results/{path.stem}/world/durations.png").is_file()


ALONE = """
[study]
title = "a world, and nothing else"

[population]
clients = 5
duration_s = { kind = "exponential", mean = 2.0 }
"""


def test_a_population_is_all_that_is_needed(fedasync: Command, study: Path) -> None:
    study.write_text(ALONE)
    done = fedasync("world", "s.toml")
    assert (done.status, done.err) == (0, "")
    assert "(3 seeds)" in done.out
    assert fedasync("sim", "s.toml").complaint.endswith("s.toml: the table [strategy] is missing")


def test_set_reaches_a_study_whose_strategy_is_an_axis(fedasync: Command, study: Path) -> None:
    study.write_text(
        ALONE + '[[axis]]\nname = "strategy"\npoints = [{ label = "x", strategy = { name = "fedasync" } }]\n'
    )
    assert " 5 " in fedasync("world", "s.toml").out
    done = fedasync("world", "s.toml", "--set", "population.clients=77", "--set", "run.time_s=60.0")
    assert (done.status, done.err) == (0, "")
    assert " 77 " in done.out
    assert "Axes vary" not in done.out


OF_AN_AXIS = """
[[axis]]
name = "law"
points = [
  { label = "constant", population.duration_s = { kind = "constant", value = 7.0 } },
  { label = "uniform", population.duration_s = { kind = "uniform", low = 1.0, high = 2.0 } },
]
"""


def test_a_base_without_what_an_axis_gives_says_so_in_one_line(fedasync: Command, study: Path) -> None:
    study.write_text(changed(ALONE, ('duration_s = { kind = "exponential", mean = 2.0 }', "")) + OF_AN_AXIS)
    done = fedasync("world", "s.toml")
    assert done.status == 2
    assert "clients take no time: give duration_s" in done.complaint
    assert "axes give population.duration_s, and the base is drawn; --set population.duration_s=..." in done.complaint
    point = "population.duration_s={kind='constant', value=7.0}"
    assert " 7 " in fedasync("world", "s.toml", "--set", point).out
    study.write_text(changed(ALONE, ('duration_s = { kind = "exponential", mean = 2.0 }', "")))
    done = fedasync("world", "s.toml")
    assert done.status == 2
    assert "axes give" not in done.complaint


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("run.time_s=-1", "s.toml: run.time_s must be a finite number > 0, got -1"),
        ("run.time_s=soon", "s.toml: run.time_s must be a finite number > 0, got 'soon'"),
        ("run=7", "s.toml: run: got 7; a table would do"),
        ("population=7", "s.toml: population: got 7; a table would do"),
        ("population.client=7", "population.client: unknown key; did you mean 'clients'?"),
        ("workload.kind=digit", "workload.kind: unknown name 'digit'; did you mean 'digits'?"),
    ],
)
def test_what_cannot_be_set_is_told_in_one_line(fedasync: Command, study: Path, change: str, told: str) -> None:
    study.write_text(ALONE)
    done = fedasync("world", "s.toml", "--set", change)
    assert done.status == 2
    assert told in done.complaint


def test_without_a_population_there_is_no_world(fedasync: Command, study: Path) -> None:
    study.write_text('[study]\ntitle = "nothing"\n')
    done = fedasync("world", "s.toml")
    assert (done.status, done.complaint) == (2, "fedasync: s.toml: the table [population] is missing")


PAGE = (Path(__file__).parents[2] / "docs" / "populations.md").read_text()
HEAD = TIMING.split("[population]", maxsplit=1)[0]
TAIL = '[strategy]\nname = "fedasync"\nconcurrency = 4\n'


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL), ids=["first", "tiers"])
def test_the_populations_of_the_page_are_worlds(fedasync: Command, study: Path, block: str) -> None:
    study.write_text(HEAD + block + TAIL)
    done = fedasync("world", "s.toml", "--seeds", "1")
    assert (done.status, done.err) == (0, "")


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in re.findall(
            r"`((?:availability|outages|duration_s|tier_preset)? ?=? ?\{.*?\}|tier_preset = \S+)`", PAGE
        )
        if "kind" in line or "tier_preset" in line
    ],
)
def test_what_the_page_shows_in_passing_can_be_read(fedasync: Command, study: Path, line: str) -> None:
    key = line if " = " in line.partition("{")[0] else f"outages = {line}"
    if "file" in key:
        Path("behaviour.csv").write_text("client,active_s,inactive_s,finish_time_s\n0,0,50,100\n")
    clients = "" if "intervals" not in key else "clients = 2\n"
    duration = "" if key.startswith("duration_s") else 'duration_s = { kind = "constant", value = 1.0 }\n'
    study.write_text(f"{HEAD}[population]\n{clients or 'clients = 20'}\n{duration}{key}\n{TAIL}")
    done = fedasync("world", "s.toml", "--seeds", "1")
    assert (done.status, done.err) == (0, "")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("population.slowness={kind='constant', value=1e308}", "slowness: a lease of inf s was drawn"),
        (
            "population.duration_s={kind='trace', name='pai_job4', scale=1e308}",
            "duration_s: a lease of inf s was drawn",
        ),
        ("population.availability={kind='daily', turnover_s=1e-300}", "availability: coming and going takes 4e-300 s"),
    ],
)
def test_times_that_no_figure_can_show_are_refused_in_one_line(
    fedasync: Command, study: Path, change: str, told: str
) -> None:
    study.write_text(TIMING)
    done = fedasync("world", "s.toml", "--set", change)
    assert done.status == 2
    assert told in done.complaint


STILL = """
[study]
title = "t"
seeds = 1
[run]
{}
[population]
clients = 8
duration_s = {{ kind = "constant", value = {} }}
"""


def test_work_that_takes_no_time_is_refused_as_a_run_would(fedasync: Command, study: Path) -> None:
    study.write_text(STILL.format("time_s = 10.0", 0.0))
    assert "the work of client 0 takes 0 s, so time_s may never be reached" in fedasync("world", "s.toml").complaint


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["0.0", "5e-324", "1e-300"])
def test_work_of_no_time_is_drawn_without_warnings(fedasync: Command, study: Path, value: str) -> None:
    study.write_text(STILL.format("updates = 10", value))
    assert fedasync("world", "s.toml").status == 0
