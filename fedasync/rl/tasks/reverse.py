"""Write the symbols backwards: a task that a small model learns from nothing in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from string import ascii_lowercase
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer
from fedasync.rl.environment import Reply
from fedasync.rl.tasks.prompts import check_counts, check_prompt, held_back
from fedasync.streams import Stream

SEPARATOR = ">"


_stream = cache(Stream)
"""A stream is the same for all prompts."""


@dataclass(frozen=True)
class Reverse:
    """``kind = "reverse"``: the prompt is ``length`` symbols and ``>``, the answer the symbols backwards.

    ``length`` is a number, or the least and the most: each length is then half as likely as the one before, so that
    few answers are long (ours). ``dense`` pays the share of right positions among those of the longer of answer and
    target, ``exact`` pays 1 for the target alone. About a fifth of all strings is never trained on, and held-out
    prompts are drawn from those; with ``held_out = 0`` all are trained on.
    """

    length: int | list[int] | tuple[int, int] = 4
    symbols: int = 6
    reward: Literal["dense", "exact"] = "dense"
    prompts: int | None = None
    held_out: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("task: symbols", self.symbols, 2)
        if self.symbols > len(ascii_lowercase):
            raise ValueError(f"task: symbols must be at most {len(ascii_lowercase)}, got {self.symbols}")
        check_choice("task: reward", self.reward, Literal["dense", "exact"])
        check_counts(self.prompts, self.held_out, self.seed)
        ends = self.length if isinstance(self.length, list | tuple) else [self.length]
        for end in ends:
            check_integer("task: length", end, 1)
        if len(ends) not in (1, 2) or ends[0] > ends[-1]:
            raise ValueError(f"task: length must be a number, or the least and the most, got {self.length!r}")
        for length in self.lengths if self.held_out else ():
            strings = map("".join, product(self.alphabet[:-1], repeat=length))
            if len({held_back(text) for text in islice(strings, 4096)}) < 2:
                raise ValueError(
                    f"task: {self.symbols**length} strings of length {length} are too few to hold some of them out; "
                    "held_out = 0, more symbols or a greater length would do"
                )

    @property
    def lengths(self) -> range:
        ends = self.length if isinstance(self.length, list | tuple) else [self.length]
        return range(ends[0], ends[-1] + 1)

    @property
    def alphabet(self) -> str:
        """All characters of prompts and answers."""
        return ascii_lowercase[: self.symbols] + SEPARATOR

    def start(self, prompt: int, *, held_out: bool = False) -> Reversal:
        """The episode of a prompt. Raises ValueError for a prompt that there is not."""
        check_prompt("reverse", prompt, self.prompts, self.held_out, of_held_out=held_out)
        stream = _stream(self.seed, "reverse held out" if held_out else "reverse")
        length = self._length(stream.uniform(prompt, 0))
        draw = 0
        while True:
            draw += 1
            bits = [stream.bits(prompt, draw * 2**20 + position) for position in range(length)]
            text = "".join(ascii_lowercase[each % self.symbols] for each in bits)
            if not self.held_out or held_back(text) == held_out:
                return Reversal(text, self.reward == "dense")

    def _length(self, uniform: float) -> int:
        """The length with P(least + k) ∝ 2^−k at a uniform number."""
        reached, total = 0.0, 2 - 2.0 ** (1 - len(self.lengths))
        for k, length in enumerate(self.lengths):
            reached += 2.0**-k / total
            if uniform < reached:
                return length
        return self.lengths[-1]


@dataclass(frozen=True)
class Reversal:
    """One string to reverse."""

    text: str
    dense: bool

    @property
    def prompt(self) -> str:
        return self.text + SEPARATOR

    def step(self, text: str) -> Reply:
        target = self.text[::-1]
        if not self.dense:
            return Reply(float(text == target))
        right = sum(a == b for a, b in zip(text, target, strict=False))
        return Reply(right / max(len(text), len(target)))
