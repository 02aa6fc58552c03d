"""Speed of a rollout server: the formula, its limits, and three ways to say it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedasync.simulation.cluster.decoding import Decoding, FixedSpeed, ServerCost, SharedSpeed
from fedasync.simulation.cluster.hardware import GPUS, MODELS
from fedasync.studies.errors import StudyError, parse

H800, SMALL = GPUS["h800"], MODELS["1.5b"]


def test_an_iteration_is_the_sum_that_the_formula_says() -> None:
    """1.5B on one H800, by hand: reading 3.554 GB at 2.345 TB/s, or 3.08 GFLOP a sequence at 494.5 TFLOP/s."""
    cost = Decoding().cost(H800, SMALL, 1)
    assert cost.iteration_s(1) == pytest.approx(0.009 + 3.554e9 / 2.345e12 + 12e-6)
    assert cost.iteration_s(100, 1e6) == pytest.approx(0.009 + 3.554e9 / 2.345e12 + 28_672e6 / 2.345e12 + 1.2e-3)
    assert cost.iteration_s(1000) == pytest.approx(0.009 + 3.08e12 / 494.5e12 + 12e-3)
    assert cost.prefill_s(1000) == pytest.approx((2 * 1.54e9 * 1e3 + 2 * 28 * 1536 * 1e6) / (0.4 * 989e12))


@given(
    model=st.sampled_from(sorted(MODELS)),
    gpu=st.sampled_from(sorted(GPUS)),
    tp=st.sampled_from([1, 2, 4, 8]),
    context=st.floats(0, 30_000),
)
def test_a_server_speeds_up_with_its_batch_and_saturates(model: str, gpu: str, tp: int, context: float) -> None:
    decoding = Decoding(max_running=400, memory_share=1.0)
    assume(MODELS[model].weight_bytes < tp * GPUS[gpu].memory_bytes)
    cost = decoding.cost(GPUS[gpu], MODELS[model], tp)
    speeds = [cost.tokens_per_second(b, context * b) for b in range(1, 401)]
    assert all(before < after for before, after in pairwise(speeds))
    limit = 1 / (decoding.per_sequence_s + context * cost.context_s)
    assert speeds[-1] < limit
    gains = [speeds[b + 100] - speeds[b] for b in (0, 100, 200, 299)]
    assert all(before > after for before, after in pairwise(gains))


@given(tokens=st.integers(1, 30_000), cached=st.floats(0, 1))
def test_prefilling_in_two_parts_takes_as_long_as_in_one(tokens: int, cached: float) -> None:
    cost = Decoding().cost(H800, SMALL, 1)
    part = cached * tokens
    assert cost.prefill_s(part) + cost.prefill_s(tokens, part) == pytest.approx(cost.prefill_s(tokens))


def test_more_gpus_a_server_than_kv_heads_store_the_cache_several_times() -> None:
    two, four = (Decoding().cost(H800, SMALL, tp) for tp in (2, 4))
    assert SMALL.kv_heads == 2
    assert four.context_s == pytest.approx(two.context_s)
    assert four.capacity_tokens * 57_344 == pytest.approx(4 * 64e9 - SMALL.weight_bytes)


def test_weights_that_do_not_fit_are_refused_with_how_many_gpus_would_do() -> None:
    told = (
        r"the weights of R1-Distill-Qwen-32B \(65.6 GB\) do not fit into 0.8 × 80 GB × 1 GPU of H800; "
        "tensor_parallel ≥ 2 would do"
    )
    with pytest.raises(ValueError, match=told):
        Decoding().cost(H800, MODELS["32b"], 1)
    assert Decoding().cost(H800, MODELS["32b"], 2).capacity_tokens > 0


def test_a_fixed_speed_is_the_same_for_any_batch_and_context() -> None:
    cost = FixedSpeed(tokens_per_second=50.0, max_running=64).cost(H800, SMALL, 1)
    assert {cost.tokens_per_second(b, 1e6) / b for b in range(1, 65)} == {50.0}
    assert (cost.capacity_tokens, cost.prefill_s(5000)) == (inf, 0.0)


def test_a_shared_speed_is_min_of_alone_and_share() -> None:
    cost = SharedSpeed(80.0, 4000.0, max_running=200, prefill_tokens_per_second=1e4).cost(H800, SMALL, 1)
    for b in (1, 49, 50, 51, 200):
        assert cost.tokens_per_second(b) / b == pytest.approx(min(80.0, 4000.0 / b))
    assert cost.prefill_s(3000, 1000) == pytest.approx(0.2)


@dataclass(frozen=True)
class Holder:
    decoding: Decoding | FixedSpeed | SharedSpeed = Decoding()


def test_toml_names_the_kind_and_takes_integers_for_numbers() -> None:
    where = "study.toml: cluster"
    fixed = parse(Holder, {"decoding": {"kind": "fixed_speed", "tokens_per_second": 40}}, where)
    assert fixed.decoding == FixedSpeed(40.0)
    shared = {"kind": "shared_speed", "tokens_per_second": 80, "server_tokens_per_second": 4000}
    assert parse(Holder, {"decoding": shared}, where).decoding == SharedSpeed(80.0, 4000.0)
    assert parse(Holder, {"decoding": {"kind": "hardware", "overhead_s": 0}}, where).decoding.overhead_s == 0
    with pytest.raises(StudyError, match=r"decoding.kind: this key is missing; 'hardware', 'fixed_speed'"):
        parse(Holder, {"decoding": {"overhead_s": 0.01}}, where)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Decoding(bandwidth_efficiency=0.0), "decoding: bandwidth_efficiency must be a finite number > 0"),
        (lambda: Decoding(max_running=0), "decoding: max_running must be an integer ≥ 1, got 0"),
        (lambda: Decoding(max_running=10**6), "decoding: max_running must be ≤ 65,536, got 1000000"),
        (lambda: FixedSpeed(0.0), "fixed_speed: tokens_per_second must be a finite number > 0, got 0.0"),
        (lambda: SharedSpeed(1.0, inf), "shared_speed: server_tokens_per_second must be a finite number > 0, got inf"),
        (lambda: FixedSpeed(1.0, capacity_tokens=0.0), "fixed_speed: capacity_tokens must be"),
        (lambda: ServerCost((1.0, 1.0), 0, 0, 0, inf, 2), "base_s has 2 entries for 0 … 2 .*; 3 would do"),
        (lambda: ServerCost((1.0, 0.0), 0, 0, 0, inf, 1), "base_s must be > 0 and finite"),
        (lambda: ServerCost((1.0, 1.0), 0, 0, 0, 0, 1), "capacity_tokens must be > 0, got 0"),
    ],
)
def test_what_cannot_be_is_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # type: ignore[operator]
