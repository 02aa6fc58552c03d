"""The order of samples: a permutation, uniform, the same in any company."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedasync.workloads.order import generator_seed, orders

seeds = st.integers(0, 2**63 - 1)


def of(seeds: list[int], epochs: int, counts: list[int]) -> np.ndarray:
    return orders(np.array(seeds, dtype=np.uint64), epochs, np.array(counts))


@given(tasks=st.lists(st.tuples(seeds, st.integers(1, 20)), min_size=1, max_size=6), epochs=st.integers(1, 3))
def test_each_row_begins_with_a_permutation_that_no_other_row_changes(
    tasks: list[tuple[int, int]], epochs: int
) -> None:
    together = of([seed for seed, _ in tasks], epochs, [count for _, count in tasks])
    for row, (seed, count) in zip(together, tasks, strict=True):
        assert np.array_equal(np.sort(row[:, :count], axis=1), np.tile(np.arange(count), (epochs, 1)))
        assert np.array_equal(row[:, :count], of([seed], epochs, [count])[0])
        # More epochs begin with the same ones.
        assert np.array_equal(row[:, :count], of([seed], epochs + 1, [count])[0, :epochs])


def test_all_orders_are_equally_likely_and_epochs_independent() -> None:
    n, epochs = 40_000, 2
    drawn = of(list(range(n)), epochs, [4] * n) @ np.array([64, 16, 4, 1])
    _, numbered = np.unique(drawn, return_inverse=True)
    first, second = numbered.reshape(n, epochs).T
    assert len(np.unique(first)) == 24
    assert stats.chisquare(np.bincount(first)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(24 * first + second, minlength=24**2)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(24 * first[:-1] + first[1:], minlength=24**2)).pvalue > 1e-3


@given(seed=seeds, bit=st.integers(0, 62))
def test_every_bit_of_the_seed_reaches_the_low_bits_of_a_generator_s(seed: int, bit: int) -> None:
    assert 0 <= generator_seed(seed) < 2**63
    assert generator_seed(seed) % 2**32 != generator_seed(seed ^ (1 << bit)) % 2**32
