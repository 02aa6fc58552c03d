"""Prompts and the groups of answers that they get: a data set in some order, and lengths by name of the draw."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from fedasync.core.bounds import check_integer, check_real, check_type
from fedasync.rl.prompt_order import PromptOrder
from fedasync.simulation.cluster.agents import Turn, TurnDraws, Turns, resolve
from fedasync.simulation.cluster.draws import MOST_TOKENS, Floats, Integers, quantiles, whole_tokens
from fedasync.simulation.cluster.lengths import AnswerTokens, Recorded, TwoLevel, largest, lengths
from fedasync.simulation.laws import Constant, Law, Values
from fedasync.streams import Draws

__all__ = ["Group", "PromptStream", "Prompts", "Recorded", "Turn", "TwoLevel"]

BLOCK, TURNS_BLOCK = 512, 64
"""Prompts drawn together; fewer where answers are many turns each."""
KEPT_BLOCKS = 8
MOST_ANSWERS = 65_536
MOST_PROMPTS = 10_000_000
"""Of a data set: the order of an epoch is an array."""


@dataclass(frozen=True)
class Prompts:
    """The data set and what is generated from it: ``answers`` to each prompt, a group.

    An answer generates ``answer_tokens`` in one turn, or as its ``turns`` say (``v1_start``, ``v1_end``, ``v2_end``,
    ``base_7b``, or a table), or, where a policy learns, as that says; at most ``most_tokens`` either way (None: no
    limit). Lists (``values``) are read in order:
    entry i is prompt i, or entry i × answers + j answer j of it, again from the first when the list is at its end.

    Prompts 0 … ``count`` − 1 come once an epoch, in an order drawn anew for each (``shuffle``) or as numbered, for
    ``epochs`` (None: without end). Without ``count`` every prompt is a new one. A prompt of more than
    ``most_prompt_tokens`` is refused when it is its turn (None: no limit). ``filtered_share`` of the groups teach
    nothing, all answers right or all wrong, and are rejected when they have been generated.
    """

    answers: int = 16
    answer_tokens: AnswerTokens | None = None
    prompt_tokens: Law = Constant(150.0)
    most_tokens: int | None = None
    most_prompt_tokens: int | None = None
    count: int | None = None
    epochs: int | None = None
    shuffle: bool = True
    turns: Turns | str | None = None
    filtered_share: float = 0.0

    def __post_init__(self) -> None:
        check_integer("prompts: answers", self.answers, 1)
        check_real("prompts: filtered_share", self.filtered_share, 0, 1, below=True)
        check_type("prompts: shuffle", self.shuffle, bool, "true or false")
        check_type("prompts: prompt_tokens", self.prompt_tokens, Law, "a law such as Constant(150.0)")
        if self.answer_tokens is not None:
            check_type("prompts: answer_tokens", self.answer_tokens, AnswerTokens, "a TwoLevel, a Recorded or a law")
        if self.turns is not None:
            check_type("prompts: turns", self.turns, Turns | str, "a Turns, or the name of a preset")
        for name in ("most_tokens", "most_prompt_tokens", "count", "epochs"):
            if getattr(self, name) is not None:
                check_integer(f"prompts: {name}", getattr(self, name), 1)
        most = {
            "answers": MOST_ANSWERS,
            "count": MOST_PROMPTS,
            "most_tokens": MOST_TOKENS,
            "most_prompt_tokens": MOST_TOKENS,
        }
        for name, bound in most.items():
            if (getattr(self, name) or 0) > bound:
                raise ValueError(f"prompts: {name} must be ≤ {bound:,}, got {getattr(self, name)}")
        if self.answer_tokens is not None and self.turns is not None:
            raise ValueError("prompts: give answer_tokens, or turns (whose segments have lengths), got both")
        if self.epochs is not None and self.count is None:
            raise ValueError(f"prompts: epochs = {self.epochs} of a data set without end; count would do")
        if self.turns is not None:
            resolve(self.turns)

    @property
    def total(self) -> int | None:
        """Prompts of all epochs; None: without end."""
        return None if self.count is None or self.epochs is None else self.count * self.epochs

    @property
    def longest(self) -> float:
        """Tokens that no answer with its prompt and what tools said exceeds, where laws or cuts say so; else inf."""
        prompt = _cut(self.prompt_tokens, self.most_prompt_tokens)
        if self.answer_tokens is not None:
            return prompt + max(1.0, _cut(self.answer_tokens, self.most_tokens))
        if self.turns is None:
            return inf
        turns = resolve(self.turns)
        calls = max(1.0, _cut(turns.tool_calls, turns.most_tool_calls))
        generated = (calls + 1) * max(1.0, _cut(turns.segment_tokens))
        observed = max(_cut(tool.observation_tokens) for tool in turns.tools)
        cut = generated if self.most_tokens is None else min(generated, self.most_tokens)
        return prompt + cut + (calls * observed if observed else 0.0)


def _cut(law: AnswerTokens, most: int | None = None) -> float:
    """The most of a law, rounded, that is cut there."""
    bound = largest(law)
    return min(float(round(bound)) if isfinite(bound) else inf, inf if most is None else most)


class Group(NamedTuple):
    """The lengths of a prompt and its answers. Its lists are shared: read, do not change them."""

    prompt_tokens: int
    tokens: list[int]
    """Generated by each answer over all its turns."""
    turns: list[list[Turn]] | None
    """None: every answer is one turn."""


class PromptStream:
    """The prompts of one seed: which comes when, and what its answers are like.

    How hard a prompt is depends on (seed, prompt), the luck of an answer on (seed, prompt, epoch, attempt, answer); so
    compared strategies meet the same answers, and one that is asked for more answers gets the same first ones.
    """

    def __init__(self, prompts: Prompts, seed: int) -> None:
        self._prompts = prompts
        self.order = PromptOrder(prompts.count, prompts.epochs, shuffle=prompts.shuffle, seed=seed)
        self._prompt_draws = Draws(seed, "prompt tokens")
        law = prompts.prompt_tokens
        self._listed = np.array(law.values, np.float64) if isinstance(law, Values) else None
        self._prompt_at = quantiles(law)
        self._most_prompt_tokens = None if prompts.most_prompt_tokens is None else MOST_TOKENS  # refused, not cut
        turns = None if prompts.turns is None else resolve(prompts.turns)
        self._turns = None if turns is None else TurnDraws(turns, prompts.answers, prompts.most_tokens, seed)
        self._block = BLOCK if turns is None else TURNS_BLOCK
        of = prompts.answer_tokens
        self._lengths = None if of is None else lengths(of, prompts.answers, seed)
        self._ready: dict[tuple[int, int], Group] = {}
        self._blocks: deque[list[tuple[int, int]]] = deque()

    def group(self, prompt: int, epoch: int, attempt: int = 0) -> Group:
        """What comes of a prompt; ``attempt`` counts how often it was asked before in that epoch.

        Quick for first attempts in the order of ``order.prompt_at``: they are drawn a block at a time.
        """
        if attempt:
            return self._draw(np.array([prompt]), epoch, attempt)[0]
        found = self._ready.get((prompt, epoch))
        return self._make_ready(prompt, epoch) if found is None else found

    def _make_ready(self, prompt: int, epoch: int) -> Group:
        """Draw the block that a prompt belongs to."""
        count = self._prompts.count
        shuffled = self.order.shuffled(epoch) if count is not None and self._prompts.shuffle else None
        place = prompt if shuffled is None else int(shuffled[1][prompt])
        first = place - place % self._block
        end = first + self._block if count is None else min(count, first + self._block)
        block = np.arange(first, end) if shuffled is None else shuffled[0][first:end]
        keys = [(each, epoch) for each in block.tolist()]
        self._ready.update(zip(keys, self._draw(block, epoch, 0), strict=True))
        self._blocks.append(keys)
        if len(self._blocks) > KEPT_BLOCKS:
            for key in self._blocks.popleft():
                self._ready.pop(key, None)
        return self._ready[prompt, epoch]

    def _draw(self, prompts: Integers, epoch: int, attempt: int) -> list[Group]:
        prompt_tokens = whole_tokens(self._prompt_lengths(prompts), self._most_prompt_tokens, least=0).tolist()
        if self._turns is not None:
            made = self._turns(prompts, epoch, attempt)
            tokens = [[sum(turn.tokens for turn in answer) for answer in group] for group in made]
            return list(map(Group, prompt_tokens, tokens, made))
        if self._lengths is None:
            raise AssertionError("prompts have answer_tokens or turns")
        tokens = whole_tokens(self._lengths(prompts, epoch, attempt), self._prompts.most_tokens).tolist()
        return [Group(own, answers, None) for own, answers in zip(prompt_tokens, tokens, strict=True)]

    def _prompt_lengths(self, prompts: Integers) -> Floats:
        if self._listed is not None:
            found: Floats = self._listed[prompts % len(self._listed)]
            return found
        return self._prompt_at(self._prompt_draws.uniform(prompts))
