"""Intervals against scipy's, curves against hand-made ones, histograms against their values."""

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
