"""``[engine] kind = "openai"``: which server generates, how long it is waited for, and how weights get there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from fedasync.core.bounds import check_choice, check_integer, check_real, check_type
from fedasync.rl.engine import KvCache

T = TypeVar("T")

Dialect = Literal["vllm", "sglang", "plain"]
"""Whose fields are sent beside those of OpenAI's protocol; "plain": none."""

MissingLogProbs = Literal["refuse", "nan"]
"""What becomes of tokens without a log-probability: the answer fails, or they are NaN for the objective to handle."""

Interrupted = Literal["continue", "finish", "restart"]
"""What becomes of requests that new weights meet: what has come is kept and the rest asked again; they end under the
weights that they began with, which wait for them; they are asked again from the turn's beginning."""

UpdateMode = Literal["none", "http"]


@dataclass(frozen=True)
class Call:
    """One HTTP request. In strings of path and body, ``{folder}`` and ``{version}`` are filled in; the string
    ``"{recompute}"`` becomes true where the KV cache is, false where it is kept."""

    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    method: Literal["POST", "GET"] = "POST"
    optional: bool = False
    """404 is no error: an older server does not know it."""
    kv: KvCache | None = None
    """Made only where this becomes of the KV cache; None: always."""

    def __post_init__(self) -> None:
        check_type("weight update: path", self.path, str, 'a path such as "/pause"')
        check_choice("weight update: method", self.method, Literal["POST", "GET"])
        if self.kv is not None:
            check_choice("weight update: kv", self.kv, KvCache)
        if not self.path.startswith("/"):
            raise ValueError(f'weight update: path must begin with "/", got {self.path!r}')

    def filled(self, folder: str, version: int, kv: KvCache) -> Call:
        """The call for a version whose weights lie in a folder."""

        def fill(value: Any) -> Any:
            if value == "{recompute}":
                return kv == "recompute"
            if isinstance(value, str):
                return value.replace("{folder}", folder).replace("{version}", str(version))
            if isinstance(value, Mapping):
                return {key: fill(each) for key, each in value.items()}
            return [fill(each) for each in value] if isinstance(value, list | tuple) else value

        return replace(self, path=fill(self.path), body=fill(dict(self.body)))


@dataclass(frozen=True)
class WeightUpdate:
    """How the server gets new weights.

    "none": it is static, or somebody else updates it; ``load`` sends nothing, and versions are labels only. "http": the
    weights are written to ``folder`` as safetensors, then ``before``, ``update`` and ``after`` are called in turn, each
    for ``timeout_s`` at most, ``update`` up to ``retries`` times more; ``named`` where the update was made, ``after``
    always, so that a paused server goes on. ``check`` is asked what the server has: ``check_field`` of its answer must
    be the version.
    """

    mode: UpdateMode = "none"
    folder: str = ""
    """Read by the server under the same name. It holds one folder a version, the last ``kept`` of them."""
    companions: str | None = None
    """A folder of a model whose other files (config.json, tokenizer …) are put beside the weights."""
    kept: int = 2
    before: tuple[Call, ...] = ()
    update: Call = Call("/update_weights", {"folder": "{folder}", "version": "{version}"})
    named: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    check: Call | None = None
    check_field: str = "weight_version"
    timeout_s: float = 120.0
    retries: int = 1

    def __post_init__(self) -> None:
        check_choice("weight update: mode", self.mode, UpdateMode)
        check_real("weight update: timeout_s", self.timeout_s, 0, above=True)
        check_integer("weight update: retries", self.retries, 0)
        check_integer("weight update: kept", self.kept, 1)
        if self.mode == "http" and not self.folder:
            raise ValueError("weight update: folder must be one that the server reads too, got ''")


def vllm_update(folder: str, **options: Any) -> WeightUpdate:
    """For vLLM in development mode (``VLLM_SERVER_DEV_MODE=1``): pause, reload from the folder, drop the prefix cache.

    With ``kv = "keep"`` running requests stay, with the keys and values that the old weights made, and the prefix cache
    with them.
    """
    return WeightUpdate(
        "http",
        folder,
        before=(Call("/pause?mode=abort", kv="recompute"), Call("/pause?mode=keep", kv="keep")),
        update=Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}}),
        named=(Call("/update_weight_version", {"new_version": "{version}"}, optional=True),),
        after=(Call("/reset_prefix_cache", kv="recompute"), Call("/resume")),
        **options,
    )


