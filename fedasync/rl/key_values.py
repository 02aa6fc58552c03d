"""A causal model of Hugging Face with a KV cache of slots, one for each running sequence.

Slot i holds the token at position p of its sequence at place p, so that sequences of any lengths stand side by side
without padding between them, one step writes one place a slot, and a slot that has ended is overwritten.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class Plan(NamedTuple):
    """What a forward pass over [u, q] tokens writes, and what it attends to."""

    places: Tensor
    """[m × q], slot × places + place of each token that is written, m ≥ u."""
    spread: Tensor | None
    """[m]: whose keys and values each written row is; None: all of them in order."""
    read: Tensor | int | None
    """Slots [u] that are attended to; an integer: the first so many; None: only what is new."""
    width: int
    """Places that are attended to."""


class KeyValues:
    """Keys and values by layer, [slots, places, heads, head size]; what a model takes as its ``cache``.

    It grows as it must. ``plan`` says what the next forward pass does with it.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.slots = self.places = 0
        self.plan: Plan | None = None

    def reserve(self, slots: int, places: int) -> None:
        """Room for so many slots and places, at least; what is there stays."""
        if slots <= self.slots and places <= self.places:
            return
        self.slots = self.slots if slots <= self.slots else 1 << (slots - 1).bit_length()
        self.places = self.places if places <= self.places else max(32, 1 << (places - 1).bit_length())
        self.layers = [(self._grown(keys), self._grown(values)) for keys, values in self.layers]

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros((self.slots, self.places, *old.shape[2:]))
        new[: old.shape[0], : old.shape[1]] = old
        return new

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: [u, heads, q, head size] of new tokens; those that are attended to."""
        assert self.plan is not None
        if layer_idx == len(self.layers):
            # Zeros: what is masked still enters as 0 × value, which NaN would survive.
            made = [each.new_zeros((self.slots, self.places, each.shape[1], each.shape[3])) for each in (keys, values)]
            self.layers.append((made[0], made[1]))
        stored = self.layers[layer_idx]
        return self._one(stored[0], keys), self._one(stored[1], values)

    def _one(self, stored: Tensor, new: Tensor) -> Tensor:
        places, spread, read, width = self.plan  # type: ignore[misc]
        written = new.transpose(1, 2)
        if spread is not None:
            written = written[spread]
        stored.view(-1, *stored.shape[2:]).index_copy_(0, places, written.reshape(-1, *stored.shape[2:]))
        if read is None:
            return new
        found = stored[:read, :width] if isinstance(read, int) else stored[:, :width].index_select(0, read)
        return found.transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Some models ask; positions are given to them, so that it has no effect."""
        return 0

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slots into other slots' places."""
        if sources:
            for stored in (each for layer in self.layers for each in layer):
                stored[torch.tensor(targets)] = stored[torch.tensor(sources)]

    def clear(self) -> None:
        for stored in (each for layer in self.layers for each in layer):
            stored.zero_()


