"""What a rollout server computes with: seconds of a decode iteration, of a prefill, and tokens that fit into memory.

Four ways to say it: from the hardware, a fixed speed a sequence, a speed that the sequences of a server share, or as it
was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Literal

from fedasync.core.bounds import check_integer, check_real
from fedasync.simulation.cluster.hardware import Gpu, LanguageModel

MOST_RUNNING = 65_536


@dataclass(frozen=True)
class ServerCost:
    """Seconds and tokens of one server (a replica of the model).

    A decode iteration gives each of b running sequences one token and takes ``base_s[b] + context_s × L`` seconds, with
    L tokens resident. Prefilling a sequence of s tokens takes ``prefill_token_s × s + prefill_square_s × s²``; with c
    of them already computed, ``prefill_token_s × (s − c) + prefill_square_s × (s² − c²)``. Whatever is prefilled at one
    instant is one call, which takes ``prefill_call_s`` more.

    ``stepwise``: sequences begin and end between two iterations, as engines have it, and not within one; so what ends
    in one iteration is followed at one instant. ``shared_prompts``: answers to one prompt that begin at one instant
    have it computed once.
    """

    base_s: tuple[float, ...]
    """By b = 0 … ``max_running``."""
    context_s: float
    prefill_token_s: float
    prefill_square_s: float
    capacity_tokens: float
    """Resident tokens that fit (inf: no limit)."""
    max_running: int
    prefill_call_s: float = 0.0
    stepwise: bool = False
    shared_prompts: bool = False

    def __post_init__(self) -> None:
        check_integer("server: max_running", self.max_running, 1)
        if len(self.base_s) != self.max_running + 1:
            raise ValueError(
                f"server: base_s has {len(self.base_s)} entries for 0 … {self.max_running} running sequences; "
                f"{self.max_running + 1} would do"
            )
        if not all(isfinite(seconds) and seconds > 0 for seconds in self.base_s[1:]):
            raise ValueError("server: base_s must be > 0 and finite for every number of running sequences ≥ 1")
        for name in ("context_s", "prefill_token_s", "prefill_square_s", "prefill_call_s"):
            check_real(f"server: {name}", getattr(self, name), 0)
        if not self.capacity_tokens > 0:
            raise ValueError(f"server: capacity_tokens must be > 0, got {self.capacity_tokens}")

    def iteration_s(self, running: int, context_tokens: float = 0.0) -> float:
        """Seconds in which each of ``running`` sequences gets one token."""
        return self.base_s[running] + self.context_s * context_tokens

    def tokens_per_second(self, running: int, context_tokens: float = 0.0) -> float:
        """Of all running sequences together; ``context_tokens`` are those of all, too."""
        return running / self.iteration_s(running, context_tokens)

    def prefill_s(self, tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds until a sequence of ``tokens`` is resident of which ``cached_tokens`` already are."""
        squares = tokens * tokens - cached_tokens * cached_tokens
        return self.prefill_token_s * (tokens - cached_tokens) + self.prefill_square_s * squares


