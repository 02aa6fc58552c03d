"""Robust aggregation equals small references, withstands what it says, and no more."""

from __future__ import annotations

from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.aggregation import aggregators, update
from fedasync.aggregation.aggregators import Aggregator, Krum, Mean, Median, SecureMean, TrimmedMean, _comparators
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.server_optimizers import Adam, Sgd
from fedasync.aggregation.server_step import ServerStep, WindowAggregate
from fedasync.aggregation.update import Input, Inputs
from fedasync.core import Polynomial
from fedasync.strategies import fedavg, fedbuff, fedfa

ROBUST: list[Aggregator] = [Median(), TrimmedMean(0.2), TrimmedMean(0.4), Krum(1), Krum(2), Krum(1, keep=3)]
every_rule = pytest.mark.parametrize("rule", ROBUST, ids=str)
float64 = torch.float64


def made(rule: Aggregator, vectors: list[Tensor], scales: list[float] | None = None) -> Tensor:
    out = torch.empty_like(vectors[0])
    rule.aggregate(vectors, [1 / len(vectors)] * len(vectors), scales or [1.0] * len(vectors), out)
    return out


def vectors(count: int, length: int, seed: int, dtype: torch.dtype = float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=random, dtype=dtype) for _ in range(count)]


def krum(rows: np.ndarray, byzantine: int, keep: int) -> list[int]:
    """Blanchard et al. 2017, section 4, word by word: every choice of neighbours is tried."""
    count = len(rows)
    scores = []
    for i in range(count):
        far = [float(((rows[i] - rows[j]) ** 2).sum()) for j in range(count) if j != i]
        scores.append(min(sum(some) for some in combinations(far, max(1, count - byzantine - 2))))
    return sorted(np.argsort(scores, kind="stable")[:keep].tolist())


def expected(rule: Aggregator, rows: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """``rows`` are the vectors ``sent``, scaled."""
    if isinstance(rule, Median):
        return np.median(rows, axis=0)
    if isinstance(rule, TrimmedMean):
        cut = int(np.floor(rule.share * len(rows) + 1e-9))
        return np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0)
    if isinstance(rule, Krum):
        return rows[krum(sent, rule.byzantine, rule.keep)].mean(axis=0)
    return rows.mean(axis=0)


@every_rule
@settings(max_examples=30)
@given(
    count=st.integers(1, 9),
    length=st.integers(1, 11),
    seed=st.integers(0, 2**32),
    tau=st.lists(st.integers(0, 5), min_size=9, max_size=9),
    dtype=st.sampled_from([torch.float32, float64]),
)
def test_a_rule_equals_its_reference_in_pieces_of_any_length(
    rule: Aggregator, count: int, length: int, seed: int, tau: list[int], dtype: torch.dtype
) -> None:
    count = max(count, rule.fewest)
    given_ = vectors(count, length, seed, dtype)
    scales = [Polynomial(0.5)(t) for t in tau[:count]]
    sent = np.stack([v.double().numpy() for v in given_])
    rows = sent * np.array(scales)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "BLOCK", 5)
        patch.setattr(aggregators, "PIECE", 2)
        found = made(rule, given_, scales)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.double().numpy(), expected(rule, rows, sent), atol=1e-5 if dtype != float64 else 1e-12
    )


