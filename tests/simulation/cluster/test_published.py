"""Published throughputs, an eighth of their size: the same GPUs a sequence, an eighth of GPUs and prompts.

The whole studies are sims/areal_paper.toml, areal_7b.toml and rl_no_gain.toml; values that they fit are entered here.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from fedasync.core import Strategy
from fedasync.simulation.cluster import Cluster, Decoding, Prompts, Trainer, TwoLevel, Weights, simulate_cluster
from fedasync.simulation.laws import Constant
from fedasync.strategies import areal, one_step_overlap, synchronous_rl

SIZE = 8
BATCH = 512 // SIZE
NOISE = 0.03
"""Of a run this short."""


def by_bound(eta: int) -> Strategy:
    return areal(batch=BATCH, eta=eta, limit=2048 // SIZE) if eta else synchronous_rl(batch=BATCH)


def answers(median: float) -> Prompts:
    lengths = TwoLevel(median, prompt_sigma=0.7, answer_sigma=0.4)
    return Prompts(answers=16, prompt_tokens=Constant(150.0), answer_tokens=lengths, most_tokens=27_648)


@cache
def small_rate(eta: int) -> float:
    """Tokens a second of the 1.5B on 128 H800, in thousands."""
    cluster = Cluster(
        generation_gpus=96 // SIZE,
        training_gpus=32 // SIZE,
        decoding=Decoding(overhead_s=0.00875),
        trainer=Trainer(tokens_per_second_per_gpu=12_265, fixed_s=5.0),
        weights=Weights(pause_s=5.0),
    )
    run = simulate_cluster(by_bound(eta), cluster, answers(7005.0), versions=24, warm_up_versions=6, seed=3)
    return float(run.summary["rollouts"]["throughput"]["tokens_per_second"]) * SIZE / 1000


@pytest.mark.parametrize(
    ("eta", "published"), [(0, 128.7), (1, 269.3), (2, 356.6), (4, 356.6), (8, 371.7), (16, 382.4)]
)
def test_throughput_of_areals_figure_5c_is_within_a_tenth(eta: int, published: float) -> None:
    assert small_rate(eta) == pytest.approx(published, rel=0.10 + NOISE)


def test_throughput_grows_with_the_bound_until_training_is_what_limits_it() -> None:
    rates = [small_rate(eta) for eta in (0, 1, 2, 4, 8, 16)]
    assert all(after >= before * (1 - NOISE) for before, after in pairwise(rates))
    assert rates[1] > 1.5 * rates[0]
    assert rates[2] > 1.2 * rates[1]
    assert rates[-1] < 1.05 * rates[2]


def test_the_speed_up_of_areals_7b_row_is_within_15_percent() -> None:
    cluster = Cluster(
        generation_gpus=144 // SIZE,
        training_gpus=48 // SIZE,
        model="7b",
        decoding=Decoding(overhead_s=0.00875, memory_share=0.7),
        trainer=Trainer(mfu=0.214, fixed_s=5.0),
        weights=Weights(pause_s=5.0),
    )
    steps = {}
    for eta in (0, 4):
        run = simulate_cluster(by_bound(eta), cluster, answers(MEDIAN_7B), versions=20, warm_up_versions=6, seed=3)
        steps[eta] = run.summary["rollouts"]["throughput"]["step_s"]["mean"]
    assert steps[0] == pytest.approx(830.9, rel=0.10)
    assert steps[0] / steps[4] == pytest.approx(2.27, rel=0.15 + NOISE)


MEDIAN_7B = 4100.0
"""As sims/areal_7b.toml fits it to the synchronous hours."""


def seconds(strategy: Strategy, train_s: float, *, gpus: int, together: bool, short: bool) -> float:
    """Of a step: long answers with a heavy tail, or many short ones that are nearly alike."""
    lengths = TwoLevel(800.0, 0.2, 0.2) if short else TwoLevel(2000.0, 0.7, 0.4)
    cluster = Cluster(
        generation_gpus=gpus,
        training_gpus=gpus,
        gpu="h100",
        model="7b",
        colocated=together,
        trainer=Trainer(step_s=train_s),
        weights=Weights(transfer=False, pause_s=1.0),
    )
    prompts = Prompts(answers=32 if short else 8, answer_tokens=lengths, most_tokens=4096 if short else 16_384)
    run = simulate_cluster(strategy, cluster, prompts, versions=10, warm_up_versions=1)
    return float(run.summary["rollouts"]["throughput"]["step_s"]["mean"])


@pytest.mark.parametrize("short", [False, True])
def test_one_step_of_overlap_gains_nothing_where_generation_takes_nearly_all(short: bool) -> None:
    batch, train_s = (32, 0.3) if short else (16, 5.0)
    in_turns = seconds(synchronous_rl(batch=batch), train_s, gpus=2, together=False, short=short)
    ahead = seconds(one_step_overlap(batch=batch), train_s, gpus=2, together=False, short=short)
    assert 1.0 <= in_turns / ahead < 1.05


def test_one_step_of_overlap_gains_where_training_takes_as_long() -> None:
    in_turns = seconds(synchronous_rl(batch=16), 200.0, gpus=2, together=False, short=False)
    ahead = seconds(one_step_overlap(batch=16), 200.0, gpus=2, together=False, short=False)
    assert in_turns / ahead > 1.5


def test_divided_gpus_lose_to_all_of_them_in_turns_where_generation_is_bound_by_throughput() -> None:
    ahead = seconds(one_step_overlap(batch=32), 1.2, gpus=2, together=False, short=True)
    in_turns = seconds(synchronous_rl(batch=32), 0.6, gpus=4, together=True, short=True)
    assert in_turns / ahead < 0.85
