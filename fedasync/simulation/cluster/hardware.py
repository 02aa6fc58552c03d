"""GPUs and language models as the few numbers that time depends on, and presets of both."""

from __future__ import annotations

from dataclasses import dataclass

from fedasync.core.bounds import check_integer, check_real

_RECALLED = "datasheet, as recalled; price assumed"


@dataclass(frozen=True)
class Gpu:
    """One GPU: its memory, and what it does in a second at best.

    ``flops_per_second`` are those of dense bf16 arithmetic, ``network_bytes_per_second`` one way over its share of the
    links between nodes, ``usd_per_hour`` a rent.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_second: float
    flops_per_second: float
    network_bytes_per_second: float
    usd_per_hour: float
    source: str = "given"

    def __post_init__(self) -> None:
        for key in ("memory_bytes", "memory_bytes_per_second", "flops_per_second", "network_bytes_per_second"):
            check_real(f"gpu {self.name!r}: {key}", getattr(self, key), 0, above=True)
        check_real(f"gpu {self.name!r}: usd_per_hour", self.usd_per_hour, 0)


GPUS: dict[str, Gpu] = {
    "h800": Gpu(
        "H800",
        memory_bytes=80e9,
        memory_bytes_per_second=3.35e12,
        flops_per_second=989e12,
        network_bytes_per_second=50e9,
        usd_per_hour=2.5,
        source="datasheet, as recalled; network as in AReaL's paper (3.2 Tbit/s for a node of 8); price assumed",
    ),
    "h100": Gpu("H100", 80e9, 3.35e12, 989e12, 50e9, 2.5, _RECALLED),
    "h200": Gpu("H200", 141e9, 4.8e12, 989e12, 50e9, 3.5, _RECALLED),
    "a100": Gpu("A100", 80e9, 2.04e12, 312e12, 25e9, 1.5, _RECALLED),
    "h20": Gpu("H20", 96e9, 4.0e12, 148e12, 50e9, 1.2, _RECALLED),
}
"""Name of a preset → GPU: SXM modules of 80 GB where there are several."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder: how much it weighs, and what a token costs it.

    ``active_parameters`` are those that a token is multiplied with (None: all); a mixture of experts has fewer, and so
    has a model whose input embedding is a table of its own. ``routed_share`` is the share of the experts that a token
    goes through (8 of 128: 0.0625); with it, decoding few sequences reads less than the whole. ``attention_size`` is
    query heads × ``head_size`` (None: ``hidden``).
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_size: int
    bytes_per_parameter: float = 2.0
    active_parameters: float | None = None
    kv_bytes_per_value: float = 2.0
    routed_share: float | None = None
    attention_size: int | None = None
    source: str = "given"

    def __post_init__(self) -> None:
        what = f"model {self.name!r}"
        for key in ("layers", "hidden", "kv_heads", "head_size"):
            check_integer(f"{what}: {key}", getattr(self, key), 1)
        for key in ("parameters", "bytes_per_parameter", "kv_bytes_per_value"):
            check_real(f"{what}: {key}", getattr(self, key), 0, above=True)
        if self.active_parameters is not None:
            check_real(f"{what}: active_parameters", self.active_parameters, 0, self.parameters, above=True)
        if self.attention_size is not None:
            check_integer(f"{what}: attention_size", self.attention_size, 1)
        if self.routed_share is not None:
            check_real(f"{what}: routed_share", self.routed_share, 0, 1, above=True, below=True)
            if self.active < self.routed_share * self.parameters:
                raise ValueError(
                    f"{what}: routed_share = {self.routed_share:g} of {self.parameters:g} parameters are more than the "
                    f"{self.active:g} active ones; active_parameters ≥ {self.routed_share * self.parameters:g} would do"
                )

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that a resident token takes in the KV cache of all layers: a key and a value each."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.kv_bytes_per_value

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.parameters if self.active_parameters is None else self.active_parameters

    @property
    def flops_per_token(self) -> float:
        """Of a forward pass, attention apart: a multiplication and an addition for each active parameter."""
        return 2 * self.active

    @property
    def flops_per_square(self) -> float:
        """Of causal attention over a sequence of s tokens, forward, divided by s²: half of 4 × layers × size."""
        return 2.0 * self.layers * (self.hidden if self.attention_size is None else self.attention_size)

    def read_bytes(self, sequences: int) -> float:
        """Bytes of weights that one decode iteration reads: those that any of so many sequences needs.

        Of a mixture of experts each sequence takes ``routed_share`` of the experts, any as likely as the others.
        """
        if self.routed_share is None:
            return self.weight_bytes
        shared = (self.active - self.routed_share * self.parameters) / (1 - self.routed_share)
        touched = 1 - (1 - self.routed_share) ** max(1, sequences)
        return (shared + (self.parameters - shared) * touched) * self.bytes_per_parameter


_CARD = "model card, as recalled"

MODELS: dict[str, LanguageModel] = {
    "135m": LanguageModel("SmolLM2-135M", 134.5e6, 30, 576, kv_heads=3, head_size=64, source=_CARD),
    "0.6b": LanguageModel(
        "Qwen3-0.6B", 0.596e9, 28, 1024, kv_heads=8, head_size=128, attention_size=2048, source=_CARD
    ),
    "1.5b": LanguageModel(
        "R1-Distill-Qwen-1.5B",
        1.777e9,
        28,
        1536,
        kv_heads=2,
        head_size=128,
        active_parameters=1.54e9,
        source="model card, as recalled; its head and its input embedding are two tables, and no token is multiplied "
        "with the latter",
    ),
    "7b": LanguageModel("R1-Distill-Qwen-7B", 7.62e9, 28, 3584, kv_heads=4, head_size=128, source=_CARD),
    "14b": LanguageModel("R1-Distill-Qwen-14B", 14.8e9, 48, 5120, kv_heads=8, head_size=128, source=_CARD),
    "32b": LanguageModel("R1-Distill-Qwen-32B", 32.8e9, 64, 5120, kv_heads=8, head_size=128, source=_CARD),
    "30b-a3b": LanguageModel(
        "Qwen3-30B-A3B",
        30.5e9,
        48,
        2048,
        kv_heads=4,
        head_size=128,
        active_parameters=3.3e9,
        routed_share=8 / 128,
        attention_size=4096,
        source="model card, as recalled; active parameters and experts assumed from its name and card",
    ),
}
"""Name of a preset → model, in bf16."""
