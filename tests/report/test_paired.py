"""Paired comparisons against arithmetic and scipy: intervals, bounds where a target was missed, verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from fedasync.report.paired import (
    FEWEST_FOR_BCA,
    Missed,
    holm,
    paired_difference,
    paired_speedup,
    spread,
    verdicts,
)

samples = st.lists(st.floats(-3, 3).map(lambda x: round(x, 3)), min_size=2, max_size=9)
spread_samples = samples.filter(lambda values: np.ptp(values) > 0)


@given(spread_samples)
def test_the_interval_is_the_wider_of_student_s_and_the_bootstrap_s(values: list[float]) -> None:
    found = spread(values)
    assert found.t is not None
    assert found.bootstrap is not None
    assert found.low == min(found.t[0], found.bootstrap[0])
    assert found.high == max(found.t[1], found.bootstrap[1])
    # A resampled mean is never outside of the sample.
    assert min(values) - 1e-9 <= found.bootstrap[0] <= found.bootstrap[1] <= max(values) + 1e-9
    reference = scipy.stats.ttest_1samp(values, 0.0)
    assert found.t == pytest.approx(tuple(reference.confidence_interval(0.95)), rel=1e-6, abs=1e-9)
    assert found.p == pytest.approx(reference.pvalue, rel=1e-6, abs=1e-12)
    # The p-value and the t-interval say the same.
    assert found.p is not None
    assert (found.p <= 0.05) == (not found.t[0] <= 0 <= found.t[1]) or found.p == pytest.approx(0.05)


@given(spread_samples)
def test_the_same_pairs_give_the_same_interval_and_negated_ones_the_mirrored(values: list[float]) -> None:
    there, back = spread(values), spread([-value for value in values])
    assert there == spread(list(values))
    assert there.bootstrap is not None
    assert back.bootstrap is not None
    assert back.bootstrap[0] == pytest.approx(-there.bootstrap[1], abs=1e-9)
    assert back.bootstrap[1] == pytest.approx(-there.bootstrap[0], abs=1e-9)


def test_the_bootstrap_is_bca_from_five_pairs_on_and_percentile_below() -> None:
    draws = np.random.default_rng(3).gamma(1.0, size=FEWEST_FOR_BCA)
    for n, method in ((FEWEST_FOR_BCA - 1, "percentile"), (FEWEST_FOR_BCA, "BCa")):
        reference = scipy.stats.bootstrap(
            (draws[:n],),
            np.mean,
            n_resamples=200_000,
            method=method,
            batch=2_000,
            random_state=np.random.default_rng(0),
        ).confidence_interval
        # Other resamples, and twenty times as many.
        assert spread(draws[:n].tolist()).bootstrap == pytest.approx(tuple(reference), abs=0.03 * np.ptp(draws))


def test_one_pair_has_no_interval_and_none_no_mean() -> None:
    assert (spread([2.0]).low, spread([2.0]).high, spread([2.0]).p) == (None, None, None)
    with pytest.raises(ValueError, match="no values"):
        spread([])


@pytest.mark.parametrize(("pairs", "least"), [(3, 0.94), (5, 0.94), (8, 0.94)])
def test_printed_intervals_cover_what_they_claim_of_normal_log_ratios(pairs: int, least: float) -> None:
    """The figures of docs/statistics.md, with fewer samples: four standard errors of 400 are 0.044."""
    rng = np.random.default_rng(pairs)
    found = [spread(rng.normal(size=pairs).tolist()) for _ in range(400)]
    covered = np.mean([one.low <= 0 <= one.high for one in found if one.low is not None and one.high is not None])
    by_bootstrap = np.mean([one.bootstrap[0] <= 0 <= one.bootstrap[1] for one in found if one.bootstrap])
    assert covered > least - 0.034
    # Why the bootstrap does not stand alone.
    assert by_bootstrap < 0.92


@given(
    st.dictionaries(st.integers(0, 20), st.floats(0.01, 1e4), min_size=2, max_size=8),
    st.floats(0.05, 20),
)
def test_pairs_that_agree_on_a_ratio_have_no_interval_however_seeds_differ(
    baseline: dict[int, float], factor: float
) -> None:
    assume(abs(math.log(factor)) > 1e-9)
    found = paired_speedup({seed: time / factor for seed, time in baseline.items()}, baseline)
    assert found.ratio == pytest.approx(factor)
    assert (found.low, found.high, found.t, found.bootstrap, found.p) == (None,) * 5
    assert verdicts([found]) == ["no interval"]
    assert found.note() == f"no interval: {len(baseline)} pairs agree"


@given(st.dictionaries(st.integers(0, 20), st.floats(0.01, 1e4), min_size=2, max_size=8))
def test_pairs_that_agree_on_no_difference_are_within_noise(times: dict[int, float]) -> None:
    ratio, difference = paired_speedup(times, times), paired_difference(times, times)
    assert (ratio.ratio, ratio.low, ratio.high, ratio.p) == (1.0, 1.0, 1.0, 1.0)
    assert (difference.mean, difference.low, difference.high, difference.p) == (0.0, 0.0, 0.0, 1.0)
    assert verdicts([ratio, difference]) == ["within noise", "within noise"]
    assert ratio.note() == difference.note() == ""


@pytest.mark.parametrize("bounds", ["≥", "≤"])
def test_bounds_that_agree_have_no_interval_either(bounds: str) -> None:
    cut, whole = {0: Missed(40.0), 1: Missed(40.0)}, {0: 10.0, 1: 10.0}
    found = paired_speedup(whole, cut) if bounds == "≥" else paired_speedup(cut, whole)
    assert (found.bound, found.low, found.high, found.p) == (bounds, None, None, None)
    assert verdicts([found]) == ["no interval"]


def test_pairs_that_agree_are_not_among_those_that_holm_counts() -> None:
    """Two accuracies of 1/10,000 apart in both seeds: p = 0 would have made a comparison clear, and others weaker."""
    base = {0: 0.8123, 1: 0.8207}
    agree = paired_difference({seed: value + 0.0001 for seed, value in base.items()}, base)
    other = paired_difference({0: 0.9, 1: 0.91}, base)
    assert agree.mean == pytest.approx(0.0001)
    assert holm([agree.p, other.p]) == [None, other.p]
    assert verdicts([agree, other])[0] == "no interval"


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=6))
def test_swapping_the_two_inverts_the_speedup(pairs: list[tuple[float, float]]) -> None:
    own, other = ({seed: pair[i] for seed, pair in enumerate(pairs)} for i in (0, 1))
    there, back = paired_speedup(own, other), paired_speedup(other, own)
    assert there.ratio is not None
    assert back.ratio == pytest.approx(1 / there.ratio)
    if there.low is None or there.high is None:
        assert (back.low, back.high) == (None, None)
        return
    assert back.low == pytest.approx(1 / there.high)
    assert back.high == pytest.approx(1 / there.low)
    logs = [math.log(b / a) for a, b in pairs]
    assert there.ratio == pytest.approx(scipy.stats.gmean(np.exp(logs)))


def test_seeds_that_miss_are_counted_and_left_out() -> None:
    found = paired_speedup(
        {0: 10.0, 1: None, 2: 5.0, 3: None, 4: 0.0, 9: 1.0}, {0: 20.0, 1: 7.0, 2: None, 3: None, 4: 3.0}
    )
    assert found.ratio == pytest.approx(2.0)
    assert (found.low, found.high) == (None, None)
    counts = (found.pairs, found.seeds, found.missed, found.baseline_missed, found.at_start, found.unmatched)
    assert counts == (1, 5, 2, 2, 1, (9,))
    for words in (
        "2 of 5 seeds did not reach",
        "baseline: 2 of 5 did not reach",
        "1 of 5 reached at time 0",
        "seed 9 without a partner",
    ):
        assert words in found.note()


def test_no_pair_no_ratio() -> None:
    assert paired_speedup({0: None}, {0: 3.0}).ratio is None
    apart = paired_speedup({0: 1.0}, {1: 1.0})
    assert apart.ratio is None
    assert "no seed in common" in apart.note()


def test_two_seeds_far_apart_still_give_numbers() -> None:
    found = paired_speedup({0: 1e-9, 1: 1e9}, {0: 1e200, 1: 1e-200})
    assert found.high is not None
    assert math.isfinite(found.high)


def test_a_baseline_that_missed_bounds_the_ratio_from_below() -> None:
    found = paired_speedup({0: 10.0, 1: 10.0, 2: 12.5}, {0: 20.0, 1: Missed(40.0), 2: Missed(50.0)})
    assert (found.bound, found.pairs, found.bounded, found.baseline_missed) == ("≥", 3, 2, 2)
    assert found.ratio == pytest.approx((2 * 4 * 4) ** (1 / 3))
    assert found.high == math.inf
    assert found.low == spread_low([2.0, 4.0, 4.0])
    assert found.contains_none is (found.low is not None and found.low <= 1)


def test_a_series_that_missed_bounds_it_from_above() -> None:
    found = paired_speedup({0: Missed(40.0), 1: Missed(50.0)}, {0: 10.0, 1: 10.0})
    assert (found.bound, found.pairs, found.low) == ("≤", 2, 0.0)
    assert found.ratio == pytest.approx(20**-0.5)


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100), st.floats(20, 100)), min_size=2, max_size=6),
    st.booleans(),
)
def test_a_bound_holds_for_the_times_that_longer_runs_would_have_shown(
    pairs: list[tuple[float, float, float]], series_is_cut: bool
) -> None:
    full = {seed: own for seed, (own, _, _) in enumerate(pairs)}
    other = {seed: base for seed, (_, base, _) in enumerate(pairs)}
    whole = full if series_is_cut else other
    cut = {seed: time if time <= pairs[seed][2] else Missed(pairs[seed][2]) for seed, time in whole.items()}
    seen = paired_speedup(cut, other) if series_is_cut else paired_speedup(full, cut)
    truth = paired_speedup(full, other)
    assert seen.ratio is not None
    assert truth.ratio is not None
    if seen.bound == "=":
        assert seen.ratio == pytest.approx(truth.ratio)
    elif series_is_cut:
        assert seen.bound == "≤"
        assert seen.ratio >= truth.ratio * (1 - 1e-9)
    else:
        assert seen.bound == "≥"
        assert seen.ratio <= truth.ratio * (1 + 1e-9)


def test_runs_that_diverged_are_misses_and_counted() -> None:
    found = paired_speedup({0: Missed(60.0, True), 1: Missed(60.0), 2: 5.0}, {0: 20.0, 1: 8.0, 2: 10.0})
    assert (found.bound, found.missed, found.diverged, found.baseline_diverged) == ("≤", 2, 1, 0)
    assert found.ratio == pytest.approx((20 / 60 * 8 / 60 * 2) ** (1 / 3))
    assert found.note() == "2 of 3 seeds did not reach, 1 of these diverged"
    other = paired_speedup({0: 20.0, 1: 8.0}, {0: Missed(60.0, True), 1: 9.0})
    assert other.note() == "baseline: 1 of 2 did not reach, 1 of these diverged"


def test_misses_on_both_sides_leave_the_pairs_that_both_reached() -> None:
    found = paired_speedup({0: 10.0, 1: Missed(40.0), 2: 5.0}, {0: 20.0, 1: 8.0, 2: Missed(40.0)})
    assert (found.bound, found.ratio, found.pairs) == ("=", pytest.approx(2.0), 1)
    assert found.note() == "1 of 3 seeds did not reach; baseline: 1 of 3 did not reach"
    neither = paired_speedup({0: Missed(9.0)}, {0: Missed(9.0)})
    assert (neither.ratio, neither.bound) == (None, "=")


def test_a_bound_is_never_clear_towards_its_open_side() -> None:
    """At least 0.5× as fast may be any number of times as fast."""
    found = paired_speedup({s: 20.0 + s for s in range(6)}, {s: Missed(10.0) for s in range(6)})
    assert found.bound == "≥"
    assert found.high == math.inf
    assert (found.contains_none, found.p) == (True, 1.0)


def spread_low(ratios: list[float]) -> float:
    low = spread([math.log(ratio) for ratio in ratios]).low
    assert low is not None
    return pytest.approx(math.exp(low))  # type: ignore[no-any-return]


@given(st.dictionaries(st.integers(0, 9), st.floats(-5, 5), min_size=2, max_size=8), st.floats(-3, 3))
def test_pairs_that_agree_on_a_difference_have_no_interval_however_seeds_differ(
    values: dict[int, float], by: float
) -> None:
    assume(abs(by) > 1e-9)
    found = paired_difference({seed: value + by for seed, value in values.items()}, values)
    assert found.mean == pytest.approx(by, abs=1e-9)
    assert (found.low, found.high, found.p) == (None, None, None)
    assert found.note() == f"no interval: {len(values)} pairs agree"


def test_a_difference_names_the_seeds_without_a_partner() -> None:
    found = paired_difference({0: 1.0, 1: 2.0, 3: math.nan, 4: None}, {0: 0.5, 2: 1.0, 3: 1.0, 4: 1.0})
    assert (found.mean, found.pairs, found.unmatched) == (0.5, 1, (1, 2, 3, 4))
    assert found.note() == "seeds 1, 2, 3, 4 without a partner"


def test_holm_by_hand() -> None:
    # Holm 1979: the smallest p times m, the next times m − 1, …, never falling.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_keeps_the_order_and_never_lowers(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert q is not None
        assert min(1.0, p) <= q <= min(1.0, len(p_values) * p) + 1e-12
    order = np.argsort(p_values, kind="stable")
    assert np.all(np.diff([adjusted[i] for i in order]) >= 0)


def test_verdicts() -> None:
    base = dict(enumerate([10.0, 11.0, 12.0, 13.0, 12.0, 11.0]))
    jitter = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0]
    clear = paired_speedup({s: t / 2 * j for (s, t), j in zip(base.items(), jitter, strict=True)}, base)
    same = paired_speedup({s: t * j for (s, t), j in zip(base.items(), jitter, strict=True)}, base)
    wide = [0.65, 0.96, 0.88, 0.85, 0.72, 0.95]
    weak = paired_speedup({s: t * j for (s, t), j in zip(base.items(), wide, strict=True)}, base)
    # p = 0.031: clear beside a comparison that is clearer, in doubt beside one that is not.
    assert verdicts([clear, weak, paired_speedup({0: 1.0}, {0: 2.0})]) == ["clear", "clear", "no interval"]
    assert verdicts([weak, same]) == ["weak", "within noise"]
