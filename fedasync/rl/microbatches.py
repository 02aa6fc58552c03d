"""Sequences of many lengths packed into micro-batches of at most so many tokens (Fu et al. 2025, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer

Tie = Literal["fewest_tokens", "first"]


def microbatches(
    lengths: Sequence[int],
    capacity_tokens: int,
    least: int = 1,
    multiple_of: int = 1,
    tie: Tie = "fewest_tokens",
) -> list[list[int]]:
    """Indices of ``lengths``, a list for each micro-batch, none above the capacity.

    Long sequences go first, each to the micro-batch with the fewest sequences that has room; one is opened while there
    are fewer than ``least``, or where none has room. ``tie`` is between equally many sequences, which the paper leaves
    open. Their number is a multiple of ``multiple_of``: else all are packed again with a larger ``least``. Where
    sequences are too few for that, the last micro-batches are empty. Raises ValueError for a sequence that is longer
    than the capacity.
    """
    check_integer("microbatches: capacity_tokens", capacity_tokens, 1)
    check_integer("microbatches: least", least, 1)
    check_integer("microbatches: multiple_of", multiple_of, 1)
    check_choice("microbatches: tie", tie, Tie)
    for index, length in enumerate(lengths):
        check_integer(f"microbatches: length of sequence {index}", length, 0)
        if length > capacity_tokens:
            raise ValueError(
                f"microbatches: sequence {index} has {length} tokens and a micro-batch holds {capacity_tokens}; a "
                f"capacity of at least {max(lengths)} would do"
            )
    while True:
        packed = _packed(lengths, capacity_tokens, least, tie)
        wanted = -(-max(len(packed), least) // multiple_of) * multiple_of
        if len(packed) == wanted:
            return packed
        if wanted > len(lengths):
            packed = _packed(lengths, capacity_tokens, len(lengths), tie)
            return packed + [[] for _ in range(wanted - len(packed))]
        least = wanted


def _packed(lengths: Sequence[int], capacity_tokens: int, least: int, tie: Tie) -> list[list[int]]:
    packed: list[list[int]] = []
    held: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        room = [at for at in range(len(packed)) if held[at] + lengths[index] <= capacity_tokens]
        if len(packed) < least or not room:
            packed.append([index])
            held.append(lengths[index])
            continue
        at = min(room, key=lambda each: (len(packed[each]), held[each] if tie == "fewest_tokens" else 0, each))
        packed[at].append(index)
        held[at] += lengths[index]
    return packed
