"""Every definition of staleness: the published vector, logs of known answers, laws, and a slow recount."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.runs import staleness_kinds as kinds
from fedasync.runs.lease_arrays import lease_arrays
from fedasync.runs.staleness_kinds import (
    KINDS,
    Trained,
    older_tokens,
    staleness_table,
    summarise,
    trained_answers,
)

from .cluster_logs import Cluster, rollouts
from .logs import Row, record, table

SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "eta": st.integers(0, 5),
        "every": st.integers(1, 2),
        "delay_s": st.sampled_from([0.0, 0.3, 2.0]),
        "most_stale": st.sampled_from([None, 2, 4]),
        "abort": st.booleans(),
        "short": st.booleans(),
        "requeue": st.booleans(),
    }
)


def steps(until: int, publish: set[int] | None = None, from_version: int = 0) -> list[Row]:
    """Commits up to a version, one a second, each published unless told otherwise."""
    rows: list[Row] = []
    for version in range(from_version + 1, until + 1):
        rows.append((float(version), "committed", -1, -1, -1, version, -1, None))
        if publish is None or version in publish:
            rows.append((float(version), "published", -1, -1, -1, version, -1, None))
    return rows


def used(lease: int, base: int, version: int, delivered: int | None = None) -> list[Row]:
    """Delivered just before that version (or an older one) ends, and used from it."""
    at = version if delivered is None else delivered
    return [
        (at + 0.5, "delivered", lease, lease, base, at, at - base, None),
        *steps(version, from_version=at),
        (version + 0.9, "consumed", lease, lease, base, version, version - base, None),
    ]


def all_of(trained: Trained) -> dict[str, Any]:
    return {kind.name: kind.values(trained).tolist() for kind in KINDS}


def test_an_answer_that_spans_versions() -> None:
    """One token of v3, one of v4, trained from v5: dispatch and oldest 2, newest 1, mean 1.5; it spans 2 versions."""
    log = table([*steps(3), (3.1, "admitted", 0, 0, 3, 3, -1, None), *steps(5, from_version=3), *used(0, 3, 5)])
    answer = {"lease": 0, "generated_tokens": 2, "base_version": 3, "first_version": 3, "last_version": 4}
    trained = trained_answers(
        log, rollouts({**answer, "mean_version": 3.5, "segments": 2, "start_s": 3.1, "end_s": 4.2})
    )
    found = all_of(trained)
    assert (found["dispatch"], found["oldest"], found["newest"], found["token_mean"]) == ([2], [2], [1], [1.5])
    assert (found["span"], found["spanned"]) == ([1], [2])
    assert (found["before_delivery"], found["oldest_in_flight"], found["in_queue"]) == ([2], [2], [0])
    assert (found["episode_end"], found["publications"], found["group_oldest"]) == ([1], [2], [2])
    assert found["seconds"] == [pytest.approx(5.9 - 3.1)]
    assert older_tokens(trained, [0, 1, 2]) == [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)]


def test_time_in_the_queue_counts() -> None:
    """A quick answer that waits for three versions looks fresh to who counts its flight only."""
    log = table([(0.0, "admitted", 0, 0, 0, 0, -1, None), *used(0, 0, 3, delivered=0), *steps(4, from_version=3)])
    found = all_of(trained_answers(log, rollouts({"lease": 0, "end_s": 0.4})))
    assert (found["oldest_in_flight"], found["in_queue"], found["oldest"], found["dispatch"]) == ([0], [3], [3], [3])


def test_publications_are_counted_not_versions() -> None:
    """Of versions 1 to 5 only 2 and 4 are published: work from 2, used from 5, met one publication."""
    rows = [
        *steps(3, {2}),
        (3.1, "admitted", 0, 0, 2, 2, -1, None),
        *steps(5, {4}, from_version=3),
        (5.5, "delivered", 0, 0, 2, 5, 3, None),
        (5.9, "consumed", 0, 0, 2, 5, 3, None),
        (5.9, "committed", -1, -1, -1, 6, -1, None),
    ]
    answer = {"lease": 0, "base_version": 2, "first_version": 2, "last_version": 2, "start_s": 3.1, "end_s": 4.0}
    found = all_of(trained_answers(table(rows), rollouts(answer)))
    assert (found["dispatch"], found["publications"]) == ([3], [1])
    assert found["publication_debt"] == [1]  # version 3 had been made and not shown
    assert found["group_oldest"] == [2]  # version 4 was on the servers
    assert found["episode_end"] == [3]  # it ended in the instant of the publication of 4, not after it
    later = {**answer, "end_s": 4.01}
    assert all_of(trained_answers(table(rows), rollouts(later)))["episode_end"] == [1]


def test_lag_in_samples_and_shares_of_batches() -> None:
    """Two groups, of two answers and of one, make versions 1 and 2; the second was dispatched before version 1."""
    rows: list[Row] = [
        (0.0, "admitted", 0, 0, 0, 0, -1, None),
        (0.0, "admitted", 1, 1, 0, 0, -1, None),
        (0.5, "delivered", 0, 0, 0, 0, 0, None),
        (1.0, "consumed", 0, 0, 0, 0, 0, None),
        *steps(1),
        (1.1, "admitted", 2, 2, 1, 1, -1, None),
        (1.5, "delivered", 1, 1, 0, 1, 1, None),
        (1.6, "delivered", 2, 2, 1, 1, 0, None),
        (2.0, "consumed", 1, 1, 0, 1, 1, None),
        (2.0, "consumed", 2, 2, 1, 1, 0, None),
        *steps(2, from_version=1),
    ]
    fresh = {"lease": 2, "base_version": 1, "first_version": 1, "last_version": 1, "start_s": 1.1, "end_s": 1.6}
    answers = rollouts(
        {"lease": 0, "end_s": 0.5},
        {"lease": 0, "answer": 1, "end_s": 0.4},
        {"lease": 1, "generated_tokens": 3, "end_s": 1.5},
        {**fresh, "generated_tokens": 1},
        {**fresh, "answer": 1, "generated_tokens": 2},
    )
    trained = trained_answers(table(rows), answers)
    assert kinds.samples(trained).tolist() == [0, 0, 2, 0, 0]
    assert kinds.stale_share(trained).tolist() == [0.0, pytest.approx(1 / 3)]
    assert kinds.stale_share(trained, by_tokens=True).tolist() == [0.0, 0.5]
    late = trained_answers(table(rows), answers, from_version=1)
    assert kinds.samples(late).tolist() == [2, 0, 0]  # a warm-up hides answers, not the samples trained in it
    by_kind = {row["kind"]: row for row in staleness_table(trained)}
    assert by_kind["dispatch"]["mean"] == pytest.approx(1 / 5)
    assert by_kind["dispatch"]["token_mean"] == pytest.approx(3 / 8)
    assert by_kind["stale_share"]["token_mean"] == 0.25


def test_only_answers_that_had_ended_when_their_group_was_used_are_trained() -> None:
    rows: list[Row] = [
        (0.0, "admitted", 0, 0, 0, 0, -1, None),
        (0.0, "admitted", 1, 1, 0, 0, -1, None),
        (0.0, "admitted", 2, 2, 0, 0, -1, None),
        (0.5, "delivered", 0, 0, 0, 0, 0, None),
        (0.5, "delivered", 1, 1, 0, 0, 0, None),
        (1.0, "consumed", 0, 0, 0, 0, 0, None),
        *steps(1),
        (1.5, "rejected", 2, 2, 0, 1, 1, "stale"),
    ]
    ended = [{"lease": lease, "answer": answer, "end_s": 0.5} for lease in range(3) for answer in range(2)]
    trained = trained_answers(table(rows), rollouts(*ended, {"lease": 0, "answer": 2, "end_s": np.nan}))
    assert trained.lease.tolist() == [0, 0]


@settings(max_examples=25, deadline=None)
@given(SETTINGS)
def test_laws_of_any_run(chosen: dict[str, Any]) -> None:
    cluster = Cluster(versions=12, **chosen).play()
    trained = trained_answers(cluster.events, cluster.rollouts)
    assert len(trained) > 0
    found = {kind.name: kind.values(trained) for kind in KINDS}
    np.testing.assert_array_equal(found["dispatch"], found["before_delivery"] + found["in_queue"])
    np.testing.assert_array_equal(found["oldest"], found["oldest_in_flight"] + found["in_queue"])
    np.testing.assert_array_equal(found["span"], found["oldest"] - found["newest"])
    assert (found["newest"] <= found["token_mean"] + 1e-9).all()
    assert (found["token_mean"] <= found["oldest"] + 1e-9).all()
    assert (found["spanned"] <= found["span"] + 1).all()
    assert (found["episode_end"] <= found["dispatch"]).all()
    assert all((values >= 0).all() for name, values in found.items() if name != "group_oldest")
    assert (found["publications"] <= found["dispatch"]).all()
    if chosen["every"] == 1:
        np.testing.assert_array_equal(found["publications"], found["dispatch"])
        assert not found["publication_debt"].any()
    if chosen["every"] == 1 and chosen["delay_s"] == 0 and not chosen["short"]:
        each = cluster.batch * cluster.answers
        np.testing.assert_array_equal(found["samples"], found["dispatch"] * each)
    if chosen["eta"] == 0 and chosen["every"] == 1:
        assert not found["dispatch"].any()
    shares = older_tokens(trained, range(20))
    assert all(-1e-12 <= low <= high + 1e-12 <= 1 + 2e-12 for low, high in shares)
    assert all(before[0] >= after[0] - 1e-12 for before, after in pairwise(shares))


@settings(max_examples=20, deadline=None)
@given(SETTINGS)
def test_definitions_are_what_a_slow_recount_finds(chosen: dict[str, Any]) -> None:
    """Row by row over the log, and token by token over the answers."""
    cluster = Cluster(versions=8, servers=2, running=3, **chosen).play()
    events, answers = cluster.events, cluster.rollouts
    trained = trained_answers(events, answers)
    found = {name: iter(values) for name, values in all_of(trained).items()}
    history = list(events.iter_rows(named=True))
    samples: dict[int, int] = {}
    expected_tokens: list[tuple[int, float]] = []
    about: list[tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, int]]] = []
    for row in answers.iter_rows(named=True):
        own = {e["kind"]: {**e, "at": i} for i, e in enumerate(history) if e["lease"] == row["lease"]}
        if "consumed" not in own or row["end_s"] is None or row["end_s"] > own["delivered"]["time_s"]:
            continue
        about.append((row, own, {}))
        samples[own["consumed"]["version"]] = samples.get(own["consumed"]["version"], 0) + 1
    for row, own, _ in about:
        end, begin = own["consumed"]["at"], own["admitted"]["at"]
        version = own["consumed"]["version"]
        shown = [e["version"] for e in history[:end] if e["kind"] == "published"]
        assert next(found["dispatch"]) == version - row["base_version"]
        assert next(found["in_queue"]) == sum(e["kind"] == "committed" for e in history[own["delivered"]["at"] : end])
        assert next(found["publications"]) == sum(e["kind"] == "published" for e in history[begin:end])
        made = sum(e["kind"] == "committed" for e in history[:begin])
        assert next(found["publication_debt"]) == made - row["base_version"]
        before = [e["version"] for e in history if e["kind"] == "published" and e["time_s"] < row["end_s"]]
        assert next(found["episode_end"]) == version - (before[-1] if before else 0)
        assert next(found["seconds"]) == pytest.approx(own["consumed"]["time_s"] - own["admitted"]["time_s"])
        assert next(found["samples"]) == sum(n for v, n in samples.items() if row["base_version"] <= v < version)
        assert shown == sorted(shown)
        answer = cluster.groups[row["lease"]].answers[row["answer"]]
        parts = cluster.stretches(answer)
        whole = sum(s for s, _ in parts)
        expected_tokens.append((row["generated_tokens"], sum(s for s, v in parts if version - v > 1) / whole))
    assert all(not list(rest) for name, rest in found.items() if name in ("dispatch", "in_queue", "seconds"))
    low, high = older_tokens(trained, [1])[0]
    total = sum(tokens for tokens, _ in expected_tokens)
    assert low - 1e-9 <= sum(tokens * share for tokens, share in expected_tokens) / total <= high + 1e-9


def test_a_record_and_its_table_tell_the_same() -> None:
    cluster = Cluster(versions=12, eta=3, most_stale=1, every=2).play()
    nothing = {None: -1}
    rows = [tuple(nothing.get(x, x) if i not in (7,) else x for i, x in enumerate(row)) for row in cluster.rows]
    packed, plain = lease_arrays(record(rows)), lease_arrays(cluster.events)  # type: ignore[arg-type]
    for name in plain.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(packed, name), getattr(plain, name), err_msg=name)
    assert packed.reasons == ("stale",)
    assert packed.why_lost(int(np.flatnonzero(packed.lost)[0])) == "stale"


def test_a_log_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a log's leases are not numbered 0, 1, 2, … in the order"):
        lease_arrays(table([(0.0, "admitted", 3, 0, 0, 0, -1, None)]))
    with pytest.raises(ValueError, match=r"^a log has a row 'delivered' of a lease that was never admitted$"):
        lease_arrays(table([(0.0, "delivered", 3, 0, 0, 0, 0, None)]))


def test_no_answers_have_no_staleness() -> None:
    cluster = Cluster(versions=3).play()
    nothing = trained_answers(cluster.events, cluster.rollouts.clear())
    assert staleness_table(nothing) == []
    assert older_tokens(nothing, [0, 1]) == [(0.0, 0.0), (0.0, 0.0)]
    assert all(len(kind.values(nothing)) == 0 for kind in KINDS)


@given(
    st.lists(st.tuples(st.integers(-5, 300), st.integers(0, 9)), min_size=1, max_size=60),
    st.sampled_from([np.int64, np.float64]),
)
def test_weights_count_like_copies(pairs: list[tuple[int, int]], kind: Any) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    values = values.astype(kind)
    copies = np.repeat(values, weights)
    found = summarise(values, weights)
    if not len(copies):
        assert found == {"mean": None, "p50": None, "p99": None, "max": None}
        return
    assert found["mean"] == pytest.approx(copies.mean())
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        assert found[name] == np.quantile(copies, share, method="inverted_cdf")
        assert summarise(copies)[name] == found[name]


def test_older_tokens_are_bounds_that_are_met() -> None:
    """Three versions with the mean in the middle: the middle one made all but two tokens, or none."""
    log = table([(0.0, "admitted", 0, 0, 0, 0, -1, None), *steps(2), *used(0, 0, 2)])
    answer = {"lease": 0, "last_version": 2, "mean_version": 1.0, "segments": 3, "end_s": 2.2, "generated_tokens": 10}
    trained = trained_answers(log, rollouts(answer))
    assert older_tokens(trained, [0, 1, 2]) == [(0.5, 1.0), (0.0, 0.5), (0.0, 0.0)]
    thirds = replace(trained, mean=np.array([1.5]))
    assert older_tokens(thirds, [0])[0] == pytest.approx((0.25, 0.5))


def test_every_definition_stands_in_the_page() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "log.md").read_text()
    for kind in KINDS:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{kind.name}` |")]
        assert line.endswith(f"| {kind.formula.replace('consumed.version', 'used')} | {kind.systems} |")


def test_the_parts_of_a_table_are_numbers() -> None:
    cluster = Cluster(versions=10, eta=2).play()
    for row in staleness_table(trained_answers(cluster.events, cluster.rollouts)):
        assert set(row) == {
            *("kind", "unit", "of", "mean", "p50", "p99", "max", "token_mean", "token_p50", "token_p99"),
        }
        assert row["p50"] <= row["p99"] <= row["max"]
        assert isinstance(pl.Series([row["mean"]])[0], float)
