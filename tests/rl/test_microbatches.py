"""Packing against worked cases, and what holds of every packing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.rl.microbatches import microbatches


def packed(lengths: list[int], capacity: int, **more: Any) -> list[list[int]]:
    """Lengths of the sequences in each micro-batch."""
    return [[lengths[index] for index in each] for each in microbatches(lengths, capacity, **more)]


DOWN = [8, 7, 6, 5, 4, 3, 2, 1]
LONG = [30000, 12000, 9000, 8000, 6000, 4000, 3000, 1000]


@pytest.mark.parametrize(
    ("lengths", "capacity", "least", "fewest_tokens", "first"),
    [
        (DOWN, 12, 1, [[8, 3], [7, 4], [6, 5], [2, 1]], [[8, 4], [7, 5], [6, 3, 2, 1]]),
        (DOWN, 12, 4, [[8, 1], [7, 2], [6, 3], [5, 4]], [[8, 4], [7, 3], [6, 2], [5, 1]]),
        ([100, 200, 300, 150, 250], 500, 2, [[300, 150], [250, 200], [100]], [[300, 200], [250, 150, 100]]),
        (LONG, 32768, 2, [[30000, 1000], [12000, 9000, 8000], [6000, 4000, 3000]], None),
    ],
)
def test_worked_cases(
    lengths: list[int], capacity: int, least: int, fewest_tokens: list[list[int]], first: list[list[int]] | None
) -> None:
    assert packed(lengths, capacity, least=least) == fewest_tokens
    assert packed(lengths, capacity, least=least, tie="first") == (first or fewest_tokens)


@given(
    st.lists(st.integers(0, 20), max_size=24),
    st.integers(20, 60),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(["fewest_tokens", "first"]),
)
def test_every_sequence_once_within_the_capacity_and_as_many_as_asked(
    lengths: list[int], capacity: int, least: int, multiple: int, tie: Any
) -> None:
    found = microbatches(lengths, capacity, least, multiple, tie)
    assert sorted(index for each in found for index in each) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in each) <= capacity for each in found)
    assert len(found) >= least
    assert len(found) % multiple == 0
    if [] in found:
        assert max(map(len, found), default=0) <= 1, "an empty one only where every sequence has its own"


def test_the_number_is_made_a_multiple_by_packing_again() -> None:
    assert len(packed(DOWN, 12, tie="first")) == 3
    assert packed(DOWN, 12, multiple_of=2, tie="first") == [[8, 4], [7, 3], [6, 2], [5, 1]]
    assert packed([5], 9, multiple_of=2) == [[5], []]


def test_the_same_lengths_are_packed_the_same() -> None:
    assert microbatches([3, 3, 3, 3], 6) == [[0, 1], [2, 3]]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match="sequence 1 has 9 tokens and a micro-batch holds 8; a capacity of at least 11"
    ):
        microbatches([3, 9, 11], 8)
    with pytest.raises(ValueError, match="least must be an integer ≥ 1, got 0"):
        microbatches([1], 8, least=0)
    with pytest.raises(ValueError, match="tie must be 'fewest_tokens' or 'first', got 'last'"):
        microbatches([1], 8, tie="last")  # type: ignore[arg-type]
