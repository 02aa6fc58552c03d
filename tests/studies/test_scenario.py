"""Scenarios: the trace worked out by hand, runs recomputed in exact rationals, what is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import Constant as NoDecay
from fedasync.core import Strategy
from fedasync.simulation import Settings, simulate
from fedasync.strategies import fedasync as fedasync_row
from fedasync.strategies import fedavg, fedbuff, fedfa
from fedasync.studies.scenario import Client, Constant, Contract, Happened, Played, Scenario, Shift, play, shortest
from fedasync.workloads import Quadratic

from .running import Command, changed

GOLDEN = (Path(__file__).parents[2] / "docs" / "scenarios" / "golden.toml").read_text()
FEDFA = 'name = "fedfa"\nconcurrency = 3\nwindow = 2'
FEDBUFF = 'name = "fedbuff"\nconcurrency = 3\nbuffer_size = 2\nstaleness = { kind = "constant" }'
FEDASYNC = 'name = "fedasync"\nconcurrency = 3\nalpha = 0.5\nstaleness = { kind = "constant" }'
ARRIVALS = [(2.0, "A"), (3.5, "B"), (4.0, "A"), (5.2, "C"), (6.0, "A"), (7.0, "B"), (8.0, "A")]
TRACES = {
    "fedfa": (FEDFA, "16 9 9 10 33/4 11/2 85/16", [0, 0, 1, 2, 1, 3, 1]),
    "fedbuff": (FEDBUFF, "16 9 9 3 3 -1/2 -1/2", [0, 0, 1, 1, 1, 1, 1]),
    "fedasync": (FEDASYNC, "12 11 17/2 41/4 29/4 59/8 11/2", [0, 1, 1, 3, 1, 3, 1]),
}
A_ALONE = """
[run]
updates = 3
[strategy]
name = "fedasync"
concurrency = 1
alpha = 1
[[client]]
name = "A"
duration_s = 1
map = { kind = "shift", by = 1 }
"""


def played(fedasync: Command, text: str) -> dict[str, Any]:
    """What ``--json`` prints, all of it."""
    Path("s.toml").write_text(text)
    end = fedasync("conformance", "s.toml", "--json")
    assert (end.status, end.err) == (0, "")
    found: dict[str, Any] = json.loads(end.out)
    return found


def same_client(**limits: Any) -> Settings:
    return Settings(selection="same_client", **limits)


@pytest.mark.parametrize("name", TRACES)
def test_the_golden_trace_comes_out_exactly(fedasync: Command, name: str) -> None:
    strategy, models, staleness = TRACES[name]
    found = played(fedasync, changed(GOLDEN, (FEDFA, strategy)))
    arrived = [event for event in found["events"] if event["kind"] == "delivered"]
    assert [(event["time_s"], event["client"], event["staleness"]) for event in arrived] == [
        (time_s, client, tau) for (time_s, client), tau in zip(ARRIVALS, staleness, strict=True)
    ]
    after = [[e for e in found["events"] if e["time_s"] == time_s][-1]["model"] for time_s, _ in ARRIVALS]
    assert list(map(Fraction, after)) == list(map(Fraction, models.split()))
    assert Fraction(found["model"]) == Fraction(models.split()[-1])


def test_json_has_the_scenario_as_written_every_event_and_the_ledger(fedasync: Command) -> None:
    found = played(fedasync, A_ALONE)
    assert list(found) == ["scenario", "events", "model", "ledger", "time_s", "ended"]
    assert found["scenario"]["client"] == [{"name": "A", "duration_s": 1, "map": {"kind": "shift", "by": 1}}]
    assert (found["time_s"], found["ended"], found["model"]) == (3.0, "updates", 3.0)
    assert found["ledger"] == {
        "admitted": 4,
        "in_flight": 1,
        "buffered": 0,
        "consumed": 3,
        "rejected": {},
        "failed": {},
        "cancelled": {},
        "ignored": 0,
    }
    assert found["events"][:2] == [
        dict(zip(found["events"][0], (0.0, "admitted", "A", 0, 0, 0, None, None, 0.0), strict=True)),
        dict(zip(found["events"][0], (1.0, "delivered", "A", 0, 0, 0, 0, None, 0.0), strict=True)),
    ]


def test_the_table_has_every_event_in_the_shortest_digits(fedasync: Command) -> None:
    Path("s.toml").write_text(changed(GOLDEN, ("duration_s = 5.2", "duration_s = 5.199999999999999")))
    end = fedasync("conformance", "s.toml")
    assert (end.status, end.err) == (0, "")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in end.out.splitlines() if "│" in line]
    assert len(cells) == 36
    assert cells[7] == ["3.5", "consumed", "B", "1", "0", "0", "0", "", "16"]
    assert ["5.199999999999999", "committed", "", "", "", "3", "", "", "10"] in cells
    assert end.out.splitlines()[-1] == (
        "ended at its time limit at 8 s with w = 5.3125; of 10 leases 7 consumed, 0 buffered, 3 in flight"
    )


def test_a_list_of_durations_is_taken_in_turn(fedasync: Command) -> None:
    text = changed(A_ALONE, ("duration_s = 1", "duration_s = [1, 2.5, 4]"), ("updates = 3", "updates = 7"))
    found = played(fedasync, text)
    assert [e["time_s"] for e in found["events"] if e["kind"] == "delivered"] == [1, 3.5, 7.5, 8.5, 11, 15, 16]


def test_the_reason_of_a_lease_that_came_to_nothing_stands_in_its_event(fedasync: Command) -> None:
    found = played(fedasync, changed(GOLDEN, ("window = 2", "window = 2\nmax_staleness = 2\nlease_timeout_s = 5")))
    ended = [(e["time_s"], e["client"], e["kind"], e["reason"]) for e in found["events"] if e["reason"] is not None]
    assert ended == [(5.0, "C", "failed", "timeout"), (5.2, "C", "ignored", "the lease had ended")]
    Path("s.toml").write_text(changed(GOLDEN, ("window = 2", "window = 2\nmax_staleness = 2")))
    end = fedasync("conformance", "s.toml")
    assert end.out.splitlines()[-1].endswith("1 rejected (stale)")


# -- laws ------------------------------------------------------------------------------------------------------

FOURTHS = st.integers(-32, 32).map(lambda n: n / 4)
"""Short dyadic numbers: sums and halves of a few are exact in binary."""
MAPS = st.one_of(
    st.builds(Contract, centre=FOURTHS, rho=st.sampled_from((0.0, 0.5, 1.0))),
    st.builds(Constant, FOURTHS),
    st.builds(Shift, FOURTHS),
)
DURATIONS = st.lists(st.integers(1, 12).map(lambda n: n / 4), min_size=1, max_size=3)
FORMS = st.sampled_from(("parameters", "delta"))
CLIENTS = st.lists(st.builds(Client, st.just(""), DURATIONS, MAPS, st.integers(1, 4), FORMS), min_size=1, max_size=4)
STRATEGIES = {
    "fedasync": lambda n: fedasync_row(concurrency=n, alpha=0.5, staleness=NoDecay(), proximal_mu=0.0),
    "fedbuff": lambda n: fedbuff(concurrency=n, buffer_size=2, staleness=NoDecay()),
    "fedfa": lambda n: fedfa(concurrency=n, window=2),
}


def exact(x: Contract | Constant | Shift, w: Fraction) -> Fraction:
    match x:
        case Contract(centre=c, rho=rho):
            return Fraction(c) + Fraction(rho) * (w - Fraction(c))
        case Constant(value=value):
            return Fraction(value)
        case Shift(by=by):
            return w + Fraction(by)


def versions_of(events: tuple[Happened, ...], maps: dict[str | None, Any], rule: str, start: float) -> list[Fraction]:
    """Every version, from who was consumed when and in rationals alone."""
    versions, entering, window = [Fraction(start)], [], []
    for event in events:
        if event.kind == "consumed":
            base = versions[event.base_version or 0]
            entering.append((base, exact(maps[event.client], base)))
        elif event.kind == "committed":
            w = versions[-1]
            window = [*window, *(x for _, x in entering)][-2:]
            match rule:
                case "fedasync":
                    w = (w + entering[0][1]) / 2
                case "fedbuff":
                    w += sum(x - base for base, x in entering) / 2
                case "fedfa":
                    w = sum(window) / Fraction(2)
            versions.append(w)
            entering = []
    return versions


@pytest.mark.parametrize("rule", STRATEGIES)
@given(clients=CLIENTS, start=FOURTHS, versions=st.integers(1, 6))
@settings(max_examples=40)
def test_a_scenario_is_what_rationals_make_of_its_events(
    rule: str, clients: list[Client], start: float, versions: int
) -> None:
    named = tuple(Client(str(i), c.duration_s, c.map, c.samples, c.form) for i, c in enumerate(clients))
    strategy = STRATEGIES[rule](len(named))
    found = play(Scenario(strategy, named, same_client(versions=versions), start))
    expected = versions_of(found.events, {client.name: client.map for client in named}, rule, start)
    assert len(expected) == versions + 1
    committed = 0
    for event in found.events:
        committed += event.kind == "committed"
        assert Fraction(event.model) == expected[committed]
    assert Fraction(found.model) == expected[-1]
    check_times(found, named)


def check_times(found: Played, clients: tuple[Client, ...]) -> None:
    """Every lease that arrived took its client's next duration, and no client worked on two leases at a time."""
    for client in clients:
        own = [event for event in found.events if event.client == client.name]
        begun = [event.time_s for event in own if event.kind == "admitted"]
        done = [event.time_s for event in own if event.kind == "delivered"]
        for turn, (start_s, end_s) in enumerate(zip(begun, done, strict=False)):
            assert end_s - start_s == client.duration_s[turn % len(client.duration_s)]
        assert all(end_s <= next_s for end_s, next_s in zip(done, begun[1:], strict=False))


