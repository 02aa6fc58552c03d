"""A tokenizer of single characters, for a model built from scratch."""

from __future__ import annotations

from collections.abc import Sequence

from fedasync.rl.environment import Message
from fedasync.rl.language_policy import HuggingFaceTokenizer

PAD, END = "␀", "␃"
"""The pad and the end token, each shown as one character, so that a pad in an answer is one wrong character."""

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
"""What is assumed of an environment that names no alphabet: printable ASCII and the line feed."""


class CharacterTokenizer(HuggingFaceTokenizer):
    """A token for each character of ``alphabet`` after pad (0) and end (1), by a ``PreTrainedTokenizerFast``.

    The order of ``alphabet`` is the order of the tokens; a character that comes twice counts once. Encoding any other
    character raises ValueError. Raises ValueError for an empty alphabet and for one with the pad or the end token.
    """

    def __init__(self, alphabet: str) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        characters = list(dict.fromkeys(alphabet))
        if not characters or {PAD, END} & set(characters):
            raise ValueError(f"alphabet must be at least one character and none of {PAD}{END}, got {alphabet!r}")
        tokens = {token: number for number, token in enumerate([PAD, END, *characters])}
        tokenizer = Tokenizer(models.WordLevel(tokens))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        super().__init__(
            PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
                tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
            )
        )
        self.size = len(tokens)
        self._characters = frozenset(characters)

    def encode(self, text: str) -> list[int]:
        self._check(text)
        return super().encode(text)

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        self._check(prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt))
        return super().encode_prompt(prompt)

    def _check(self, text: str) -> None:
        if unknown := set(text) - self._characters:
            raise ValueError(
                f"the model's alphabet has no {''.join(sorted(unknown))!r}: an attribute `alphabet` of the environment "
                "with all characters of prompts and answers would do"
            )