@dataclass(frozen=True)
class Decoding:
    """A server's speed from its hardware and model.

    With W bytes of weights, N active parameters, t GPUs of bandwidth BW and F FLOP/s, an iteration takes

        overhead_s + max(W/(t·BW·bandwidth_efficiency), 2·N·b/(t·F·compute_efficiency))
                   + L·kv/(t·BW·bandwidth_efficiency) + per_sequence_s·b.

    Prefill computes 2·N a token and the attention of a causal forward pass, at ``prefill_efficiency``. The KV cache has
    the memory that the weights leave of ``memory_share``; t beyond the model's KV heads stores them several times.
    Where nothing bounds an answer's length, a sequence that is alone on its server may outgrow the cache (`Cluster`).
    Defaults are ours: with them a simulation of AReaL's 1.5B runs comes near the published throughput.
    """

    overhead_s: float = 0.009
    bandwidth_efficiency: float = 0.7
    compute_efficiency: float = 0.5
    per_sequence_s: float = 12e-6
    prefill_efficiency: float = 0.4
    memory_share: float = 0.8
    max_running: int = 1024
    kind: Literal["hardware"] = "hardware"

    def __post_init__(self) -> None:
        check_real("decoding: overhead_s", self.overhead_s, 0)
        check_real("decoding: per_sequence_s", self.per_sequence_s, 0)
        for name in ("bandwidth_efficiency", "compute_efficiency", "prefill_efficiency", "memory_share"):
            check_real(f"decoding: {name}", getattr(self, name), 0, 1, above=True)
        _check_running(self.max_running)

    def cost(self, gpu: Gpu, model: LanguageModel, tensor_parallel: int) -> ServerCost:
        """Raises ValueError where the weights leave no room."""
        check_integer("tensor_parallel", tensor_parallel, 1)
        bandwidth = tensor_parallel * gpu.memory_bytes_per_second * self.bandwidth_efficiency
        flops = tensor_parallel * gpu.flops_per_second
        decode_flops, prefill_flops = flops * self.compute_efficiency, flops * self.prefill_efficiency
        kv_bytes = model.kv_bytes_per_token * max(1.0, tensor_parallel / model.kv_heads)
        base_s = tuple(
            self.overhead_s
            + max(model.read_bytes(b) / bandwidth, model.flops_per_token * b / decode_flops)
            + self.per_sequence_s * b
            for b in range(self.max_running + 1)
        )
        return ServerCost(
            base_s=base_s,
            context_s=kv_bytes / bandwidth,
            prefill_token_s=model.flops_per_token / prefill_flops,
            prefill_square_s=model.flops_per_square / prefill_flops,
            capacity_tokens=self._left_bytes(gpu, model, tensor_parallel) / kv_bytes,
            max_running=self.max_running,
        )

    def _left_bytes(self, gpu: Gpu, model: LanguageModel, tensor_parallel: int) -> float:
        """Memory of a server that the weights leave to the KV cache."""
        usable = gpu.memory_bytes * self.memory_share
        left = usable * tensor_parallel - model.weight_bytes
        if left > 0:
            return left
        enough = ceil(model.weight_bytes / usable)
        enough += enough * usable <= model.weight_bytes
        raise ValueError(
            f"decoding: the weights of {model.name} ({model.weight_bytes / 1e9:.3g} GB) do not fit into "
            f"{self.memory_share:g} × {gpu.memory_bytes / 1e9:.3g} GB × {tensor_parallel} GPU"
            f"{'s' if tensor_parallel > 1 else ''} of {gpu.name}; tensor_parallel ≥ {enough} would do"
        )


@dataclass(frozen=True)
class FixedSpeed:
    """Every running sequence gets ``tokens_per_second``, whatever else runs: an ideal server.

    Prefill takes no time unless ``prefill_tokens_per_second`` says so; ``capacity_tokens`` None: no limit.
    """

    tokens_per_second: float
    max_running: int = 1024
    capacity_tokens: float | None = None
    prefill_tokens_per_second: float | None = None
    kind: Literal["fixed_speed"] = "fixed_speed"

    def __post_init__(self) -> None:
        check_real("fixed_speed: tokens_per_second", self.tokens_per_second, 0, above=True)
        _check_ideal("fixed_speed", self.max_running, self.capacity_tokens, self.prefill_tokens_per_second)

    def cost(self, gpu: Gpu, model: LanguageModel, tensor_parallel: int) -> ServerCost:
        """The same for every GPU and model."""
        base_s = (1 / self.tokens_per_second,) * (self.max_running + 1)
        return _ideal(base_s, self.capacity_tokens, self.prefill_tokens_per_second)


@dataclass(frozen=True)
class SharedSpeed:
    """A sequence alone gets ``tokens_per_second``; many share ``server_tokens_per_second``: min(r₁, R/b) each.

    Prefill takes no time unless ``prefill_tokens_per_second`` says so; ``capacity_tokens`` None: no limit.
    """

    tokens_per_second: float
    server_tokens_per_second: float
    max_running: int = 1024
    capacity_tokens: float | None = None
    prefill_tokens_per_second: float | None = None
    kind: Literal["shared_speed"] = "shared_speed"

    def __post_init__(self) -> None:
        check_real("shared_speed: tokens_per_second", self.tokens_per_second, 0, above=True)
        check_real("shared_speed: server_tokens_per_second", self.server_tokens_per_second, 0, above=True)
        _check_ideal("shared_speed", self.max_running, self.capacity_tokens, self.prefill_tokens_per_second)

    def cost(self, gpu: Gpu, model: LanguageModel, tensor_parallel: int) -> ServerCost:
        """The same for every GPU and model."""
        alone_s, share_s = 1 / self.tokens_per_second, 1 / self.server_tokens_per_second
        base_s = tuple(max(alone_s, b * share_s) for b in range(self.max_running + 1))
        return _ideal(base_s, self.capacity_tokens, self.prefill_tokens_per_second)