@given(times=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=4), name=st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=20)
def test_a_scenario_is_what_simulate_makes_of_the_same_world(times: list[float], name: str) -> None:
    strategy: Strategy = STRATEGIES[name](len(times))
    clients = tuple(Client(str(i), t, Contract(float(i), 0.5)) for i, t in enumerate(times))
    scenario = Scenario(strategy, clients, same_client(versions=8), start=16.0)
    oracle = Quadratic(len(times), centres=tuple(map(float, range(len(times)))), contraction=0.5, start=16.0)
    run = simulate(strategy, scenario.population, oracle, scenario.settings)
    found = play(scenario)
    columns = ("time_s", "kind", "lease", "base_version", "version", "staleness", "reason")
    assert run.events.select(columns).rows() == [tuple(getattr(e, name) for name in columns) for e in found.events]
    assert run.model is not None
    assert float(run.model.values[0]) == pytest.approx(found.model, abs=1e-12)
    assert run.summary["ledger"] == found.ledger


def test_a_round_weighs_by_samples() -> None:
    clients = (Client("A", 1, Constant(1.0), samples=1), Client("B", 2, Constant(3.0), samples=3))
    found = play(Scenario(fedavg(cohort=2), clients, same_client(versions=1)))
    assert (found.model, found.time_s) == (2.5, 2.0)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_shortest_digits_tell_a_number_from_every_other(number: float) -> None:
    assert float(shortest(number)) == number
    assert not shortest(number).endswith(".0")