class CachedModel:
    """A causal language model (``…ForCausalLM``) and the KV cache of what runs.

    Masks are made here and given whole ([rows, 1, q, places]), which models with full attention take as they are under
    ``sdpa`` and ``eager``. Raises ValueError for other models.
    """

    def __init__(self, module: nn.Module, context_tokens: int, prefill_tokens: int = 16_384) -> None:
        """``prefill_tokens``: the most, padding counted, that one forward pass prefills (a single longer row apart)."""
        self.module, self.context_tokens, self.prefill_tokens = module, context_tokens, prefill_tokens
        self.cache = KeyValues()
        parameter = next(module.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        taken = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"  # its name before transformers 5.24
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        _check_attention(module, taken, context_tokens)
        self._far = torch.finfo(self.dtype).min
        self._order = torch.arange(context_tokens, device=self.device)

    def prefill(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> int:
        """Make the cache hold ``tokens`` of each slot from place ``starts`` on, where it holds all before.

        Rows that start at 0 with the same tokens (answers to one prompt) are computed once. The number of tokens that
        were computed.
        """
        fresh: dict[tuple[int, ...], list[int]] = {}
        for slot, row, start in zip(slots, tokens, starts, strict=True):
            if start == 0:
                fresh.setdefault(tuple(row), []).append(slot)
        parts: list[tuple[Sequence[int], list[int], int]] = [(row, held, 0) for row, held in fresh.items()]
        parts += [(row, [slot], start) for slot, row, start in zip(slots, tokens, starts, strict=True) if start > 0]
        # Rows of like lengths together: less is filled up.
        parts.sort(key=lambda part: (part[2] > 0, len(part[0])))
        while parts:
            count = 1
            while count < len(parts) and (parts[count][2] > 0) == (parts[0][2] > 0):
                if (count + 1) * len(parts[count][0]) > self.prefill_tokens:
                    break
                count += 1
            self._prefill(parts[:count])
            parts = parts[count:]
        return sum(len(row) for row in fresh) + sum(
            len(row) for row, start in zip(tokens, starts, strict=True) if start > 0
        )

    def _prefill(self, parts: Sequence[tuple[Sequence[int], list[int], int]]) -> None:
        q = max(len(row) for row, _, _ in parts)
        first = torch.tensor([start for _, _, start in parts], device=self.device)
        given = torch.tensor([[*row, *[0] * (q - len(row))] for row, _, _ in parts], device=self.device)
        held = torch.tensor([slot for _, slots, _ in parts for slot in slots], device=self.device)
        counts = torch.tensor([len(slots) for _, slots, _ in parts], device=self.device)
        spread = torch.arange(len(parts), device=self.device).repeat_interleave(counts)
        width = q + max(start for _, _, start in parts)
        self.cache.reserve(int(held.max()) + 1, width)
        steps = torch.arange(q, device=self.device)
        positions = first[:, None] + steps
        # What fills a row up lies behind it in its slot, where it is overwritten before anything attends to it.
        places = (held * self.cache.places)[:, None] + positions[spread]
        shared = len(held) > len(parts)
        read = held if parts[0][2] > 0 else None
        self.cache.plan = Plan(places.flatten(), spread if shared else None, read, width)
        reach = torch.arange(width, device=self.device)
        self._forward(given, positions.clamp(max=self.context_tokens - 1), reach <= positions[..., None])

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append a token to each of the first n slots, where it holds all before; logits [n, vocabulary] behind it."""
        n, width = len(tokens), max(positions) + 1
        self.cache.reserve(n, width)
        place = torch.tensor(positions, device=self.device)[:, None]
        first = torch.arange(0, n * self.cache.places, self.cache.places, device=self.device)
        self.cache.plan = Plan(first + place[:, 0], None, n, width)
        given = torch.tensor(tokens, device=self.device)[:, None]
        return self._forward(given, place, self._order[:width] <= place[..., None])

    def _forward(self, tokens: Tensor, positions: Tensor, attends: Tensor) -> Tensor:
        mask = torch.zeros(attends.shape, dtype=self.dtype, device=self.device).masked_fill_(~attends, self._far)
        found = self.module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask[:, None],
            use_cache=True,
            **{self._cache_name: self.cache},
            **self._only_last,
        )
        logits: Tensor = found.logits[:, -1]
        return logits


def _check_attention(module: nn.Module, taken: Any, context_tokens: int) -> None:
    config: Any = getattr(module, "config", None)
    if config is None or "position_ids" not in taken:
        raise ValueError(
            f"generation: {type(module).__name__} takes no position_ids; a causal model of Hugging Face "
            "that does would do"
        )
    kind = getattr(config, "_attn_implementation", None)
    if kind not in ("sdpa", "eager"):
        raise ValueError(f"generation: attention is {kind!r}; attn_implementation = 'sdpa' or 'eager' would do")
    layers = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window >= context_tokens:
        window, layers = None, layers - {"sliding_attention"}
    if layers or window is not None:
        what = " and ".join(sorted(layers)) or f"a sliding window of {window} tokens"
        raise ValueError(
            f"generation: {type(module).__name__} has {what}; full attention, or a context within it, would do"
        )
