from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.rl.environment import Reply
from fedasync.rl.tasks.guess import Guess


@given(st.integers(1, 200), st.integers(0, 50))
@settings(max_examples=30)
def test_halving_finds_every_number_in_the_turns_that_it_takes(highest: int, prompt: int) -> None:
    turns = (highest + 1).bit_length()
    episode = Guess(highest, turns, frame="{}").start(prompt)
    low, high, reply = 0, highest, Reply(done=False)
    while not reply.done:
        middle = (low + high) // 2
        reply = episode.step(str(middle))
        low, high = (middle + 1, high) if reply.observation == "higher" else (low, middle - 1)
    assert reply == Reply(1.0)


def test_a_miss_on_the_last_turn_earns_nothing() -> None:
    episode = Guess(9, turns=2).start(0)
    assert episode.step("10") == Reply(0.0, False, " lower\n")
    assert episode.step("hm 10") == Reply(0.0)


def test_a_turn_without_a_number_is_answered_and_counts() -> None:
    episode = Guess(9, turns=2, frame="<{}>").start(0)
    assert episode.step("no idea") == Reply(0.0, False, "<?>")
    assert episode.step("9" * 5000).done


def test_the_last_number_counts() -> None:
    task = Guess(9)
    number = next(n for n in range(10) if task.start(3).step(str(n)).reward)
    assert task.start(3).step(f"not 10 but {number}!") == Reply(1.0)


def test_answers_to_one_prompt_do_not_see_each_other() -> None:
    task = Guess(9, turns=2)
    one, other = task.start(0), task.start(0)
    one.step("10")
    assert not other.step("10").done


def test_every_number_is_hidden_somewhere_and_the_alphabet_has_all_that_is_said() -> None:
    task = Guess(3, turns=9)
    found = {next(n for n in range(4) if task.start(p).step(str(n)).reward) for p in range(60)}
    assert found == {0, 1, 2, 3}
    said = task.start(0).prompt + "".join(task.start(0).step(each).observation for each in ("", "-5", "9", "4"))
    assert set(said) <= set(task.alphabet)


def test_a_frame_has_one_place() -> None:
    with pytest.raises(ValueError, match=r"frame must be a text with one \{\} in it, got 'x'"):
        Guess(frame="x")
