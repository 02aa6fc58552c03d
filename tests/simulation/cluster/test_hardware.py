"""Constants of GPUs and models: the sizes that follow from them, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fedasync.simulation.cluster.decoding import Decoding
from fedasync.simulation.cluster.hardware import GPUS, MODELS, Gpu, LanguageModel
from fedasync.studies.errors import StudyError, parse


def test_every_preset_says_where_its_numbers_come_from() -> None:
    for preset in (*GPUS.values(), *MODELS.values()):
        assert "recalled" in preset.source
        assert "assumed" in preset.source or isinstance(preset, LanguageModel)


# Model, bytes of KV cache a token, bytes of weights; GPUs a server, share of memory, million tokens that fit, and
# milliseconds to read the weights once at 0.7 of the bandwidth of an H800.
TABLE = [
    ("1.5b", 28_672, 3.55e9, 1, 0.8, 2.11, 1.5),
    ("7b", 57_344, 15.2e9, 1, 0.7, 0.71, 6.5),
    ("14b", 196_608, 29.6e9, 4, 0.7, 0.99, 3.2),
    ("32b", 262_144, 65.5e9, 8, 0.7, 1.46, 3.5),
]


@pytest.mark.parametrize(("name", "kv", "weights", "tp", "share", "million", "read_ms"), TABLE)
def test_sizes_of_the_papers_models_on_an_h800(
    name: str, kv: int, weights: float, tp: int, share: float, million: float, read_ms: float
) -> None:
    gpu, model = GPUS["h800"], MODELS[name]
    assert model.kv_bytes_per_token == kv
    assert model.weight_bytes == pytest.approx(weights, rel=0.003)
    cost = Decoding(memory_share=share, overhead_s=0.0, per_sequence_s=0.0).cost(gpu, model, tp)
    assert cost.capacity_tokens / 1e6 == pytest.approx(million, abs=0.005)
    assert cost.base_s[1] * 1e3 == pytest.approx(read_ms, abs=0.05)


def test_a_dense_model_is_read_whole_and_a_mixture_by_what_its_sequences_touch() -> None:
    dense, mixture = MODELS["7b"], MODELS["30b-a3b"]
    assert dense.read_bytes(1) == dense.read_bytes(500) == dense.weight_bytes
    assert mixture.read_bytes(1) == pytest.approx(mixture.active * mixture.bytes_per_parameter)
    reads = [mixture.read_bytes(b) for b in range(1, 200)]
    assert all(before < after < mixture.weight_bytes for before, after in pairwise(reads))
    assert reads[-1] == pytest.approx(mixture.weight_bytes, rel=1e-4)


def test_flops_of_a_forward_pass() -> None:
    model = LanguageModel("tiny", parameters=1000, layers=3, hidden=8, kv_heads=2, head_size=4, active_parameters=700)
    assert (model.flops_per_token, model.flops_per_square) == (1400, 48)
    assert model.kv_bytes_per_token == 2 * 3 * 2 * 4 * 2


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"parameters": 0}, "model 'm': parameters must be a finite number > 0, got 0"),
        ({"layers": 0}, "model 'm': layers must be an integer ≥ 1, got 0"),
        ({"active_parameters": 2e9}, "model 'm': active_parameters must be a finite number > 0 and ≤ 1e.09, got"),
        ({"routed_share": 1.0}, "model 'm': routed_share must be a finite number > 0 and < 1, got 1.0"),
        ({"routed_share": 0.5, "active_parameters": 4e8}, "active_parameters ≥ 5e.08 would do"),
    ],
)
def test_a_model_that_cannot_be_is_refused(keys: dict[str, object], told: str) -> None:
    table = {"name": "m", "parameters": 1e9, "layers": 2, "hidden": 64, "kv_heads": 2, "head_size": 16, **keys}
    with pytest.raises(ValueError, match=told):
        LanguageModel(**table)  # type: ignore[arg-type]


def test_a_gpu_and_a_model_of_ones_own_are_read_from_toml() -> None:
    table = {
        "name": "card",
        "memory_bytes": 24_000_000_000,
        "memory_bytes_per_second": 1e12,
        "flops_per_second": 1e14,
        "network_bytes_per_second": 1e9,
        "usd_per_hour": 0,
    }
    assert parse(Gpu, table, "study.toml: cluster.gpu") == Gpu("card", 24e9, 1e12, 1e14, 1e9, 0.0)
    with pytest.raises(StudyError, match=r"cluster.gpu: gpu 'card': memory_bytes must be a finite number > 0, got 0"):
        parse(Gpu, {**table, "memory_bytes": 0}, "study.toml: cluster.gpu")
    tiny = {"name": "m", "parameters": 1e6, "layers": 2, "hidden": 8, "kv_heads": 1, "head_size": 8}
    assert parse(LanguageModel, tiny, "study.toml: cluster.model").weight_bytes == 2e6
    with pytest.raises(StudyError, match=r"cluster.model.layers: got 2.5; an integer"):
        parse(LanguageModel, {**tiny, "layers": 2.5}, "study.toml: cluster.model")


def test_the_pages_tables_are_the_presets() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
    for name, gpu in GPUS.items():
        per_second = (gpu.memory_bytes_per_second / 1e12, gpu.flops_per_second / 1e12)
        cells = [gpu.memory_bytes / 1e9, *per_second, gpu.network_bytes_per_second / 1e9, gpu.usd_per_hour]
        assert f"| `{name}` | {' | '.join(f'{cell:g}' for cell in cells)} |" in page
    for name, model in MODELS.items():
        sizes = f"{model.parameters / 1e9:g} | {model.active / 1e9:g} | {model.layers} | {model.hidden}"
        kv = f"{model.kv_heads} | {model.kv_bytes_per_token:,.0f}"
        assert f"| `{name}` | {model.name} | {sizes} | {kv} | {model.weight_bytes / 1e9:.2f} |" in page
