"""Time of a trainer's step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.simulation.cluster.hardware import GPUS, MODELS
from fedasync.simulation.cluster.training import Trainer
from fedasync.studies.errors import StudyError, parse

H800, SMALL = GPUS["h800"], MODELS["1.5b"]
GPUS_32 = 32


def test_a_step_by_mfu_is_eight_flops_a_parameter_and_the_attention_of_four_passes() -> None:
    """Forward 2·N, backward 4·N, log-probabilities 2·N; attention 2·L·h·s² with each 2·N·s. Two sequences by hand."""
    cost = Trainer(mfu=0.2).cost(H800, SMALL, GPUS_32)
    flops = 8 * 1.54e9 * 3000 + 8 * 28 * 1536 * (1000**2 + 2000**2)
    assert cost.seconds(3000, 5e6, 2) == pytest.approx(flops / (32 * 989e12 * 0.2))
    lean = Trainer(mfu=0.2, recompute_logprobs=False).cost(H800, SMALL, GPUS_32)
    full = Trainer(mfu=0.2, activation_recompute=True).cost(H800, SMALL, GPUS_32)
    assert lean.seconds(3000, 5e6, 2) == pytest.approx(0.75 * cost.seconds(3000, 5e6, 2))
    assert full.seconds(3000, 5e6, 2) == pytest.approx(1.25 * cost.seconds(3000, 5e6, 2))


def test_twelve_and_a_half_thousand_tokens_a_second_are_21_percent_of_an_h800() -> None:
    """The rate that fits AReaL's 1.5B runs, at E[s²]/E[s] = 14.2k: some 150 TFLOP/s without attention, 215 with it."""
    flops = 12_500 * (4 * SMALL.flops_per_token)
    assert flops == pytest.approx(154e12, rel=0.001)
    flops += 12_500 * 14_200 * (4 * SMALL.flops_per_square)
    assert flops == pytest.approx(215e12, rel=0.002)
    by_mfu = Trainer(mfu=flops / H800.flops_per_second).cost(H800, SMALL, 1)
    by_rate = Trainer(tokens_per_second_per_gpu=12_500).cost(H800, SMALL, 1)
    assert by_mfu.seconds(1e6, 14_200e6, 100) == pytest.approx(by_rate.seconds(1e6, 14_200e6, 100))


@given(tokens=st.floats(0, 1e9), gpus=st.integers(1, 1000))
def test_the_other_ways(tokens: float, gpus: int) -> None:
    def seconds(trainer: Trainer) -> float:
        return trainer.cost(H800, SMALL, gpus).seconds(tokens, tokens * 1e4, 7)

    assert seconds(Trainer(step_s=3.0)) == 3.0
    assert seconds(Trainer(tokens_per_second_per_gpu=100.0)) == pytest.approx(tokens / (100 * gpus))
    line = Trainer(seconds_per_token=1e-6, seconds_per_sequence=0.5)
    assert seconds(line) == pytest.approx(tokens * 1e-6 + 3.5)


def test_fixed_time_and_that_of_minibatches_come_on_top_of_each_way() -> None:
    ways = [{"mfu": 0.3}, {"tokens_per_second_per_gpu": 1.0}, {"step_s": 2.0}, {"seconds_per_token": 1.0}]
    for way in ways:
        plain = Trainer(**way).cost(H800, SMALL, 4).seconds(1e6, 1e10, 100)
        more = Trainer(**way, fixed_s=5.0, minibatches=4, minibatch_s=0.25).cost(H800, SMALL, 4)
        assert more.seconds(1e6, 1e10, 100) == pytest.approx(plain + 6.0)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, "exactly one of mfu, tokens_per_second_per_gpu, step_s, seconds_per_token says .*, got none"),
        ({"mfu": 0.4, "step_s": 1.0}, "got mfu and step_s"),
        ({"mfu": 1.5}, "trainer: mfu must be a finite number > 0 and ≤ 1, got 1.5"),
        ({"tokens_per_second_per_gpu": 0.0}, "tokens_per_second_per_gpu must be a finite number > 0"),
        ({"step_s": -1.0}, "trainer: step_s must be a finite number ≥ 0, got -1.0"),
        ({"step_s": 1.0, "minibatches": 0}, "trainer: minibatches must be an integer ≥ 1, got 0"),
        ({"step_s": 1.0, "seconds_per_sequence": 1.0}, "seconds_per_sequence goes with seconds_per_token, got step_s"),
        ({"step_s": 1.0, "recompute_logprobs": False}, "recompute_logprobs counts the passes .*; step_s holds them"),
        ({"step_s": 1.0, "activation_recompute": True}, "activation_recompute counts the passes"),
    ],
)
def test_a_trainer_that_says_too_little_or_too_much_is_refused(keys: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Trainer(**keys)  # type: ignore[arg-type]
    with pytest.raises(StudyError, match=f"^study.toml: cluster.trainer: .*{told}"):
        parse(Trainer, keys, "study.toml: cluster.trainer")


def test_toml_takes_an_integer_for_seconds() -> None:
    assert parse(Trainer, {"step_s": 1}, "study.toml: cluster.trainer") == Trainer(step_s=1.0)
