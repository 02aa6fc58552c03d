"""Word problems with a number for an answer, as in GSM8K (Cobbe et al. 2021)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedasync.core.bounds import check_type
from fedasync.rl.environment import Message, Reply
from fedasync.rl.tasks.jsonl import rows
from fedasync.rl.tasks.prompts import check_counts, check_prompt

INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."
MARK = "####"
"""Stands before the final answer in GSM8K's own solutions."""


@dataclass(frozen=True)
class Gsm8k:
    """``kind = "gsm8k"``: a JSONL file of ``question`` and ``answer``, whose final number follows ``####``.

    An answer earns 1 where math-verify finds it equal to the final number, else 0. Held-out prompts are the first
    ``held_out`` rows of ``held_out_path`` (its test part, say), or else the last rows of ``path``, which are then not
    trained on.
    """

    path: str
    held_out_path: str | None = None
    held_out: int = 256
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        check_type("task: path", self.path, str, "the path of a JSONL file")
        check_type("task: held_out_path", self.held_out_path, str | None, "the path of a JSONL file")
        check_type("task: instruction", self.instruction, str, "a text that follows the question")
        check_counts(None, self.held_out, 0)
        _math_verify()
        there = len(self._held_out if self.held_out_path else self._rows)
        if self.held_out > there or (not self.held_out_path and self.held_out == there):
            raise ValueError(
                f"task: held_out must leave rows to train on, and {self.held_out_path or self.path} has {there}, "
                f"got {self.held_out}"
            )

    @property
    def prompts(self) -> int:
        return len(self._rows) - (0 if self.held_out_path else self.held_out)

    def start(self, prompt: int, *, held_out: bool = False) -> Problem:
        """The episode of a prompt. Raises ValueError for a prompt that there is not."""
        check_prompt("gsm8k", prompt, self.prompts, self.held_out, of_held_out=held_out)
        if not held_out:
            question, answer = self._rows[prompt]
        elif self.held_out_path:
            question, answer = self._held_out[prompt]
        else:
            question, answer = self._rows[self.prompts + prompt]
        return Problem(f"{question}\n{self.instruction}".strip(), answer)

    @cached_property
    def _rows(self) -> list[tuple[str, str]]:
        return _read(self.path)

    @cached_property
    def _held_out(self) -> list[tuple[str, str]]:
        return _read(self.held_out_path or self.path)


@dataclass(frozen=True)
class Problem:
    """One question, and its final answer."""

    question: str
    answer: str

    @property
    def prompt(self) -> Sequence[Message]:
        return [{"role": "user", "content": self.question}]

    def step(self, text: str) -> Reply:
        return Reply(float(equal(self.answer, text)))


def equal(answer: str, text: str) -> bool:
    """Whether math-verify reads in a text what is equal to an answer.

    Its own time limits are off, since they set an alarm of the process: who calls this guards it.
    """
    math_verify = _math_verify()
    with _quiet():
        gold = math_verify.parse(answer, parsing_timeout=None)
        given = math_verify.parse(text, parsing_timeout=None)
        return bool(math_verify.verify(gold, given, timeout_seconds=None))


def _read(path: str) -> list[tuple[str, str]]:
    found = []
    for where, row in rows(path, ("question", "answer")):
        question, mark, answer = str(row["question"]), *str(row["answer"]).rpartition(MARK)[1:]
        answer = answer.strip().replace(",", "")
        if not mark or not answer:
            raise ValueError(f"{where}: the answer has no final number after {MARK}")
        found.append((question, answer))
    return found


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ImportError(f"task: gsm8k needs math-verify ({error}): pip install 'fedasync[tasks]'") from error
    return math_verify


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warning that its time limits are off."""
    logger = logging.getLogger("math_verify")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
