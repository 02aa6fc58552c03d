"""Which prompts a task has, and which of them are never trained on."""

from __future__ import annotations

from hashlib import blake2b

from fedasync.core.bounds import check_integer

HELD_BACK = 0.2
"""Of all texts that there can be, about so many are for evaluation alone."""


def held_back(text: str) -> bool:
    """Whether a prompt is for evaluation alone: a function of the text, so that one drawn again is no leak."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") < HELD_BACK * 2**32


def check_counts(prompts: int | None, held_out: int, seed: int) -> None:
    """Raise ValueError for numbers of prompts and a seed that no task can have."""
    if prompts is not None:
        check_integer("task: prompts", prompts, 1)
    check_integer("task: held_out", held_out, 0)
    check_integer("task: seed", seed, 0)


def check_prompt(kind: str, prompt: int, prompts: int | None, held_out: int, *, of_held_out: bool) -> None:
    """Raise ValueError for the number of a prompt that there is not."""
    limit = held_out if of_held_out else prompts
    if prompt < 0 or (limit is not None and prompt >= limit):
        which = "held-out" if of_held_out else "training"
        there = "none" if limit == 0 else f"0 … {limit - 1}" if limit is not None else "0 …"
        raise ValueError(f"{kind}: there is no {which} prompt {prompt}; there are {there}")
