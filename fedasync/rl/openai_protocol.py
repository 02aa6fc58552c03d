"""What is said to a completions server and what its answers mean: dictionaries in, tokens out, no connection here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from typing import Any, Protocol

from fedasync.rl.environment import Message
from fedasync.rl.openai_settings import MissingLogProbs, OpenAIServer
from fedasync.rl.sampling import Sampling

NO_PROBABILITY = -9999.0
"""How vLLM writes −∞, which JSON cannot."""

_TOKEN_ID = re.compile(r"token_id:(\d+)")


class MalformedError(ValueError):
    """The server's answer is not one to train on; asking again would not help."""


class Text(Protocol):
    """A tokenizer, as far as it is needed here."""

    @property
    def end_tokens(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Reader(Text, Protocol):
    """A tokenizer for prompts too, and the most tokens that prompt, answer and observations may have together."""

    @property
    def context_tokens(self) -> int: ...

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]: ...


def completion_body(
    server: OpenAIServer, sampling: Sampling, end_tokens: Sequence[int], prompt: Sequence[int], most: int, seed: int
) -> dict[str, Any]:
    """The body of a request for at most ``most`` tokens after a prompt of tokens.

    Everything that shapes the distribution is said, for servers fill in what is not from the model's own generation
    defaults (top-k, top-p and repetition penalties of vLLM, say).
    """
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": most,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 1,
        "seed": seed,
        "n": 1,
        "stream": server.stream,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if server.stream:
        body["stream_options"] = {"include_usage": True}
    if server.dialect == "plain":
        if sampling.top_k is not None:
            body["top_k"] = sampling.top_k
        return body
    body |= {
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(end_tokens),
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    return body | (
        {"no_stop_trim": True}
        if server.dialect == "sglang"
        else {"return_tokens_as_token_ids": True, "return_weight_versions": True}
    )


@dataclass
class Collected:
    """What has come of one request so far; whole, or piece by piece."""

    version: int
    """Of tokens that come now."""
    prompt: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    texts: list[str] = field(default_factory=list)
    """Of each token, where the server gave no numbers."""
    finish: str | None = None
    stop_reason: Any = None
    told_tokens: int | None = None
    """How many there were by the server's own count."""
    missing: int = 0

    def add(self, answer: Mapping[str, Any], named: Collection[int] = ()) -> None:
        """A whole answer, or one piece of a stream. Raises MalformedError.

        ``named``: versions that the server knows by their number, so that its word of them is heeded.
        """
        usage = answer.get("usage")
        if isinstance(usage, Mapping) and isinstance(usage.get("completion_tokens"), int):
            self.told_tokens = usage["completion_tokens"]
        choices = answer.get("choices")
        if not isinstance(choices, list) or not all(isinstance(each, Mapping) for each in choices):
            raise MalformedError("its answer has no list of choices")
        for choice in choices:
            self._add_choice(choice)
            for span in choice.get("weight_versions") or ():
                self._by_span(span, named)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        given = choice.get("logprobs") or {}
        names = given.get("tokens") or []
        tokens = choice.get("token_ids")
        if tokens is None and names and all(_TOKEN_ID.fullmatch(str(name)) for name in names):
            tokens = [int(str(name).removeprefix("token_id:")) for name in names]
        if tokens is None:
            self.texts += map(str, names)
        elif not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise MalformedError("its token ids are not integers ≥ 0")
        else:
            self.tokens += tokens
            self.versions += [self.version] * len(tokens)
        self.log_probs += map(_log_prob, given.get("token_logprobs") or [])
        if (read := choice.get("prompt_token_ids")) and self.prompt and list(read) != list(self.prompt):
            raise MalformedError(f"it read {len(read)} other tokens than the {len(self.prompt)} of the prompt")
        self.text += choice.get("text") or ""
        self.finish = choice.get("finish_reason") or self.finish
        self.stop_reason = choice.get("stop_reason", choice.get("matched_stop", self.stop_reason))

    def _by_span(self, span: Mapping[str, Any], named: Collection[int]) -> None:
        """Tokens [start, end) are of this version by the server's own word."""
        label = str(span.get("version", ""))
        if label.isdecimal() and int(label) in named:
            first, end = max(0, int(span["start"])), min(len(self.versions), int(span["end"]))
            self.versions[first:end] = [int(label)] * max(0, end - first)

    def partial(self, missing: MissingLogProbs) -> None:
        """Cut to the tokens of which all is known; none where the server gives text only."""
        if missing == "nan" and not self.log_probs:
            self.log_probs = [nan] * len(self.tokens)
        known = min(len(self.tokens), len(self.log_probs))
        if missing == "refuse":
            known = next((at for at, value in enumerate(self.log_probs[:known]) if isnan(value)), known)
        for column in (self.tokens, self.log_probs, self.versions):
            del column[known:]

    def settle(self, text: Text, most: int, missing: MissingLogProbs) -> None:
        """A whole answer: every token with its log-probability and version. Raises MalformedError."""
        if not self.tokens and (self.text or self.texts):
            self._tokens_from_text(text)
        if self.finish not in ("stop", "length"):
            raise MalformedError(f'it ended with {self.finish!r}; "stop" or "length" would do')
        count = len(self.tokens)
        if not count:
            raise MalformedError("it gave no tokens")
        if count > most:
            raise MalformedError(f"it gave {count} tokens, and at most {most} were asked for")
        if self.told_tokens not in (None, count):
            raise MalformedError(f"it counts {self.told_tokens} tokens and gave {count}")
        if self.finish == "stop" and self.tokens[-1] not in text.end_tokens:
            raise MalformedError(
                f"it stopped (stop_reason {self.stop_reason!r}) and its last token, {self.tokens[-1]}, is no end token "
                "of the policy: it leaves the end token out, or stops at others"
            )
        if not self.log_probs:
            self.log_probs = [nan] * count
        if len(self.log_probs) != count:
            raise MalformedError(f"it gave {count} tokens and {len(self.log_probs)} log-probs")
        self.missing = sum(isnan(value) for value in self.log_probs)
        if self.missing and missing == "refuse":
            raise MalformedError(
                f'it gave no log-prob for {self.missing} of {count} tokens; missing_log_probs = "nan" leaves them to '
                "the objective"
            )

    def _tokens_from_text(self, text: Text) -> None:
        """Tokens by encoding the text anew, where nothing speaks against them. Raises MalformedError."""
        tokens = text.encode(self.text)
        if text.decode(tokens) != self.text:
            raise MalformedError("it gave text only, which does not survive encoding and decoding; token ids would do")
        wanted = len(self.log_probs) or len(self.texts) or self.told_tokens
        if self.finish == "stop" and wanted == len(tokens) + 1 and len(text.end_tokens) == 1:
            tokens.append(text.end_tokens[0])
        alike = all(text.decode([token]) == name for token, name in zip(tokens, self.texts, strict=False) if name)
        if wanted != len(tokens) or not alike:
            raise MalformedError(
                f"it gave text only, of {wanted} tokens by its own count, and the policy's tokenizer makes "
                f"{len(tokens)}{'' if alike else ' others'} of it; token ids would do"
            )
        self.tokens, self.versions = tokens, [self.version] * len(tokens)


def _log_prob(value: Any) -> float:
    """As a number: NaN for none. Raises MalformedError for what is no log-probability."""
    if value is None:
        return nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedError(f"it gave {value!r} for a log-prob")
    if value <= NO_PROBABILITY:
        return -inf
    if isfinite(value) and value > 1e-4:
        raise MalformedError(f"it gave {value:g} for a log-prob, which is > 0 (logits instead of log-probs?)")
    return min(float(value), 0.0) if isfinite(value) else nan


def error_text(content: str, secret: str | None = None) -> str:
    """One line of an error's body, without the bearer token."""
    import json

    try:
        told = json.loads(content)
    except ValueError:
        told = content
    while isinstance(told, dict):
        told = next((told[key] for key in ("error", "message", "detail") if told.get(key)), str(told))
    line = " ".join(str(told).split())[:200] or "no text"
    return line.replace(secret, "…") if secret else line
