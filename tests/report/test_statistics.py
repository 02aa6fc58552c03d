"""Intervals against scipy's, curves against hand-made ones, speed-ups against arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedasync.report.statistics import (
    align,
    band,
    histogram_quantile,
    mean_interval,
    paired_speedup,
    pooled_staleness,
)

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=2, max_size=12), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_interval_is_the_one_sample_t_test_s(values: list[float], level: float) -> None:
    found = mean_interval(values, level)
    assert found.mean == pytest.approx(np.mean(values))
    if np.std(values) > 1e-9 * (1 + abs(found.mean)):
        reference = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(level)
        assert found.low == pytest.approx(reference.low, rel=1e-6, abs=1e-9)
        assert found.high == pytest.approx(reference.high, rel=1e-6, abs=1e-9)


def test_two_values_by_hand() -> None:
    # t(0.975, 1) = tan(0.475 π); s/√n = |a − b| / 2.
    found = mean_interval([1.0, 3.0])
    assert found.half_width == pytest.approx(math.tan(0.475 * math.pi))


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    found = mean_interval([4.0])
    assert (found.mean, found.half_width, found.low, found.high, found.count) == (4.0, None, None, None, 1)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_curves_carry_their_last_evaluation_forward() -> None:
    grid, values = align(
        [
            (np.array([0.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0])),
            (np.array([0.0, 3.0]), np.array([10.0, 20.0])),
        ]
    )
    assert grid.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert values.tolist() == [[1.0, 2.0, 2.0, 3.0], [10.0, 10.0, 20.0, 20.0]]


def test_the_grid_begins_where_all_curves_have_begun() -> None:
    grid, values = align([(np.array([0.0, 5.0]), np.array([1.0, 2.0])), (np.array([3.0]), np.array([7.0]))])
    assert grid.tolist() == [3.0, 5.0]
    assert values.tolist() == [[1.0, 2.0], [7.0, 7.0]]


def test_band_is_the_interval_at_every_time_and_knows_when_the_first_seed_ended() -> None:
    times = np.array([0.0, 1.0, 2.0])
    curves = [(times, np.array([0.1, 0.3, 0.8])), (times[:2], np.array([0.2, 0.4]))]
    found = band(curves)
    assert found.all_running_until_s == 1.0
    assert found.low is not None
    assert found.high is not None
    for i, column in enumerate([[0.1, 0.2], [0.3, 0.4], [0.8, 0.4]]):
        interval = mean_interval(column)
        assert found.mean[i] == pytest.approx(interval.mean)
        assert found.low[i] == pytest.approx(interval.low)
        assert found.high[i] == pytest.approx(interval.high)
    alone = band(curves[:1])
    assert alone.low is alone.high is None
    with pytest.raises(ValueError, match="without points"):
        band([])


@given(
    st.dictionaries(st.integers(0, 20), st.floats(0.01, 1e4), min_size=2, max_size=8),
    st.floats(0.05, 20),
)
def test_a_constant_ratio_has_no_spread_however_seeds_differ(baseline: dict[int, float], factor: float) -> None:
    found = paired_speedup({seed: time / factor for seed, time in baseline.items()}, baseline)
    assert found.ratio == pytest.approx(factor)
    assert found.low == pytest.approx(factor, rel=1e-6)
    assert found.high == pytest.approx(factor, rel=1e-6)
    assert found.note() == ""


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=6))
def test_swapping_the_two_inverts_the_speedup(pairs: list[tuple[float, float]]) -> None:
    own, other = ({seed: pair[i] for seed, pair in enumerate(pairs)} for i in (0, 1))
    there, back = paired_speedup(own, other), paired_speedup(other, own)
    assert there.ratio is not None
    assert there.low is not None
    assert there.high is not None
    assert back.ratio == pytest.approx(1 / there.ratio)
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
    assert counts == (1, 5, 2, 2, 1, 1)
    for words in (
        "2 of 5 seeds did not reach",
        "baseline: 2 of 5 did not reach",
        "1 of 5 reached at time 0",
        "1 seeds unmatched",
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


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_quantile_of_a_histogram_is_that_of_its_values(values: list[int], share: float) -> None:
    histogram = pooled_staleness([{str(v): values.count(v) for v in set(values)}])
    assert sum(histogram.values()) == len(values)
    ordered = sorted(values)
    assert histogram_quantile(histogram, share) == ordered[math.ceil(share * len(ordered) - 1e-9) - 1]


def test_histograms_are_pooled_over_seeds() -> None:
    assert pooled_staleness([{"0": 3, "2": 1}, {"2": 4, "10": 0}]) == {0: 3, 2: 5}
    with pytest.raises(ValueError, match="quantile"):
        histogram_quantile({0: 1}, 1.5)