# -- refusals --------------------------------------------------------------------------------------------------

DURATION, MAP = "duration_s = 1", 'map = { kind = "shift", by = 1 }'


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[run]", "stat = 1\n[run]", "s.toml: stat: unknown key; did you mean 'start'?"),
        ("[run]", 'start = "1"\n[run]', 's.toml: start: got "1"; a finite number would do'),
        ("[run]", "start = nan\n[run]", "s.toml: start: got NaN; a finite number would do"),
        ("[run]", "[run", "s.toml is not TOML: "),
        ("[run]\nupdates = 3", "", "s.toml: the table [run] is missing"),
        ("updates = 3", "", "s.toml: run: a run needs an end: give time_s, updates, or versions"),
        ("updates = 3", "updates = 2.5", "s.toml: run.updates: got 2.5; an integer would do"),
        ('name = "fedasync"', "", "s.toml: strategy.name: this key is missing"),
        ('name = "fedasync"', 'name = "fedasink"', "strategy.name: unknown name 'fedasink'; did you mean 'fedasync'?"),
        ("alpha = 1", "alpa = 1", "s.toml: strategy.alpa: unknown key; did you mean 'alpha'?"),
        ("alpha = 1", "alpha = 2", "s.toml: strategy: fedasync: alpha must "),
        ("alpha = 1", 'convention = "apfl"', "s.toml: strategy.convention: got \"apfl\"; 'paper', 'plato' or 'flgo'"),
        ("concurrency = 1", "concurrency = 2", "a concurrency of 2 can never be reached by 1 clients"),
        ("[[client]]", "[client]", "s.toml: client: got {"),
        ("[[client]]", "[[cleint]]", "s.toml: cleint: unknown key; did you mean 'client'?"),
        ('name = "A"', "", "s.toml: client 1.name: this key is missing"),
        ('name = "A"', "name = 1", "s.toml: client 1.name: got 1; a string would do"),
        (DURATION, "", "s.toml: client 1.duration_s: this key is missing"),
        (DURATION, "duration_s = -1", "client 1: duration_s, where it is no list, must be a finite number ≥ 0, got -1"),
        (DURATION, 'duration_s = "1"', "duration_s, where it is no list, must be a finite number ≥ 0, got '1'"),
        (DURATION, "duration_s = [1, inf]", "client 1: duration_s[1] must be a finite number ≥ 0, got inf"),
        (DURATION, "duration_s = []", "client 1: duration_s is an empty list; at least one number of seconds would do"),
        (DURATION, "duraton_s = 1", "s.toml: client 1.duraton_s: unknown key; did you mean 'duration_s'?"),
        (MAP, "", "s.toml: client 1.map: this key is missing"),
        (MAP, "map = 1", "s.toml: client 1.map: got 1; a table would do"),
        (MAP, "map = { by = 1 }", "s.toml: client 1.map.kind: this key is missing; 'contract', 'constant', 'shift'"),
        ('"shift"', '"shove"', "s.toml: client 1.map.kind: got \"shove\"; 'contract', 'constant', 'shift' would do"),
        ("by = 1", "bye = 1", "s.toml: client 1.map.bye: unknown key; did you mean 'by'?"),
        ("by = 1", 'by = "1"', 's.toml: client 1.map.by: got "1"; a number would do'),
        ("by = 1", "by = nan", "s.toml: client 1.map: by must be a finite number, got nan"),
        (MAP, f"{MAP}\nsamples = 0", "s.toml: client 1: samples must be an integer ≥ 1, got 0"),
        (MAP, f'{MAP}\nform = "sum"', "s.toml: client 1.form: got \"sum\"; 'parameters' or 'delta' would do"),
        (MAP, f'{MAP}\n[[client]]\nname = "A"\n{DURATION}\n{MAP}', "client 2.name: got 'A', as client 1; another name"),
        ('name = "fedasync"\nconcurrency = 1\nalpha = 1', 'name = "fednova"\ncohort = 1', "local SGD would do"),
        ("updates = 3", "time_s = 1e9\n", None),
    ],
)
def test_a_scenario_that_cannot_be_played(fedasync: Command, old: str, new: str, said: str | None) -> None:
    text = changed(A_ALONE, (old, new))
    if said is None:  # work that takes no time, and only time as an end
        text, said = changed(text, (DURATION, "duration_s = 0")), "the work of client 0 takes 0 s"
    Path("s.toml").write_text(text)
    end = fedasync("conformance", "s.toml")
    assert (end.status, end.out) == (2, "")
    assert said in end.complaint
    assert "s.toml" in end.complaint


@pytest.mark.parametrize(
    ("file", "said"), [("no.toml", "no.toml cannot be read: No such file"), (".", ". cannot be read: Is a directory")]
)
def test_a_file_that_cannot_be_read(fedasync: Command, file: str, said: str) -> None:
    end = fedasync("conformance", file, "--json")
    assert (end.status, end.out) == (2, "")
    assert said in end.complaint


def test_no_client_at_all(fedasync: Command) -> None:
    Path("s.toml").write_text(A_ALONE.partition("[[client]]")[0])
    assert "s.toml: client: this key is missing; one [[client]]" in fedasync("conformance", "s.toml").complaint
