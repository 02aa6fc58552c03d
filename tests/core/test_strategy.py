"""What can never make progress is refused when it is made, in one line that says what would do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from fedasync.core import (
    Barrier,
    Cohort,
    Compass,
    Concurrency,
    EveryN,
    EveryVersion,
    Grouped,
    Periodic,
    Quota,
    Sliding,
    StalenessBudget,
    Strategy,
    Tiers,
    Tumbling,
)

from .driving import strategy

NAN, INF = float("nan"), float("inf")

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "empty cohort": (lambda: Cohort(0), "cohort size must be an integer ≥ 1, got 0"),
    "keep more than started": (lambda: Cohort(3, keep=4), "a cohort of 3 can keep 1 to 3 results, got keep = 4"),
    "keep none": (lambda: Cohort(3, keep=0), "keep must be an integer ≥ 1, got 0"),
    "no concurrency": (lambda: Concurrency(0), "concurrency must be an integer ≥ 1, got 0"),
    "negative eta": (lambda: StalenessBudget(-1, 4), "eta must be an integer ≥ 0, got -1"),
    "empty batch": (lambda: StalenessBudget(0, 0), "batch must be an integer ≥ 1, got 0"),
    "no limit": (lambda: StalenessBudget(0, 1, 0), "limit must be an integer ≥ 1, got 0"),
    "empty buffer": (lambda: Tumbling(0), "buffer size must be an integer ≥ 1, got 0"),
    "empty window": (lambda: Sliding(0), "window size must be an integer ≥ 1, got 0"),
    "publish never": (lambda: EveryN(0), "n must be an integer ≥ 1, got 0"),
    "cohort without barrier": (lambda: strategy(Cohort(2), Tumbling(2)), "belong together, got Cohort with Tumbling"),
    "barrier without cohort": (lambda: strategy(Concurrency(2), Barrier()), "got Concurrency with Barrier"),
    "budget with barrier": (lambda: strategy(StalenessBudget(0, 2), Barrier()), "got StalenessBudget with Barrier"),
    "buffer beyond the budget": (
        lambda: strategy(StalenessBudget(1, 4), Tumbling(9)),
        "a buffer of K = 9 does not fit a staleness budget",
    ),
    "negative bound": (
        lambda: strategy(Concurrency(2), Tumbling(1), max_staleness=-1),
        "max_staleness must be an integer ≥ 0, got -1",
    ),
    "no time": (
        lambda: strategy(Concurrency(2), Tumbling(1), lease_timeout_s=0.0),
        "lease_timeout_s must be > 0 and finite, got 0.0",
    ),
    "time without end": (
        lambda: strategy(Concurrency(2), Tumbling(1), lease_timeout_s=INF),
        "lease_timeout_s must be > 0 and finite, got inf",
    ),
    "no number of seconds": (
        lambda: strategy(Concurrency(2), Tumbling(1), lease_timeout_s=NAN),
        "lease_timeout_s must be > 0 and finite, got nan",
    ),
    "repulsion": (
        lambda: strategy(Cohort(2), Barrier(), proximal_mu=-0.5),
        "proximal_mu must be ≥ 0 and finite, got -0.5",
    ),
    "published version lags beyond the bound": (
        lambda: strategy(Concurrency(2), Tumbling(1), EveryN(4), max_staleness=2),
        "max_staleness ≥ 3, or within_staleness",
    ),
    "no tiers": (lambda: Tiers(0, 2), "tiers must be an integer ≥ 1, got 0"),
    "empty round of a tier": (lambda: Tiers(2, 0), "cohort size must be an integer ≥ 1, got 0"),
    "empty quota": (lambda: Quota(0), "quota must be an integer ≥ 1, got 0"),
    "no interval": (lambda: Periodic(0.0), "interval_s must be a finite number > 0, got 0.0"),
    "misspelt redispatch": (
        lambda: Concurrency(2, redispatch="next"),  # type: ignore[arg-type]
        "redispatch must be 'after_step' or 'before_step' or 'next_version', got 'next'",
    ),
    "tiers without groups": (
        lambda: strategy(Tiers(2, 2), Tumbling(2)),
        "leases in groups and a grouped buffer belong together, got Tiers with Tumbling",
    ),
    "tiers with a barrier": (lambda: strategy(Tiers(2, 2), Barrier()), "belong together, got Tiers with Barrier"),
    "compass without groups": (lambda: strategy(Compass(2), Periodic(1.0)), "got Compass with Periodic"),
    "groups that nobody forms": (lambda: strategy(Concurrency(2), Grouped()), "got Concurrency with Grouped"),
    "a cohort's groups": (lambda: strategy(Cohort(2), Grouped()), "got Cohort with Grouped"),
    "quota of workers that do not wait": (
        lambda: strategy(Concurrency(2), Quota(2)),
        "a quota needs a concurrency with redispatch = 'next_version'",
    ),
    "quota under a budget": (lambda: strategy(StalenessBudget(1, 2), Quota(2)), "a quota needs a concurrency"),
    "fixed times under a budget": (
        lambda: strategy(StalenessBudget(1, 2), Periodic(1.0)),
        "does not fit a staleness budget",
    ),
    "quota beyond the workers that wait": (
        lambda: strategy(Concurrency(3, redispatch="next_version"), Quota(4)),
        "a buffer of K = 4 can never be filled by 3 workers that wait for the next version; K ≤ 3 would do",
    ),
    "buffer beyond the workers that wait": (
        lambda: strategy(Concurrency(3, redispatch="next_version"), Tumbling(4)),
        "K ≤ 3 would do",
    ),
    "window beyond the workers that wait": (
        lambda: strategy(Concurrency(3, redispatch="next_version"), Sliding(4)),
        "K ≤ 3 would do",
    ),
    "stopping what is never too stale": (
        lambda: strategy(Concurrency(3), Tumbling(1), stop_stale=True),
        "stop_stale needs a max_staleness beyond which work is stopped",
    ),
    "clipped to nothing": (
        lambda: strategy(Concurrency(3), Tumbling(1), clip_norm=0.0),
        "clip_norm must be a finite number > 0, got 0.0",
    ),
    "nothing is near enough": (
        lambda: strategy(Concurrency(3), Tumbling(1), max_norm=-1.0),
        "max_norm must be a finite number > 0, got -1.0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_choice_that_cannot_work_is_refused_in_one_line(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make()
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 300


def test_strategies_name_themselves_in_their_refusals() -> None:
    with pytest.raises(ValueError, match="strategy 'mine'"):
        Strategy("mine", Cohort(2), Tumbling(2), None)


def test_a_bound_as_large_as_the_lag_of_publication_is_accepted() -> None:
    assert strategy(Concurrency(2), Tumbling(1), EveryN(4), max_staleness=3).max_staleness == 3
    assert strategy(Concurrency(2), Tumbling(1), EveryVersion(), max_staleness=0).max_staleness == 0


@pytest.mark.parametrize(("eta", "batch", "size"), [(1, 2, 3), (1, 2, 4), (5, 4, 8)])
def test_a_buffer_larger_than_the_batch_of_its_budget_is_refused(eta: int, batch: int, size: int) -> None:
    """Each version frees B more leases and a step needs K > B: after some steps the budget is spent for ever."""
    with pytest.raises(ValueError, match=f"K = {size}"):
        strategy(StalenessBudget(eta, batch), Tumbling(size))


def test_slots_given_out_before_the_step_cannot_wait_for_all_arrivals_of_the_instant() -> None:
    """The two exclude each other: a step may come between two arrivals of one instant."""
    with pytest.raises(ValueError, match="one_by_one"):
        Concurrency(2, redispatch="before_step", simultaneous="together")


@pytest.mark.parametrize(
    ("admission", "buffer", "needs"),
    [
        (Cohort(5), Barrier(), 5),
        (Cohort(5, keep=3), Barrier(), 3),
        (Concurrency(9), Tumbling(4), 4),
        (Concurrency(2), Sliding(4), 4),
        (Concurrency(2), Sliding(4, warm_up="average_what_is_there"), 1),
        (Concurrency(4, redispatch="next_version"), Sliding(4), 4),
        (Concurrency(4, redispatch="next_version"), Quota(3), 3),
        (Concurrency(4), Periodic(1.0), 1),
        (Tiers(3, 2), Grouped(), 1),
        (Compass(3), Grouped(), 1),
    ],
)
def test_a_strategy_knows_what_its_first_step_needs(
    admission: Cohort | Concurrency | Tiers | Compass,
    buffer: Barrier | Tumbling | Sliding | Quota | Periodic | Grouped,
    needs: int,
) -> None:
    assert strategy(admission, buffer).first_step_needs == needs


def test_plato_195_more_clients_a_round_than_there_are_is_refused_at_once() -> None:
    """500 clients and 50 a round must not wait for ever; 501 a round can never start."""
    assert strategy(Cohort(50), Barrier()).refusal(500) is None
    assert "a cohort of 501 can never be filled by 500 clients; cohort ≤ 500 would do" in str(
        strategy(Cohort(501), Barrier()).refusal(500)
    )
    assert "a concurrency of 501 can never be reached by 500 clients" in str(
        strategy(Concurrency(501), Tumbling(1)).refusal(500)
    )
    assert strategy(StalenessBudget(3, 400), Tumbling(400)).refusal(500) is None


def test_tiers_and_a_compass_that_need_more_clients_than_there_are_are_refused() -> None:
    assert "a concurrency of 9 can never be reached by 8 clients" in str(strategy(Compass(9), Grouped()).refusal(8))
    assert "9 tiers for 8 clients; tiers ≤ 8 would do" in str(strategy(Tiers(9, 1), Grouped()).refusal(8))
    assert strategy(Tiers(8, 50), Grouped()).refusal(8) is None
    assert strategy(Compass(8), Grouped()).refusal(8) is None