def sglang_update(folder: str, **options: Any) -> WeightUpdate:
    """For SGLang: pause, update from disk with the version's name, go on; asked for its version afterwards."""
    body = {"model_path": "{folder}", "weight_version": "{version}", "flush_cache": "{recompute}"}
    pauses = (("recompute", "abort"), ("keep", "in_place"))
    return WeightUpdate(
        "http",
        folder,
        before=tuple(Call("/pause_generation", {"mode": mode}, kv=kv) for kv, mode in pauses),  # type: ignore[arg-type]
        update=Call("/update_weights_from_disk", body),
        after=(Call("/continue_generation"),),
        **({"check": Call("/model_info", method="GET")} | options),
    )


_UPDATES: dict[str, Callable[..., WeightUpdate]] = {
    "none": WeightUpdate,
    "vllm": vllm_update,
    "sglang": sglang_update,
    "http": lambda **options: WeightUpdate("http", **options),
}


def update_of(table: Mapping[str, Any]) -> WeightUpdate:
    """``[engine.update]``: ``kind`` is "none", "vllm", "sglang" or "http", the rest its keys. Raises ValueError."""
    options = dict(table)
    kind = options.pop("kind", "none")
    if kind not in _UPDATES:
        raise ValueError(f"engine.update: kind must be {' or '.join(map(repr, _UPDATES))}, got {kind!r}")
    for name in ("before", "named", "after"):
        if name in options:
            options[name] = tuple(_made(Call, each, f"engine.update.{name}") for each in options[name])
    for name in ("update", "check"):
        if name in options:
            options[name] = _made(Call, options[name], f"engine.update.{name}")
    return _made(_UPDATES[kind], options, "engine.update")


def server_of(table: Mapping[str, Any]) -> OpenAIServer:
    """``[engine]`` without its kind. Raises ValueError for what it does not know."""
    options = dict(table)
    if "update" in options:
        options["update"] = update_of(options["update"])
    return _made(OpenAIServer, options, "engine")


def _made(kind: Callable[..., T], options: Mapping[str, Any], where: str) -> T:
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('() ')[2] or error}") from None


@dataclass(frozen=True)
class OpenAIServer:
    """A server that speaks OpenAI's ``/v1/completions``."""

    url: str
    """Without ``/v1``."""
    model: str
    dialect: Dialect = "vllm"
    stream: bool = True
    """Tokens as they come, so that those of an interrupted answer are kept."""
    missing_log_probs: MissingLogProbs = "refuse"
    interrupted: Interrupted | None = None
    """None: "continue" where the server streams, else "finish"."""
    key_variable: str | None = None
    """Environment variable with the bearer token; it is never written anywhere."""
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 120.0
    """The longest time without a byte: before the first token, between two, or for all of what is not streamed."""
    request_timeout_s: float = 1800.0
    """The longest time of one request in all."""
    retries: int = 3
    """Further attempts after a connection error, a silence, 429 or 5xx."""
    retry_wait_s: float = 0.5
    """Before the first of them; each next waits twice as long, 30 s at most."""
    update: WeightUpdate = WeightUpdate()

    def __post_init__(self) -> None:
        check_type("server: url", self.url, str, 'a text such as "http://127.0.0.1:8000"')
        check_type("server: model", self.model, str, "the name under which it is served")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f'server: url must be such as "http://127.0.0.1:8000", got {self.url!r}')
        if parts.username or parts.password:
            raise ValueError("server: url must not hold a password; key_variable names an environment variable for it")
        check_choice("server: dialect", self.dialect, Dialect)
        check_choice("server: missing_log_probs", self.missing_log_probs, MissingLogProbs)
        if self.interrupted is not None:
            check_choice("server: interrupted", self.interrupted, Interrupted)
        if self.interrupted == "continue" and not self.stream:
            raise ValueError('server: interrupted = "continue" needs stream = true; "finish" or "restart" would do')
        for name in ("connect_timeout_s", "silence_timeout_s", "request_timeout_s"):
            check_real(f"server: {name}", getattr(self, name), 0, above=True)
        check_integer("server: retries", self.retries, 0)
        check_real("server: retry_wait_s", self.retry_wait_s, 0)

    @property
    def interruption(self) -> Interrupted:
        return self.interrupted or ("continue" if self.stream else "finish")

    @property
    def key(self) -> str | None:
        """The bearer token. Raises ValueError where the variable is not set."""
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable)
        if not key:
            raise ValueError(f"server: the environment variable {self.key_variable} is not set")
        return key
