from __future__ import annotations

from typing import Any

import pytest

from fedasync.rl.tasks.reasoning_gym_task import Pick, ReasoningGym, picked

pytest.importorskip("reasoning_gym")
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize(
    ("text", "pick", "answer"),
    [
        ("1 + 2 = 3.", "last_number", "3"),
        ("it is -1,204.5, I think", "last_number", "-1204.5"),
        ("so 3-4", "last_number", "4"),
        ("none", "last_number", ""),
        ("7 <answer> 8\n</answer> 9", "tag", "8"),
        ("<answer>1</answer><answer>2</answer>", "tag", "2"),
        ("<answer>8", "tag", ""),
        (" olleh\n", "whole", "olleh"),
    ],
)
def test_what_is_picked_out(text: str, pick: Pick, answer: str) -> None:
    assert picked(text, pick) == answer


def test_questions_on_both_sides_never_meet_though_the_task_has_few() -> None:
    task = ReasoningGym("chain_sum", config=DIGITS, size=300, held_out=60)
    trained = {str(task.start(n).prompt) for n in range(300)}
    held_out = {str(task.start(n, held_out=True).prompt) for n in range(60)}
    assert not trained & held_out
    assert len(trained) > 80
    assert len(held_out) > 20


def test_a_right_number_earns_1_wherever_it_stands_last() -> None:
    episode = ReasoningGym("chain_sum").start(0)
    right = episode.entry["answer"]
    assert episode.step(right).reward == 1
    assert episode.step(f"That is {right}.").reward == 1
    assert episode.step(f"{right} or {int(right) + 1}").reward == 0
    assert episode.step("").reward == 0


def test_graded_pays_what_the_grader_says_and_binary_full_marks_alone() -> None:
    keys: dict[str, Any] = {"name": "letter_counting", "pick": "whole"}
    binary, graded = ReasoningGym(**keys).start(1), ReasoningGym(**keys, reward="graded").start(1)
    near = f"{graded.entry['answer']} letters"
    assert 0 < graded.step(near).reward < 1
    assert binary.step(near).reward == 0
    assert binary.step(str(binary.entry["answer"])).reward == 1


def test_the_prompt_is_the_question_the_instruction_and_examples_before_it() -> None:
    bare = ReasoningGym("chain_sum", instruction="").start(4)
    assert bare.prompt == [{"role": "user", "content": bare.entry["question"]}]
    task = ReasoningGym("chain_sum", config=DIGITS, examples=2, pick="tag", held_out=40)
    roles = [each["role"] for each in task.start(4).prompt]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    shown = task.start(4).prompt[:4]
    assert shown == task.start(9, held_out=True).prompt[:4]
    assert all(each["content"].startswith("<answer>") for each in shown[1::2])
    asked = {str(task.start(n, held_out=True).prompt[-1]) for n in range(40)}
    assert not asked & {str(each) for each in shown}


def test_the_same_everywhere() -> None:
    first, again = (ReasoningGym("gsm_symbolic", seed=3, held_out=0).start(5).prompt for _ in range(2))
    assert first == again != ReasoningGym("gsm_symbolic", seed=4, held_out=0).start(5).prompt


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"name": "chain_sun"}, "has no 'chain_sun'; did you mean chain_sum or"),
        ({"name": "xyzzy"}, "has no 'xyzzy'; there are ab, acre, "),
        ({"name": "chain_sum", "config": {"max_term": 2}}, "config of chain_sum: .*max_term"),
        ({"name": "chain_sum", "config": {"max_terms": 1}}, "config of chain_sum: max_terms must be"),
        ({"name": "chain_sum", "config": {"seed": 1}}, "config must leave seed to the key"),
        ({"name": "spell_backward"}, "which is no number; pick = 'tag' or 'whole'"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        ReasoningGym(**keys)
