from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.batch import answers_of

from .tiny import trajectory

PAD = 7


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 99), count=st.integers(1, 6), control=st.booleans(), data=st.data())
def test_a_row_is_its_trajectory_and_the_rest_is_neutral(
    seed: int, count: int, control: bool, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    trajectories = [trajectory(rng, control=control) for _ in range(count)]
    rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8))
    answers = answers_of(trajectories, PAD)
    batch = answers.rows(rows)
    longest = max(len(trajectories[at]) for at in rows)
    assert batch.tokens.shape == (len(rows), longest)
    for row, at in enumerate(rows):
        own, length = trajectories[at], len(trajectories[at])
        np.testing.assert_array_equal(batch.tokens[row, :length], own.tokens)
        np.testing.assert_array_equal(batch.generated[row, :length], own.generated)
        np.testing.assert_array_equal(batch.behaviour[row, :length], own.log_probs)
        np.testing.assert_array_equal(batch.versions[row, :length], own.versions)
        assert batch.tokens[row, length:].eq(PAD).all()
        assert not batch.generated[row, length:].any()
        assert batch.behaviour[row, length:].eq(0).all()
        assert batch.versions[row, length:].eq(-1).all()
        assert (batch.observations is None) == (own.observations is None)
        if batch.observations is not None and own.observations is not None:
            np.testing.assert_array_equal(batch.observations[row, : length + 1], own.observations)
            assert batch.observations[row, length + 1 :].eq(batch.observations[row, length]).all()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 99), count=st.integers(1, 6))
def test_places_lead_back_to_all_answers_end_to_end(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    answers = answers_of([trajectory(rng) for _ in range(count)], PAD)
    numbers = torch.arange(len(answers.tokens))
    back = torch.zeros_like(numbers)
    for row in reversed(range(count)):
        batch = answers.rows([row, (row + 1) % count])
        back[batch.places[batch.generated]] = numbers[batch.places][batch.generated]
    assert torch.equal(back[answers.generated], numbers[answers.generated])


def test_a_missing_log_probability_stays_missing() -> None:
    own = trajectory(np.random.default_rng(0), prompt=1, answer=2)
    log_probs = own.log_probs.copy()
    log_probs[1] = np.nan
    batch = answers_of([replace(own, log_probs=log_probs)], PAD).rows([0])
    assert batch.behaviour.isnan().tolist() == [[False, True, False]]


def test_what_cannot_be_a_batch_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least one answer"):
        answers_of([], PAD)
    with pytest.raises(ValueError, match="none without tokens"):
        answers_of([trajectory(rng, prompt=0, answer=0)], PAD)
    with pytest.raises(ValueError, match="some answers have observations and others not"):
        answers_of([trajectory(rng, control=True), trajectory(rng)], PAD)
    with pytest.raises(ValueError, match="at least one answer"):
        answers_of([trajectory(rng)], PAD).rows([])
