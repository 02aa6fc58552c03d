"""Tasks of reasoning-gym: generated without end, graded by its own rules after the answer has been picked out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from fedasync.core.bounds import check_choice, check_integer, check_type
from fedasync.rl.environment import Message, Reply
from fedasync.rl.tasks.prompts import check_counts, check_prompt, held_back

Pick = Literal["last_number", "tag", "whole"]

INSTRUCTIONS: dict[str, str] = {
    "last_number": "Answer with the number alone.",
    "tag": "Give the final answer as <answer>…</answer>.",
    "whole": "Answer with the bare answer alone.",
}

_DRAWS = 200
"""So many questions are drawn for a prompt until one is on its side; one of five is on the rarer side."""

_NUMBER = re.compile(r"(?:(?<![\d)])-)?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def picked(text: str, pick: Pick) -> str:
    """The answer in a text, "" where it has none: the last number, what the last answer tag holds, or all of it."""
    if pick == "last_number":
        return str((_NUMBER.findall(text) or [""])[-1]).replace(",", "")
    return str((_TAG.findall(text) or [""])[-1] if pick == "tag" else text).strip()


@dataclass(frozen=True)
class ReasoningGym:
    """``kind = "reasoning_gym"``: the task ``name`` of reasoning-gym, its difficulty by ``config``.

    The graders pay in part for an answer that merely stands in the text, so it is picked out first. ``binary`` pays 1
    for the grader's full mark and 0 else, ``graded`` what the grader says. About a fifth of all questions is never
    trained on, and held-out prompts are those. ``size`` is how many prompts there are to train on; they may repeat
    where the task has few. ``examples`` of them stand before each question with their answers, as turns of the chat.
    """

    name: str
    size: int = 10_000
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    reward: Literal["binary", "graded"] = "binary"
    pick: Pick = "last_number"
    instruction: str | None = None
    examples: int = 0
    held_out: int = 64

    def __post_init__(self) -> None:
        check_type("task: name", self.name, str, "the name of a task of reasoning-gym")
        check_integer("task: size", self.size, 1)
        check_integer("task: examples", self.examples, 0)
        check_type("task: config", self.config, Mapping, "a table of the task's own settings")
        if taken := {"seed", "size"} & set(self.config):
            raise ValueError(f"task: config must leave {' and '.join(sorted(taken))} to the key of the task itself")
        check_counts(None, self.held_out, self.seed)
        check_choice("task: reward", self.reward, Literal["binary", "graded"])
        check_choice("task: pick", self.pick, Pick)
        check_type("task: instruction", self.instruction, str | None, "a text that follows the question")
        answers = [str(self._dataset[number]["answer"]) for number in range(3)]
        odd = next((each for each in answers if picked(each, self.pick) != each.replace(",", "")), None)
        if self.pick == "last_number" and odd is not None:
            raise ValueError(
                f"task: {self.name} has answers such as {odd!r}, which is no number; pick = 'tag' or 'whole' would do"
            )

    @property
    def prompts(self) -> int:
        return self.size

    def start(self, prompt: int, *, held_out: bool = False) -> Question:
        """The episode of a prompt. Raises ValueError for a prompt that there is not."""
        check_prompt("reasoning_gym", prompt, self.size, self.held_out, of_held_out=held_out)
        step, first = (self.held_out, self.size * _DRAWS) if held_out else (self.size, 0)
        for draw in range(_DRAWS):
            entry = self._dataset[first + prompt + draw * step]
            if not self.held_out or held_back(entry["question"]) == held_out:
                messages = [*self._shown, self._asked(entry)]
                return Question(messages, self._dataset, entry, self.pick, self.reward == "binary")
        raise ValueError(
            f"task: {self.name} has too few questions to hold some of them out: none of {_DRAWS} draws for "
            f"{'held-out ' * held_out}prompt {prompt} would do; held_out = 0 or another config would"
        )

    def _asked(self, entry: Mapping[str, Any]) -> Message:
        told = self.instruction if self.instruction is not None else INSTRUCTIONS[self.pick]
        return {"role": "user", "content": "\n".join(filter(None, [entry["question"], told]))}

    @cached_property
    def _shown(self) -> list[Message]:
        """The worked examples: none of them is a question that is held out."""
        first = (self.size + self.held_out) * _DRAWS
        entries = (self._dataset[first + number] for number in range(_DRAWS * self.examples))
        shown: list[Message] = []
        for entry in islice((each for each in entries if not held_back(each["question"])), self.examples):
            answer = f"<answer>{entry['answer']}</answer>" if self.pick == "tag" else str(entry["answer"])
            shown += [self._asked(entry), {"role": "assistant", "content": answer}]
        return shown

    @cached_property
    def _dataset(self) -> Any:
        """One data set for training and evaluation: item i is drawn with ``seed`` + i, so that a data set of a seed
        near by would hold the same items in other places."""
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError as error:
            raise ImportError(f"task: {self.name} needs reasoning-gym: pip install 'fedasync[tasks]'") from error
        if self.name not in DATASETS:
            near = get_close_matches(self.name, DATASETS, 3, 0.5)
            did = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(DATASETS))}"
            raise ValueError(f"task: reasoning-gym has no {self.name!r}{did}")
        try:
            size = (self.size + self.held_out + self.examples) * _DRAWS
            return create_dataset(self.name, seed=self.seed, size=size, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"task: config of {self.name}: {error}") from error


@dataclass(frozen=True)
class Question:
    """One question to one answer."""

    prompt: Sequence[Message]
    dataset: Any
    entry: Mapping[str, Any]
    pick: Pick
    binary: bool

    def step(self, text: str) -> Reply:
        score = float(self.dataset.score_answer(picked(text, self.pick), self.entry))
        return Reply(float(score >= 1 - 1e-9) if self.binary else score)
