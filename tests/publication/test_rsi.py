"""The switching improvement: nothing for publishing every version, nothing where reward was lost."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.publication import switching_improvement as rsi

TASKS = st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 10**6)), min_size=1, max_size=5)


@given(tasks=TASKS, sigma=st.floats(0, 1))
def test_publishing_every_version_improves_nothing(tasks: list[tuple[float, int]], sigma: float) -> None:
    rewards, counts = [reward for reward, _ in tasks], [count for _, count in tasks]
    assert rsi(rewards, counts, rewards, counts, sigma) == 0.0


def test_by_hand() -> None:
    """Kept with a tenth of the publications, lost, kept at a negative reward, published more often."""
    found = rsi([9.0, 7.9, -11.0, 10.0], [10, 1, 50, 300], [10.0, 10.0, -10.0, 10.0], [100, 100, 100, 100])
    assert found == pytest.approx((log(10) + 0 + log(2) + 0) / 4)


def test_the_threshold_is_a_share_below_for_either_sign() -> None:
    for all_reward, kept, lost in ((10.0, 8.01, 8.0), (-10.0, -11.99, -12.0)):
        assert rsi([kept], [1], [all_reward], [2]) == pytest.approx(log(2))
        assert rsi([lost], [1], [all_reward], [2]) == 0.0
    assert rsi([5.01], [1], [10.0], [2], sigma=0.5) == pytest.approx(log(2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rsi([], [], [], []), "one number a task"),
        (lambda: rsi([1.0], [1, 2], [1.0], [1]), "got 1, 2, 1, 1"),
        (lambda: rsi([1.0], [0], [1.0], [1]), "publications must be a finite number ≥ 1, got 0"),
        (lambda: rsi([float("nan")], [1], [1.0], [1]), "rewards must be finite"),
        (lambda: rsi([1.0], [1], [1.0], [1], sigma=2.0), "sigma must be"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