@every_rule
@settings(max_examples=30)
@given(count=st.integers(7, 10), seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_count(rule: Aggregator, count: int, seed: int, order: Any) -> None:
    given_ = vectors(count, 6, seed)
    shuffled = order.sample(given_, count)
    torch.testing.assert_close(made(rule, given_), made(rule, shuffled), rtol=0, atol=1e-12)


@st.composite
def with_wrong_ones(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Right vectors close to each other, wrong ones of any size, and the places of the wrong ones among all."""
    wrong_count = draw(st.integers(0, 3))
    right = vectors(wrong_count + 3 + draw(st.integers(0, 3)), 4, draw(st.integers(0, 2**32)))
    sizes = st.floats(-1e30, 1e30)
    wrong = [torch.tensor(draw(st.lists(sizes, min_size=4, max_size=4)), dtype=float64) for _ in range(wrong_count)]
    places = draw(st.permutations(range(len(right) + wrong_count)))[:wrong_count]
    return right, wrong, sorted(places)


def mixed(right: list[Tensor], wrong: list[Tensor], places: list[int]) -> list[Tensor]:
    right_ones, wrong_ones = iter(right), iter(wrong)
    return [next(wrong_ones if i in places else right_ones) for i in range(len(right) + len(wrong))]


@given(with_wrong_ones())
def test_wrong_vectors_of_any_size_leave_median_and_trimmed_mean_in_the_range_of_the_right_ones(
    case: tuple[list[Tensor], list[Tensor], list[int]],
) -> None:
    right, wrong, places = case
    given_ = mixed(right, wrong, places)
    low, high = torch.stack(right).amin(dim=0) - 1e-12, torch.stack(right).amax(dim=0) + 1e-12
    share = len(wrong) / len(given_)
    for rule in (Median(), TrimmedMean(share)):
        found = made(rule, given_)
        assert bool(((low <= found) & (found <= high)).all()), rule


@given(with_wrong_ones())
def test_krum_never_chooses_an_outlier(case: tuple[list[Tensor], list[Tensor], list[int]]) -> None:
    """K ≥ 2f + 3, the right ones within 1 of each other, the wrong ones 1,000 and more away from all, alike or not."""
    right, wrong, places = case
    right = [0.1 * v / max(1.0, float(v.norm())) for v in right]
    assume(all(float((v - right[0]).norm()) > 1000 for v in wrong))
    given_, byzantine = mixed(right, wrong, places), len(wrong)
    for keep in (1, 2, len(given_) - byzantine):
        rule = Krum(byzantine, keep)
        assert rule.fewest <= len(given_)
        chosen = rule.chosen(given_)
        assert len(chosen) == keep
        assert not set(chosen) & set(places)


def test_a_breakdown_point_is_where_it_is_said_to_be() -> None:
    """One more wrong one than is withstood moves the result out of the range of the right ones."""
    right, far = [torch.tensor([float(i)]) for i in range(5)], torch.tensor([1e6])
    assert 0 <= float(made(TrimmedMean(0.25), [*right, far, far])) > 4  # ⌊0.25·7⌋ = 1
    assert 0 <= float(made(TrimmedMean(0.3), [*right, far, far])) <= 4  # ⌊0.3·7⌋ = 2
    assert float(made(Median(), [*right, *[far] * 4])) <= 4
    assert float(made(Median(), [*right, *[far] * 6])) > 4
    near = [torch.tensor([0.01 * i]) for i in range(4)]
    assert float(made(Krum(1), [*near, far, far])) < 1
    assert float(made(Krum(1), [*near, *[far] * 5])) > 1


def test_the_mean_withstands_nothing() -> None:
    assert float(made(Mean(), [*vectors(9, 1, 0), torch.tensor([1e6], dtype=float64)])) > 1e4


@given(count=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_with_nothing_left_out_every_rule_is_the_mean(count: int, seed: int) -> None:
    given_ = vectors(count, 5, seed)
    mean = made(Mean(), given_)
    torch.testing.assert_close(made(TrimmedMean(0.0), given_), mean)
    torch.testing.assert_close(made(TrimmedMean(0.999 / count / 2), given_), mean)
    if count >= 3:
        torch.testing.assert_close(made(Krum(0, keep=count), given_), mean)
    if count <= 2:
        torch.testing.assert_close(made(Median(), given_), mean)


@pytest.mark.parametrize("share", [0.5 - 1e-10, 0.49])
@pytest.mark.parametrize("count", range(1, 7))
def test_something_is_always_left_to_average(share: float, count: int) -> None:
    given_ = vectors(count, 3, count)
    torch.testing.assert_close(made(TrimmedMean(share), given_), made(Median(), given_))


@pytest.mark.parametrize("count", range(1, 11))
def test_the_comparators_sort(count: int) -> None:
    """A network that sorts every sequence of zeros and ones sorts everything (Knuth)."""
    for values in product((0, 1), repeat=count):
        row = list(values)
        for low, high in _comparators(count):
            row[low], row[high] = min(row[low], row[high]), max(row[low], row[high])
        assert row == sorted(row)


def test_krum_looks_at_small_distances_beside_huge_ones() -> None:
    """They are summed from differences, not from squares that cancel."""
    near = [torch.tensor([1e8 + x, 0.0], dtype=float64) for x in (0.0, 1e-3, 2.5e-3, 4.5e-3)]
    assert Krum(1).chosen([*near, torch.tensor([-1e30, 1e30], dtype=float64)]) == [1]


def test_krum_at_equal_scores_keeps_the_first() -> None:
    given_ = [torch.tensor([x]) for x in (0.0, 1.0, 5.0, 6.0)]
    assert Krum(1).chosen(given_) == [0]  # the nearest of each is 1 away


def test_a_staleness_weight_scales_a_vector_before_it_is_compared() -> None:
    given_ = [torch.tensor([x]) for x in (1.0, 4.0, 9.0)]
    assert float(made(Median(), given_, [1.0, 1.0, 0.25])) == 2.25


@pytest.mark.parametrize("optimizer", [Sgd(0.5), Sgd(1.0, 0.9), Adam(0.1)], ids=lambda o: o.kind)
@pytest.mark.parametrize("rule", [Mean(), *ROBUST], ids=str)
def test_a_server_step_is_the_same_wherever_it_writes(rule: Aggregator, optimizer: Any) -> None:
    """In place, in fresh memory, and in that of the first contribution, chosen or not."""
    step = ServerStep(optimizer, rule, Polynomial(0.5))
    for order in list(permutations(vectors(7, 6, 3)))[::1000]:
        results = []
        for place in ("in place", "fresh", "what enters"):
            given_ = [Input(v.clone(), 1, tau, 0) for tau, v in enumerate(order)]
            start = torch.ones(6, dtype=float64)
            out = {"in place": None, "fresh": torch.full_like(start, np.nan), "what enters": given_[0].values}[place]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(update, "BLOCK", 4)
                step.apply(start, step.init(start), Inputs(given_), out=out)
            assert out is None or start.tolist() == [1.0] * 6
            for now, before in zip(given_, order, strict=True):
                assert now.values is out or torch.equal(now.values, before)
            results.append(start if out is None else out)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("rule", [Mean(), *ROBUST], ids=str)
def test_a_window_is_the_same_wherever_it_is_written(rule: Aggregator) -> None:
    window = [Input(v, 1, 0, 0) for v in vectors(7, 6, 5)]
    copies = [x.values.clone() for x in window]
    leaving = [Input(torch.ones(6, dtype=float64), 1, 0, 0)]
    step, start = WindowAggregate(rule), torch.zeros(6, dtype=float64)
    step.apply(start, None, Inputs(window[-1:], window, leaving), out=leaving[0].values)
    assert start.tolist() == [0.0] * 6
    step.apply(start, None, Inputs(window[-1:], window, leaving))
    assert torch.equal(start, leaving[0].values)
    assert all(torch.equal(x.values, copy) for x, copy in zip(window, copies, strict=True))
    np.testing.assert_allclose(start.numpy(), expected(rule, sent := torch.stack(copies).numpy(), sent), atol=1e-12)


def test_the_rules_of_the_table_are_the_plain_ones_where_nothing_is_asked_for() -> None:
    assert isinstance(fedavg(cohort=3, aggregator=Mean()).update, SampleWeightedMean)
    assert isinstance(fedfa(concurrency=3, aggregator=Mean()).update, WindowMean)
    assert fedbuff(concurrency=3, aggregator=Mean()) == fedbuff(concurrency=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimmedMean(0.5), "trimmed_mean: share must be .*0.5"),
        (lambda: TrimmedMean(-0.1), "trimmed_mean: share must be .*-0.1"),
        (lambda: Krum(-1), "krum: byzantine must be .*-1"),
        (lambda: Krum(1, 0), "krum: keep must be .*0"),
        (lambda: fedbuff(concurrency=9, buffer_size=4, aggregator=Krum(1)), "fedbuff: aggregator 'krum' needs 5 .*4"),
        (lambda: fedbuff(concurrency=9, buffer_size=5, aggregator=Krum(1, 5)), "needs 6 contributions .*keep"),
        (lambda: fedavg(cohort=9, keep=6, aggregator=Krum(2)), "fedavg: aggregator 'krum' needs 7 .*6"),
        (lambda: fedfa(concurrency=9, window=4, aggregator=Krum(1)), "fedfa: aggregator 'krum' needs 5 .*4"),
    ],
)
def test_what_could_withstand_nothing_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_the_comparators_are_few() -> None:
    """Batcher's network on 16 has 63; putting neighbours in order until all are takes 120."""
    assert len(_comparators(16)) == 63
    assert all(low < high for low, high in _comparators(16))


def test_krum_prefers_no_stale_vector_for_being_small() -> None:
    """Three fresh and four stale ones, all honest: scaled by s(τ) the stale ones would always lie closest."""
    chosen = []
    for seed in range(40):
        given_ = vectors(7, 20, seed)
        chosen += Krum(1).chosen(given_)
    assert 0.2 < np.mean([place < 3 for place in chosen]) < 0.7  # 3 of 7


@settings(max_examples=40)
@given(
    count=st.integers(1, 7),
    bits=st.integers(8, 30),
    seed=st.integers(0, 2**32),
    tau=st.lists(st.integers(0, 5), min_size=7, max_size=7),
)
def test_a_secure_sum_equals_the_plain_one_to_the_last_bit_of_its_fixed_point(
    count: int, bits: int, seed: int, tau: list[int]
) -> None:
    given_ = vectors(count, 9, seed)
    weights, scales = [1 / count] * count, [Polynomial(0.5)(t) for t in tau[:count]]
    found, plain = torch.empty(9, dtype=float64), torch.empty(9, dtype=float64)
    SecureMean(bits).aggregate(given_, weights, scales, found)
    Mean().aggregate(given_, weights, scales, plain)
    assert float((found - plain).abs().max()) <= count / 2 * 2.0**-bits + 1e-12


def test_the_server_of_a_secure_sum_sees_no_vector() -> None:
    """One message is spread over all numbers; all together sum to what was sent."""
    given_ = [torch.full((4000,), float(i), dtype=float64) for i in range(3)]
    messages = SecureMean(16).messages(given_, [1.0] * 3, [1.0] * 3)
    for message in messages:
        assert abs(float((message > 0).double().mean()) - 0.5) < 0.05
        assert len(message.unique()) == 4000
    assert (sum(messages) == (0 + 1 + 2) * 2**16).all()  # type: ignore[union-attr]
