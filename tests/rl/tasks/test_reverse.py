from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.environment import Reply
from fedasync.rl.tasks.reverse import Reversal, Reverse

TEXTS = st.text("abc", max_size=6)


@given(TEXTS.filter(bool), TEXTS)
@settings(max_examples=60)
def test_the_target_alone_earns_1_and_everything_earns_within_0_and_1(text: str, answer: str) -> None:
    reward = Reversal(text, dense=True).step(answer).reward
    assert 0 <= reward <= 1
    assert (reward == 1) == (answer == text[::-1])
    assert Reversal(text, dense=False).step(answer) == Reply(float(answer == text[::-1]))


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("dcba", 1.0), ("dcb", 0.75), ("dcbaa", 0.8), ("abcd", 0.0), ("", 0.0), ("dcab", 0.5), ("dcba>", 0.8)],
)
def test_a_dense_reward_is_the_share_of_right_positions_of_the_longer_text(answer: str, reward: float) -> None:
    assert Reversal("abcd", dense=True).step(answer) == Reply(reward)


def test_what_is_held_out_is_never_trained_on_and_each_string_is_on_one_side() -> None:
    task = Reverse(length=3, symbols=3, held_out=200)
    trained = {task.start(n).prompt for n in range(1500)}
    held_out = {task.start(n, held_out=True).prompt for n in range(200)}
    assert not trained & held_out
    assert trained | held_out == {"".join(each) + ">" for each in product("abc", repeat=3)}


def test_with_nothing_held_out_every_string_is_trained_on() -> None:
    task = Reverse(length=1, symbols=2, held_out=0)
    assert {task.start(n).prompt for n in range(40)} == {"a>", "b>"}


def test_strings_are_equally_likely() -> None:
    task = Reverse(length=2, symbols=2, held_out=0)
    counts = Counter(task.start(n).prompt for n in range(2000))
    assert set(counts) == {"aa>", "ab>", "ba>", "bb>"}
    assert all(abs(each - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for each in counts.values())


def test_each_further_length_is_half_as_likely() -> None:
    task = Reverse(length=[2, 5], symbols=6, held_out=0)
    counts = Counter(len(task.start(n).prompt) - 1 for n in range(3000))
    for length, weight in ((2, 8), (3, 4), (4, 2), (5, 1)):
        p = weight / 15
        assert abs(counts[length] - 3000 * p) < 5 * (3000 * p * (1 - p)) ** 0.5
    assert set(counts) == {2, 3, 4, 5}


def test_prompts_are_a_function_of_seed_and_number() -> None:
    first, again, other = Reverse(seed=1), Reverse(seed=1), Reverse(seed=2)
    prompts = [first.start(n).prompt for n in range(20)]
    assert prompts == [again.start(n).prompt for n in range(20)] != [other.start(n).prompt for n in range(20)]
    assert all(set(each) <= set(first.alphabet) for each in prompts)


def test_the_alphabet_is_the_symbols_and_the_separator() -> None:
    assert Reverse(symbols=3).alphabet == "abc>"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"length": 0}, "task: length must be an integer ≥ 1, got 0"),
        ({"length": [5, 2]}, "the least and the most, got [5, 2]"),
        ({"length": []}, "the least and the most, got []"),
        ({"length": [1, 2, 3]}, "the least and the most, got [1, 2, 3]"),
        ({"symbols": 27}, "task: symbols must be at most 26, got 27"),
        ({"reward": "half"}, "task: reward must be 'dense' or 'exact', got 'half'"),
        ({"prompts": 0}, "task: prompts must be an integer ≥ 1, got 0"),
        ({"length": 1, "symbols": 2}, "2 strings of length 1 are too few"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError) as told:  # noqa: PT011
        Reverse(**keys)  # type: ignore[arg-type]
    assert line in str(told.value)


def test_a_prompt_that_there_is_not() -> None:
    task = Reverse(prompts=5, held_out=2)
    for number, held_out in ((5, False), (-1, False), (2, True)):
        with pytest.raises(ValueError, match=rf"prompt {number}; there are 0 … {1 if held_out else 4}"):
            task.start(number, held_out=held_out)
