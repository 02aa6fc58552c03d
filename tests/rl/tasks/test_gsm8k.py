from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from fedasync.rl.tasks.gsm8k import Gsm8k, equal

pytest.importorskip("math_verify")


def written(path: Path, *pairs: tuple[str, str]) -> str:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n\n" for q, a in pairs))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path / "train.jsonl", *[(f"q{n}", f"so #### no\n#### 1,{n:03}") for n in range(5)])


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("\\boxed{1200}", True),
        ("The total is 1,200.", True),
        ("$1200.00", True),
        ("600 + 600 = 1200", True),
        ("\\boxed{2400/2}", True),
        ("1200 or rather 12", False),
        ("", False),
        ("no idea", False),
    ],
)
def test_what_counts_as_1200(text: str, right: bool) -> None:
    assert equal("1200", text) is right


def test_grading_works_in_a_thread_where_alarms_do_not() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(equal("3", "\\boxed{3}")))
    thread.start()
    thread.join()
    assert found == [True]


def test_the_last_rows_are_held_out(file: str) -> None:
    task = Gsm8k(file, held_out=2, instruction="")
    assert task.prompts == 3
    assert [task.start(n).prompt[0]["content"] for n in range(3)] == ["q0", "q1", "q2"]
    assert [task.start(n, held_out=True).prompt[0]["content"] for n in range(2)] == ["q3", "q4"]
    assert task.start(1).step("\\boxed{1001}").reward == 1
    with pytest.raises(ValueError, match=r"no training prompt 3; there are 0 … 2"):
        task.start(3)


def test_a_file_of_its_own_to_hold_out(file: str, tmp_path: Path) -> None:
    task = Gsm8k(file, written(tmp_path / "test.jsonl", ("other", "#### -7")), held_out=1)
    assert task.prompts == 5
    episode = task.start(0, held_out=True)
    assert episode.prompt[0]["content"].startswith("other\nReason step by step")
    assert (episode.step("\\boxed{-7}").reward, episode.step("\\boxed{7}").reward) == (1, 0)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"question": "a", "answer": "#### 1"}\n\n{"question"', r"f.jsonl, line 3: this is no JSON"),
        ('{"question": "a"}', r"f.jsonl, line 1: .* answer is missing"),
        ("[1]", r"f.jsonl, line 1: .* question is missing"),
        ('{"question": "a", "answer": "1"}', r"f.jsonl, line 1: .* no final number after ####"),
        ("\n", r"f.jsonl: it has no rows"),
    ],
)
def test_a_broken_file_is_refused_by_file_and_line(content: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(content)
    with pytest.raises(ValueError, match=line):
        Gsm8k(str(tmp_path / "f.jsonl"), held_out=0)


def test_something_must_be_left_to_train_on(file: str) -> None:
    with pytest.raises(ValueError, match=r"held_out must leave rows to train on, and .* has 5, got 5"):
        Gsm8k(file, held_out=5)
    with pytest.raises(ValueError, match="cannot be read"):
        Gsm8k(file + "x")
