"""What is drawn is the distribution, from numbers that depend on names alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.drawing import Noise, draw, drawn_from
from fedasync.rl.engine import Request
from fedasync.rl.sampling import Sampling

P = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)


def grid(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) / count


def test_numbers_depend_on_name_and_position_alone_and_differ() -> None:
    noise = Noise(4)
    names = [Request(p + e + i, p, e, i) for p in range(3) for e in range(3) for i in range(3) for _ in range(50)]
    whole = noise.numbers(names, list(range(50)) * 27)
    assert len(np.unique(whole)) == 27 * 50
    assert 0 < whole.min() < whole.max() < 1
    some = [1003, 7, 650]
    again = Noise(4).numbers([names[at]._replace(answer=9) for at in some], [at % 50 for at in some])
    assert again.tolist() == whole[some].tolist()
    assert not np.isin(Noise(5).numbers(names, list(range(50)) * 27), whole).any()


def test_numbers_are_uniform() -> None:
    names = [Request(0, prompt, 0, 0) for prompt in range(200) for _ in range(50)]
    found = Noise(0).numbers(names, list(range(50)) * 200)
    counts = np.histogram(found, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 43.8, "chi-square of 19 degrees of freedom, p = 0.001"
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.04


@settings(max_examples=30)
@given(st.lists(st.floats(-8, 8), min_size=1, max_size=12), st.floats(0.2, 3))
def test_a_token_is_drawn_from_as_much_of_the_unit_interval_as_its_probability(
    logits: list[float], temperature: float
) -> None:
    rows = torch.tensor([logits], dtype=torch.float64).expand(2000, -1)
    tokens, log_probs = draw(rows, Sampling(1, temperature), grid(2000))
    wanted = torch.softmax(rows[0] / temperature, -1).numpy()
    assert np.abs(np.bincount(tokens, minlength=len(logits)) - 2000 * wanted).max() <= 1 + 1e-6
    assert np.allclose(log_probs, np.log(wanted)[tokens], rtol=1e-9, atol=1e-12)


def test_top_k_and_top_p_draw_from_a_part_and_tell_the_whole() -> None:
    """With top_k = 2 of (0.5, 0.3, 0.2) a drawer that renormalised would tell −0.470004 for the first."""
    tokens, log_probs = draw(P.log().expand(800, -1), Sampling(1, top_k=2), grid(800))
    assert np.bincount(tokens).tolist() == [500, 300]
    assert log_probs[0] == pytest.approx(-0.693147, abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1), [1, 1, 1]),
        (Sampling(1, top_k=1), [1, 0, 0]),
        (Sampling(1, top_k=9), [1, 1, 1]),
        (Sampling(1, top_p=0.4), [1, 0, 0]),
        (Sampling(1, top_p=0.6), [1, 1, 0]),
        (Sampling(1, top_p=0.9), [1, 1, 1]),
        (Sampling(1, top_k=1, top_p=0.9), [1, 0, 0]),
    ],
)
def test_what_is_drawn_from(sampling: Sampling, kept: list[int]) -> None:
    assert (drawn_from(P, sampling) > 0).int().tolist() == [kept]


def test_what_cannot_be_is_never_drawn_and_the_likeliest_is_greedy() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    edges = np.array([2.0**-53, 0.5, 1 - 2.0**-53])
    tokens, _ = draw(logits.expand(3, -1), Sampling(1), edges)
    assert set(tokens) <= {1, 3}
    assert (tokens[0], tokens[-1]) == (1, 3)
    assert draw(logits, Sampling(1), None)[0] == [3]


def test_a_large_vocabulary_of_float32_loses_no_token() -> None:
    """In float32 the cumulative sum of 100 000 equal probabilities stands still for long stretches."""
    tokens, _ = draw(torch.zeros(64, 100_000), Sampling(1), grid(64))
    assert tokens == [int(np.ceil(u * 100_000 - 1e-6)) - 1 for u in grid(64)]


def test_nan_is_an_error() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        draw(torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), Sampling(1), grid(2))
    with pytest.raises(ValueError, match="not numbers"):
        draw(torch.tensor([[0.0, torch.nan]]), Sampling(1), None)
