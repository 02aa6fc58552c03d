"""What trainer and servers spend time on: closed forms of runs made by hand, and shares that add up to 1."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.runs.busy_servers import covered_s, servers_s
from fedasync.runs.iterations import iterations_frame
from fedasync.runs.lease_arrays import lease_arrays
from fedasync.runs.step_times import PARTS
from fedasync.runs.time_shares import SERVERS, TRAINER, measured_s, time_shares

STEPS = [
    (10.0, {"wait_s": 6.0, "train_s": 4.0}),
    (20.0, {"sync_s": 1.0, "save_s": 1.0, "evaluate_s": 2.0, "wait_s": 2.5, "train_s": 3.0, "measure_s": 0.5}),
    (30.0, {"sync_s": 1.0, "wait_s": 4.0, "lost_s": 1.0, "down_s": 2.0, "train_s": 2.0}),
]
"""Three versions: when each was committed, and what its step was spent on."""


def metrics(steps: list[tuple[float, dict[str, float]]] = STEPS) -> pl.DataFrame:
    rows = [
        (at_s, version, name, value)
        for version, (at_s, parts) in enumerate(steps, start=1)
        for name, value in {"step_s": sum(parts.values()), **parts, "tokens": 7.0}.items()
    ]
    return pl.DataFrame(rows, schema=["time_s", "version", "name", "value"], orient="row")


def test_shares_of_the_trainer_by_hand() -> None:
    """Of 20 s after the first version; a part has a share, or stands in one: lost work is training."""
    assert measured_s(metrics(), 1) == (10.0, 30.0)
    assert time_shares(metrics(), {}, 1, 1)["trainer"] == pytest.approx(
        {
            "training": 6 / 20,
            "syncing": 2 / 20,
            "switching": 0.0,
            "saving": 1 / 20,
            "evaluating": 2.5 / 20,
            "waiting": 6.5 / 20,
            "down": 2 / 20,
        }
    )


def test_every_part_of_a_step_is_in_one_share() -> None:
    names = [name for parts in TRAINER.values() for name in parts]
    assert sorted(names) == sorted(["train_s", *PARTS.values()])


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=9, max_size=9), min_size=1, max_size=5), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_shares_add_up_to_1_or_are_not_there(parts: list[list[float]], warm_up: int) -> None:
    at_s = np.cumsum([sum(each) for each in parts])
    steps = [
        (float(time_s), dict(zip(("train_s", *PARTS.values()), each, strict=True)))
        for time_s, each in zip(at_s, parts, strict=True)
    ]
    found = time_shares(metrics(steps), {"decoding": 0.0}, 3, warm_up)
    span = measured_s(metrics(steps), warm_up)
    for words, shares in ((TRAINER, found["trainer"]), (SERVERS, found["servers"])):
        assert list(shares) == list(words)
        known = [share for share in shares.values() if share is not None]
        if span is None or span[1] <= span[0]:
            assert not known
        else:
            assert sum(known) == pytest.approx(1.0)


def test_nothing_is_measured_of_a_run_that_ended_in_its_warm_up() -> None:
    assert measured_s(metrics(), 3) is None
    shares = time_shares(metrics(), {"decoding": 1.0}, 2, 3)
    assert {share for each in shares.values() for share in each.values()} == {None}


# -- servers of a real run -----------------------------------------------------------------------------------------


def events() -> pl.DataFrame:
    """Leases 0 and 1 asked for at 1 s and 21 s, and a third at 25 s; every version is published when it is made."""
    rows = [(1.0, "admitted", 0, 0, 0, 0)]
    rows += [(10.0, "committed", None, None, None, 1), (10.0, "published", None, None, None, 1)]
    rows += [(20.0, "committed", None, None, None, 2), (20.0, "published", None, None, None, 2)]
    rows += [(21.0, "admitted", 1, 1, 2, 2), (25.0, "admitted", 2, 2, 2, 2)]
    rows += [(30.0, "committed", None, None, None, 3), (30.0, "published", None, None, None, 3)]
    names = ("time_s", "kind", "lease", "worker", "base_version", "version")
    return pl.DataFrame(rows, schema=list(names), orient="row").with_columns(
        staleness=pl.lit(None, pl.Int64), reason=pl.lit(None, pl.String)
    )


ROUNDS = [
    *((0, at_s, 1, 0, 1.0, 0, 0.0) for at_s in (6.0, 7.0, 8.0, 9.0, 10.0, 11.0)),
    (0, 14.0, 1, 0, 1.0, 9, 0.5),  # weights at 11 s: it stood still until 12.5 s, and made its KV cache anew
    *((0, at_s, 1, 0, 1.0, 0, 0.0) for at_s in (15.0, 16.0)),
    (0, 24.0, 1, 0, 1.0, 5, 1.0),  # asked for at 21 s, when the weights came, and begun at 22 s
    (1, 30.0, 1, 0, 2.0, 0, 0.0),  # of an answer that the end cut off
]
ANSWERS = {"lease": [0, 1, 2], "server": [0, 0, -1], "start_s": [5.0, 22.0, 25.0], "end_s": [16.0, 24.0, None]}


def test_seconds_of_two_servers_by_hand() -> None:
    """Server 0 is idle from 16 s to 21 s and from 24 s on, server 1 until 28 s."""
    names = ("server", "at_s", "running", "context_tokens", "seconds", "prefill_tokens", "prefill_s")
    rounds = iterations_frame(dict(zip(names, map(list, zip(*ROUNDS, strict=True)), strict=True)))
    span = measured_s(metrics(), 1)
    assert span is not None
    leases = lease_arrays(events())
    spent = servers_s(leases, metrics(), pl.DataFrame(ANSWERS), rounds, *span)
    assert spent == pytest.approx({"decoding": 5.0 + 2.0, "prefilling": 0.5 + 1.0, "paused": 1.5 + 1.0})
    assert time_shares(metrics(), spent, 2, 1)["servers"] == pytest.approx(
        {"decoding": 7 / 40, "prefilling": 1.5 / 40, "paused": 2.5 / 40, "down": 0.0, "idle": 29 / 40}
    )
    # Of an engine that tells no decoding steps, answers alone are known: from 10 s to 16 s, and from 22 s to 24 s.
    assert servers_s(leases, metrics(), pl.DataFrame(ANSWERS), rounds.clear(), *span) == pytest.approx(
        {"decoding": 8.0, "prefilling": 0.0, "paused": 0.0}
    )


def test_time_that_several_answers_take_counts_once() -> None:
    spans = np.array([[6.0, 9.0], [1.0, 3.0], [2.0, 4.0], [1.5, 1.75], [20.0, 21.0]])
    assert covered_s(spans, 0.0, 8.0) == pytest.approx(5.0)
    assert covered_s(spans, 2.0, 5.0) == pytest.approx(2.0)
    assert covered_s(spans[:0], 0.0, 8.0) == 0.0
