from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedasync.rl.tasks.own_reward import OwnReward

ROWS = [{"prompt": f"p{n}", "wanted": n} for n in range(10)]


def same_length(row: dict[str, Any], answer: str) -> float:
    row["wanted"] += 1  # a row is the reward's own
    return float(len(answer) == row["wanted"] - 1)


def test_every_row_is_on_one_side() -> None:
    task = OwnReward(ROWS, same_length, held_out_share=0.3)
    assert (task.prompts, task.held_out) == (7, 3)
    trained = [task.start(n).prompt for n in range(7)]
    held_out = [task.start(n, held_out=True).prompt for n in range(3)]
    assert sorted([*trained, *held_out]) == [f"p{n}" for n in range(10)]
    other = OwnReward(ROWS, same_length, held_out_share=0.3, seed=1)
    assert held_out != [other.start(n, held_out=True).prompt for n in range(3)]


def test_the_reward_sees_the_row_and_cannot_change_it() -> None:
    task = OwnReward(ROWS, same_length, held_out_share=0)
    for _ in range(2):
        assert [task.start(3).step("x" * n).reward for n in range(5)] == [0, 0, 0, 1, 0]


def test_rows_of_a_file_and_a_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def short(row, answer):\n    return row['best'] - len(answer)\n")
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a", "best": 1}, {"prompt": messages, "best": 2}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = OwnReward(str(tmp_path / "p.jsonl"), "rewards_of_mine.short", held_out_share=0)
    assert [task.start(n).prompt for n in range(2)] == ["a", messages]
    assert task.start(1).step("abc").reward == -1
    with pytest.raises(ValueError, match="module rewards_of_mine has no function shot"):
        OwnReward(ROWS, "rewards_of_mine.shot")


def test_bare_texts_are_prompts() -> None:
    task = OwnReward(["a", "b"], lambda row, answer: len(row), held_out_share=0.5)
    assert {task.start(0).prompt, task.start(0, held_out=True).prompt} == {"a", "b"}


def test_nan_passes_and_what_is_no_number_does_not() -> None:
    assert math.isnan(OwnReward(ROWS, lambda row, answer: math.nan).start(0).step("").reward)
    with pytest.raises(TypeError, match="<lambda> gave None for a reward; a number would do"):
        OwnReward(ROWS, lambda row, answer: None).start(0).step("")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"reward": "same_length"}, "must be a dotted path such as my_module.my_reward, got 'same_length'"),
        ({"reward": "no_such_module.f"}, "No module named 'no_such_module'; a module in the working directory"),
        ({"rows": []}, "task: rows has none"),
        ({"rows": [{"prompt": "a"}, {"wanted": 1}]}, "row 2: prompt must be a text, or a list of messages"),
        ({"rows": [{"prompt": [{"role": "user"}]}]}, "row 1: prompt must be"),
        ({"held_out_share": 1.0}, "held_out_share must be"),
        ({"held_out_share": 0.01}, "a share 0.01 of 10 rows is 0"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        OwnReward(**{"rows": ROWS, "reward": same_length, **keys})
