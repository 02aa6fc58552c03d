"""A causal language model of Hugging Face with its tokenizer, as a policy."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedasync.core.bounds import check_integer
from fedasync.rl.batch import Batch
from fedasync.rl.policy import Answer, Scores, States, upcast
from fedasync.rl.value_head import has_value_head

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedasync.rl.environment import ControlEnvironment, Environment, Message


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Each of them ends a turn; perhaps none."""
        ...

    @property
    def pad_token(self) -> int:
        """Any token of the vocabulary: what it fills is masked out."""
        ...

    def encode(self, text: str) -> list[int]:
        """A text in the middle of an answer: no begin token, no end token."""
        ...

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """A text as it is, with a begin token if there is one; messages by the chat template, if there is one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, special tokens included."""
        ...


class HuggingFaceTokenizer:
    """A ``PreTrainedTokenizer`` as a Tokenizer. One without a pad token pads with an end token, else with 0."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int] = ()) -> None:
        """``end_tokens``: those of the model's settings, beside the tokenizer's own."""
        self.tokenizer = tokenizer
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_tokens = tuple(dict.fromkeys([*own, *map(int, end_tokens)]))
        pad = tokenizer.pad_token_id
        self.pad_token = next(iter(self.end_tokens), 0) if pad is None else int(pad)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if not self.tokenizer.chat_template:
            return list(self.tokenizer.encode("\n".join(message["content"] for message in prompt)))
        messages = [dict(message) for message in prompt]
        return list(
            self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True, eq=False)
class LanguagePolicy:
    """A causal language model (``…ForCausalLM``), its tokenizer, and the most tokens it can look at.

    It has a critic where its module has a value head (``value_head``).
    """

    module: nn.Module
    tokenizer: Tokenizer
    context_tokens: int

    def __post_init__(self) -> None:
        check_integer("policy: context_tokens", self.context_tokens, 2)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self.tokenizer.end_tokens

    @property
    def pad_token(self) -> int:
        return self.tokenizer.pad_token

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        return self.tokenizer.encode_prompt(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def score(self, module: nn.Module, batch: Batch, temperature: float) -> Scores:
        """See ``Policy``. Rows are filled up on the right, where causal attention does not look."""
        import torch

        kept, critic = _before_generated(batch), has_value_head(self.module)
        found = _forward(module, batch, kept, **({"output_hidden_states": True} if critic else {}))
        logits = upcast(found.logits) / temperature
        log_probs = torch.log_softmax(logits, -1)
        chosen = log_probs.gather(-1, batch.tokens[:, kept + 1, None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        nothing = chosen.new_zeros(batch.tokens.shape)
        mask = batch.generated
        return Scores(
            nothing.index_copy(1, kept + 1, chosen).where(mask, nothing),
            nothing.index_copy(1, kept + 1, entropy).where(mask, nothing),
            # Before the first token nothing was seen.
            torch.cat([nothing[:, :1], upcast(found.values)], 1) if critic else None,
        )

    def states(self, module: nn.Module, batch: Batch) -> States:
        """Features are the last layer's hidden states."""
        kept = _before_generated(batch)
        found = _forward(module, batch, kept, output_hidden_states=True)
        at = batch.generated[:, kept + 1]
        return States(upcast(found.logits)[at], upcast(found.hidden_states[-1])[:, kept][at])

    def greedy(
        self,
        module: nn.Module,
        environment: Environment | ControlEnvironment,
        prompts: Sequence[int],
        max_new_tokens: int,
    ) -> list[Answer]:
        """See ``Policy``: up to the first end token. Prompts that leave no room in the context are left out."""
        starts: list[Any] = [environment.start(prompt, held_out=True) for prompt in prompts]
        told = [self.encode_prompt(each.prompt) for each in starts]
        found: dict[int, Answer] = {}
        for length in sorted({len(each) for each in told if each and len(each) < self.context_tokens}):
            rows = [at for at, each in enumerate(told) if len(each) == length]
            room = min(max_new_tokens, self.context_tokens - length)
            chosen = _greedy(module, [told[at] for at in rows], room, self.end_tokens)
            for at, tokens in zip(rows, chosen, strict=True):
                found[at] = Answer(np.array(told[at] + tokens, np.int64), length)
        return [found[at] for at in sorted(found)]


def _greedy(module: nn.Module, prompts: list[list[int]], most: int, end_tokens: tuple[int, ...]) -> list[list[int]]:
    """The most likely tokens after prompts of one length, up to an end token each."""
    import torch
    from torch import Tensor
    from transformers import DynamicCache

    given = torch.tensor(prompts, device=next(module.parameters()).device)
    ends = torch.tensor(end_tokens, device=given.device)
    taken = inspect.signature(module.forward).parameters
    name = "cache" if "cache" in taken else "past_key_values"  # as it was called before transformers 5.24
    cache, chosen = DynamicCache(), list[Tensor]()
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=given.device)
    while len(chosen) < most and not bool(ended.all()):
        out = module(input_ids=given, use_cache=True, logits_to_keep=1, **{name: cache})
        given = out.logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(given[:, 0])
        ended |= torch.isin(given[:, 0], ends)
    lists: list[list[int]] = torch.stack(chosen, 1).tolist()
    return [row[: next((at + 1 for at, token in enumerate(row) if token in end_tokens), len(row))] for row in lists]


def _before_generated(batch: Batch) -> Tensor:
    """Positions whose next token was generated, in any row: logits elsewhere are not made. At least one."""
    import torch

    if bool(batch.generated[:, 0].any()):
        raise ValueError("policy: an answer's first token was generated, and there is nothing to predict it from")
    kept = batch.generated[:, 1:].any(0).nonzero()[:, 0]
    return kept if len(kept) else torch.zeros(1, dtype=torch.long, device=kept.device)


def _forward(module: nn.Module, batch: Batch, kept: Tensor, **asked: Any) -> Any:
    return module(input_ids=batch.tokens, use_cache=False, logits_to_keep=kept, **asked)
