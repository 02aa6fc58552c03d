"""Find a hidden number by asking: a task of many turns, in which the environment's words are a part of the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fedasync.core.bounds import check_integer, check_type
from fedasync.rl.environment import Reply
from fedasync.rl.tasks.prompts import check_counts, check_prompt
from fedasync.streams import Stream

HIGHER, LOWER, NO_NUMBER = "higher", "lower", "?"


@dataclass(frozen=True)
class Guess:
    """``kind = "guess"``: a number from 0 to ``highest`` is to be hit within ``turns`` turns.

    After each turn the environment says ``higher`` or ``lower``, and ``?`` where the turn had no number; its last
    number is what counts. A hit earns 1. The prompt is the same for all, ``0-9?`` say, or ``prompt_text``; the hidden
    number differs. ``frame`` is what stands around the environment's words, ``{}`` for them: of a chat model, the end
    of one role's message and the beginning of the other's.
    """

    highest: int = 9
    turns: int = 4
    prompt_text: str | None = None
    frame: str = " {}\n"
    prompts: int | None = None
    held_out: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("task: highest", self.highest, 1)
        check_integer("task: turns", self.turns, 1)
        check_type("task: prompt_text", self.prompt_text, str | None, "a text")
        check_counts(self.prompts, self.held_out, self.seed)
        if not isinstance(self.frame, str) or self.frame.count("{}") != 1:
            raise ValueError(f"task: frame must be a text with one {{}} in it, got {self.frame!r}")

    @property
    def alphabet(self) -> str:
        """All characters of prompts, guesses and what the environment says."""
        said = HIGHER + LOWER + NO_NUMBER + self.frame.replace("{}", "")
        return "".join(dict.fromkeys("0123456789" + self._prompt + said))

    @property
    def _prompt(self) -> str:
        return f"0-{self.highest}?\n" if self.prompt_text is None else self.prompt_text

    def start(self, prompt: int, *, held_out: bool = False) -> Hidden:
        """The episode of a prompt. Raises ValueError for a prompt that there is not."""
        check_prompt("guess", prompt, self.prompts, self.held_out, of_held_out=held_out)
        stream = Stream(self.seed, "guess held out" if held_out else "guess")
        return Hidden(self._prompt, stream.bits(prompt) % (self.highest + 1), self.turns, self.frame)


@dataclass
class Hidden:
    """One hidden number."""

    prompt: str
    number: int
    turns_left: int
    frame: str

    def step(self, text: str) -> Reply:
        self.turns_left -= 1
        digits = re.findall(r"[0-9]+", text)
        # Of a flood of digits the first ones are enough to tell: Python reads no more than 4,300 of them.
        guess = int(digits[-1][:100]) if digits else None
        done = guess == self.number or self.turns_left <= 0
        said = NO_NUMBER if guess is None else HIGHER if guess < self.number else LOWER
        return Reply(float(guess == self.number), done, "" if done else self.frame.format(said))
