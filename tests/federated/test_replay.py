"""A run made again from its log is the run, row by row and bit by bit; and a difference is told where it lies."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedasync.aggregation.model import Contribution
from fedasync.core import KINDS, AdaptiveTimeout, Disagreement, Distance, EventLog, EveryN
from fedasync.core.log import COLUMNS
from fedasync.federated.replay import Replayed, ReplayError, replay
from fedasync.simulation import Population, laws
from fedasync.simulation.availability import OnOff
from fedasync.strategies import FEDERATED, STRATEGIES

from ..simulation.rows import KNOBS
from .recording import CLIENTS, Recorded, bits, record

NAMES = [row.__name__ for row in FEDERATED]
UNEVEN = Population(CLIENTS, laws.Lognormal(1.0, 0.6), slowness=laws.Uniform(0.5, 2.0))
POPULATIONS: dict[str, tuple[Population, dict[str, Any], dict[str, Any]]] = {
    "uneven": (UNEVEN, {}, {}),
    "ties": (Population(CLIENTS, laws.Values((1.0, 0.5, 0.5, 0.25, 2.0, 1.0, 1.0, 1.5))), {}, {}),
    "drop-outs": (replace(UNEVEN, dropout_probability=0.2), {}, {}),
    "crashes": (replace(UNEVEN, crash_probability=0.15), {"lease_timeout_s": 2.5}, {}),
    "crashes, adaptive": (
        replace(UNEVEN, crash_probability=0.15),
        {"lease_timeout_s": AdaptiveTimeout(3.0, at_least=4)},
        {},
    ),
    "slow server": (UNEVEN, {}, {"server_step_s": 0.3}),
    "slow server, time-outs": (
        replace(UNEVEN, dropout_probability=0.1, crash_probability=0.1),
        {"lease_timeout_s": 2.0},
        {"server_step_s": 0.4},
    ),
    "stopping the stale": (UNEVEN, {"max_staleness": 1, "stop_stale": True}, {}),
    "dropping the stale": (UNEVEN, {"max_staleness": 1}, {"server_step_s": 0.25}),
    "offline": (
        replace(UNEVEN, availability=OnOff(laws.Exponential(4.0), laws.Exponential(2.0))),
        {"lease_timeout_s": 4.0},
        {},
    ),
    "unfit": (UNEVEN, {}, {"unfit": 0.2}),
    "published rarely": (UNEVEN, {"publication": EveryN(3, "abort")}, {}),
    "published by distance": (UNEVEN, {"publication": Distance(0.01)}, {}),
    "published by disagreement": (UNEVEN, {"publication": Disagreement(0.3)}, {"server_step_s": 0.1}),
}


@cache
def recorded(name: str, population: str, seed: int = 3) -> Recorded:
    world, knobs, limits = POPULATIONS[population]
    strategy = STRATEGIES[name](**{**KNOBS[name], **knobs})
    return record(strategy, world, seed=seed, updates=60, time_s=60.0, **limits)


def again(run: Recorded, rows: Any = None, **arguments: Any) -> tuple[Replayed, list[bytes]]:
    versions: list[bytes] = []
    told: dict[str, Any] = {
        "contributions": run.contribution,
        "profile": run.profile,
        "arrays": run.arrays(),
        "on_version": lambda version, model: versions.append(bits(model)),
        **arguments,
    }
    return replay(run.rows if rows is None else rows, run.reasons, run.strategy, **told), versions


def fits(name: str, population: str) -> bool:
    """The strategy takes such bounds."""
    try:
        STRATEGIES[name](**{**KNOBS[name], **POPULATIONS[population][1]})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("name", "population"), [(n, p) for n in NAMES for p in POPULATIONS if fits(n, p)])
def test_a_run_is_made_again_bit_for_bit(name: str, population: str) -> None:
    run = recorded(name, population)
    found, versions = again(run)
    assert found.rows == len(run.rows) > 50
    assert found.beyond == ()
    assert versions == run.versions
    assert found.versions == len(versions) == run.run.summary["versions"]
    assert found.coordinator.ledger.as_dict() == run.run.summary["ledger"]


OTHERWISE = {
    "over-selected": ("fedavg", {"keep": 2}, {}),
    "before the step": ("fedbuff", {"redispatch": "before_step"}, {"server_step_s": 0.3}),
    "together": ("fedasync", {"simultaneous": "together"}, {}),
    "limited rounds": ("safa", {"round_limit_s": 1.1}, {"server_step_s": 0.2}),
    "fixed times, nobody there": ("fedfix", {"interval_s": 0.2}, {"server_step_s": 0.05}),
    "small groups": ("fedcompass", {"least_steps": 1, "most_steps": 9, "concurrency": 8}, {"server_step_s": 0.1}),
}


@settings(max_examples=6)
@given(seed=st.integers(0, 99))
@pytest.mark.parametrize("case", list(OTHERWISE))
def test_so_is_one_with_other_knobs(case: str, seed: int) -> None:
    name, knobs, limits = OTHERWISE[case]
    strategy = STRATEGIES[name](**{**KNOBS[name], "lease_timeout_s": 3.0, **knobs})
    world = replace(UNEVEN, dropout_probability=0.1, crash_probability=0.1)
    run = record(strategy, world, seed=seed, updates=40, time_s=60.0, **limits)
    found, versions = again(run)
    assert (found.beyond, versions) == ((), run.versions)


def test_the_rows_alone_are_compared_without_arrays() -> None:
    run = recorded("fedbuff", "uneven")
    found, versions = again(run, arrays=None, contributions=lambda lease: None)
    assert (found.versions, versions, found.contributions) == (len(run.versions), [], 0)


@given(end=st.integers(0, 150))
@settings(max_examples=20)
def test_a_log_that_ends_anywhere_is_a_run_that_goes_on(end: int) -> None:
    """What the core knows beyond the last row comes first in the log that goes on, and then the run is the run."""
    run = recorded("fedbuff", "crashes")
    found, _ = again(run, run.rows[:end])
    log = EventLog()
    coordinator = found.continued(log)
    rows = [(*row[:7], None if row[7] < 0 else log.reasons[row[7]]) for row in log.rows()]
    assert rows == [(*row[:7], None if row[7] < 0 else run.reasons[row[7]]) for row in run.rows[end:][: len(rows)]]
    assert coordinator.snapshot() == found.coordinator.snapshot()


# -- differences -------------------------------------------------------------------------------------------------------


def place(run: Recorded, kind: str, nth: int = 5) -> int:
    return [number for number, row in enumerate(run.rows) if KINDS[row[1]] == kind][nth]


def changed(run: Recorded, number: int, **fields: Any) -> list[Any]:
    row = dict(zip(COLUMNS, run.rows[number], strict=True))
    return [*run.rows[:number], tuple({**row, **fields}.values()), *run.rows[number + 1 :]]


def told(run: Recorded, rows: Any = None, **arguments: Any) -> str:
    with pytest.raises(ReplayError) as raised:
        again(run, rows, **arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_missing_contribution_is_told_with_row_and_lease() -> None:
    run = recorded("fedbuff", "uneven")
    number = place(run, "delivered")
    lease = run.rows[number][2]
    line = told(run, contributions=lambda each: None if each == lease else run.contribution(each))
    assert line.startswith(f"row {number}: recorded delivered (lease {lease}, ")
    assert f"the contribution of lease {lease} is missing" in line


def test_a_damaged_contribution_is_told_with_row_and_lease() -> None:
    run = recorded("fedbuff", "uneven")
    number = place(run, "delivered")
    lease = run.rows[number][2]

    def contribution(each: int) -> Contribution | None:
        if each == lease:
            raise ValueError("contributions/9.safetensors: damaged")
        return run.contribution(each)

    assert told(run, contributions=contribution).startswith(f"row {number}: recorded delivered (lease {lease}, ")


def test_a_contribution_that_was_accepted_and_is_not_fit_is_told() -> None:
    run = recorded("fedbuff", "uneven")
    lease = run.rows[place(run, "delivered")][2]

    def contribution(each: int) -> Contribution | None:
        found = run.contribution(each)
        if found is not None and each == lease:
            found.values[2] = float("inf")
        return found

    assert "its contribution is not fit for use: not finite (1 of 3 values" in told(run, contributions=contribution)


def test_a_contribution_that_was_rejected_and_is_fit_is_told() -> None:
    run = recorded("fedbuff", "unfit")
    number = next(n for n, row in enumerate(run.rows) if KINDS[row[1]] == "rejected")

    def contribution(each: int) -> Contribution | None:
        found = run.contribution(each)
        if found is not None:
            found.values.nan_to_num_()
        return found

    line = told(run, contributions=contribution)
    assert line.startswith(f"row {number}: recorded rejected")
    assert line.endswith("its contribution is fit for use")


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(["fedbuff", "fedavg", "fedfix", "fedasync"]))
def test_a_changed_row_is_told_where_it_was_changed(data: st.DataObject, name: str) -> None:
    """Whatever else a row says than it did, the replay stops there; with another worker, where that shows."""
    run = recorded(name, "crashes")
    number = data.draw(st.integers(0, len(run.rows) - 1))
    column = data.draw(st.sampled_from([*COLUMNS][1:]))
    row = dict(zip(COLUMNS, run.rows[number], strict=True))
    kind, lease = KINDS[row["kind"]], row["lease"]
    assume((kind, column) != ("ignored", "lease"))  # which lease had ended moves nothing
    other_worker = (kind, column) == ("admitted", "worker")
    assume(not other_worker or any(later[2] == lease for later in run.rows[number + 1 :]))
    new = row[column] + data.draw(st.sampled_from([1, -1, 3]))
    # Nobody kept what a client that failed did not bring, and what was rejected need not be kept.
    assume(not (column == "kind" and kind == "failed" and KINDS[new] == "rejected"))
    line = told(run, changed(run, number, **{column: new}))
    found = int(line.split(":")[0].removeprefix("row "))
    assert found >= number if other_worker else found == number


@settings(max_examples=20)
@given(number=st.integers(1, 100))
def test_a_time_that_goes_back_is_told(number: int) -> None:
    run = recorded("fedbuff", "uneven")
    line = told(run, changed(run, number, time_s=-1.0))
    assert line.startswith(f"row {number}: recorded ")


@pytest.mark.parametrize("kind", ["admitted", "delivered", "consumed", "committed", "published", "failed"])
def test_a_row_too_few_is_told(kind: str) -> None:
    run = recorded("fedbuff", "crashes")
    number = place(run, kind, 2)
    line = told(run, [*run.rows[:number], *run.rows[number + 1 :]])
    assert int(line.split(":")[0].removeprefix("row ")) >= number


def test_the_words_of_a_difference() -> None:
    run = recorded("fedasync", "uneven")
    number = place(run, "delivered", 0)
    row = run.rows[number]
    assert told(run, changed(run, number, staleness=7)) == (
        f"row {number}: recorded delivered (lease {row[2]}, worker {row[3]}, base version 0, version 0, staleness 7) "
        f"at {row[0]!r} s; the core did delivered (lease {row[2]}, worker {row[3]}, base version 0, version 0, "
        f"staleness 0) at {row[0]!r} s"
    )