@dataclass(frozen=True)
class MeasuredSpeed:
    """A server as it was timed, whatever its hardware.

    A decode iteration of b sequences with L resident tokens takes ``overhead_s + per_sequence_s·b + context_s·L``;
    with ``running`` and ``running_s`` (rising, of one length) the first two terms are ``running_s`` at b = ``running``,
    a straight line between, and beyond the last on with the slope from the first to the last (ours). A call of prefill
    takes ``prefill_call_s`` and ``prefill_token_s`` a token; what starts at one instant is one call, and sequences
    begin and end between two iterations. ``shared_prompts``: answers to one prompt that begin together have it computed
    once. ``capacity_tokens`` None: no limit.
    """

    overhead_s: float = 0.0
    per_sequence_s: float = 0.0
    context_s: float = 0.0
    running: tuple[int, ...] = ()
    running_s: tuple[float, ...] = ()
    prefill_call_s: float = 0.0
    prefill_token_s: float = 0.0
    max_running: int = 64
    capacity_tokens: float | None = None
    shared_prompts: bool = False
    kind: Literal["measured"] = "measured"

    def __post_init__(self) -> None:
        for name in ("overhead_s", "per_sequence_s", "context_s", "prefill_call_s", "prefill_token_s"):
            check_real(f"measured: {name}", getattr(self, name), 0)
        _check_ideal("measured", self.max_running, self.capacity_tokens, None)
        if len(self.running) != len(self.running_s):
            raise ValueError(
                f"measured: {len(self.running)} entries in running and {len(self.running_s)} in running_s; as many of "
                "each would do"
            )
        if self.running and (self.overhead_s or self.per_sequence_s):
            raise ValueError("measured: give overhead_s and per_sequence_s, or running and running_s, got both")
        if not self.running and not self.overhead_s + self.per_sequence_s > 0:
            raise ValueError("measured: overhead_s + per_sequence_s must be > 0: an iteration takes time")
        for i, (running, seconds) in enumerate(zip(self.running, self.running_s, strict=True)):
            check_integer(f"measured: running[{i}]", running, self.running[i - 1] + 1 if i else 1)
            check_real(f"measured: running_s[{i}]", seconds, self.running_s[i - 1] if i else 0, above=not i)

    def cost(self, gpu: Gpu, model: LanguageModel, tensor_parallel: int) -> ServerCost:
        """The same for every GPU and model."""
        return ServerCost(
            base_s=tuple(self._base_s(b) for b in range(self.max_running + 1)),
            context_s=self.context_s,
            prefill_token_s=self.prefill_token_s,
            prefill_square_s=0.0,
            capacity_tokens=inf if self.capacity_tokens is None else self.capacity_tokens,
            max_running=self.max_running,
            prefill_call_s=self.prefill_call_s,
            stepwise=True,
            shared_prompts=self.shared_prompts,
        )

    def _base_s(self, b: int) -> float:
        if not self.running:
            return self.overhead_s + self.per_sequence_s * b
        place = bisect_left(self.running, b)
        if place == 0:
            return self.running_s[0]
        (low, low_s), last = (self.running[place - 1], self.running_s[place - 1]), place == len(self.running)
        if last:
            return low_s if len(self.running) == 1 else low_s + (b - low) * self._last_slope
        share = (b - low) / (self.running[place] - low)
        return low_s + share * (self.running_s[place] - low_s)

    @property
    def _last_slope(self) -> float:
        """Seconds a sequence between the first and the last that was timed."""
        return (self.running_s[-1] - self.running_s[0]) / (self.running[-1] - self.running[0])


def _ideal(base_s: tuple[float, ...], capacity_tokens: float | None, prefill: float | None) -> ServerCost:
    return ServerCost(
        base_s=base_s,
        context_s=0.0,
        prefill_token_s=0.0 if prefill is None else 1 / prefill,
        prefill_square_s=0.0,
        capacity_tokens=inf if capacity_tokens is None else capacity_tokens,
        max_running=len(base_s) - 1,
    )


def _check_running(max_running: int) -> None:
    check_integer("decoding: max_running", max_running, 1)
    if max_running > MOST_RUNNING:
        raise ValueError(f"decoding: max_running must be ≤ {MOST_RUNNING:,}, got {max_running}")


def _check_ideal(kind: str, max_running: int, capacity_tokens: float | None, prefill: float | None) -> None:
    _check_running(max_running)
    if capacity_tokens is not None:
        check_real(f"{kind}: capacity_tokens", capacity_tokens, 0, above=True)
    if prefill is not None:
        check_real(f"{kind}: prefill_tokens_per_second", prefill, 0, above=True)
