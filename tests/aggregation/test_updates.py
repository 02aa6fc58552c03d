"""Update rules against published vectors; each says which convention it follows."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedasync.aggregation.fedasync import Mixing
from fedasync.aggregation.fedavg import SampleWeightedMean
from fedasync.aggregation.fedbuff import DeltaMean
from fedasync.aggregation.fedfa import WindowMean
from fedasync.aggregation.update import BLOCK, Input, Inputs, Update, blocks
from fedasync.core import Constant, Hinge, Polynomial, Sliding, Staleness, Tumbling

from .scalars import Runtime, applied, brings, inputs, model

PLAIN = Constant()


# -- FedBuff ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "result"),
    [(Polynomial(0.5), 1.35), (PLAIN, 1.5)],
    ids=["paper", "without_staleness_weights"],
)
def test_fedbuff_divides_by_k(staleness: Staleness, result: float) -> None:
    """w = 1 at version 3; A brings +0.4 with τ = 0, B brings +0.6 with τ = 3."""
    assert applied(DeltaMean(1.0, staleness), 1.0, (0.4, 0), (0.6, 3)) == pytest.approx(result, abs=1e-12)


def test_fedbuffs_other_conventions_give_other_numbers() -> None:
    """What our 1.35 is not: Σs·Δ/Σs, Σs·Δ, models averaged, or a server rate of 0.1 (which is ours on request)."""
    ours = applied(DeltaMean(), 1.0, (0.4, 0), (0.6, 3))
    assert all(abs(ours - other) > 0.05 for other in (1.4667, 1.98995, 1.5, 1.2, 1.1333, 1.10, 1.09))
    assert applied(DeltaMean(0.1), 1.0, (0.4, 0), (0.6, 3)) == pytest.approx(1.035, abs=1e-12)


def test_fedbuff_takes_each_delta_from_the_version_that_its_client_started_from() -> None:
    """The same vector from models: B started at version 0, w = 0, and returns 0.6; A at version 3 returns 1.4."""
    runtime = Runtime(DeltaMean(), Tumbling(2), model(0.0))
    old = runtime.start(worker=1)
    for first, second in ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)):
        runtime.bring(runtime.start(), brings(first))
        runtime.bring(runtime.start(), brings(second))
    assert float(runtime.server.model.values) == 1.0
    assert runtime.coordinator.version == 3
    runtime.bring(runtime.start(), brings(1.4))
    assert runtime.bring(old, brings(0.6)) == pytest.approx(1.35, abs=1e-12)


def test_fedbuff_changes_the_model_on_every_kth_arrival_alone() -> None:
    runtime = Runtime(DeltaMean(1.0, PLAIN), Tumbling(3), model(0.0))
    trace = [runtime.bring(runtime.start(), brings(1.0, form="delta")) for _ in range(9)]
    assert trace == pytest.approx([0, 0, 1, 1, 1, 2, 2, 2, 3], abs=1e-12)


@given(st.permutations([(0.4, 0), (0.6, 3), (-7.0, 1), (1e3, 2), (1e-3, 9)]))
def test_the_order_of_a_buffer_does_not_matter_beyond_rounding(entering: list[tuple[float, int]]) -> None:
    expected = 1.0 + sum((1 + tau) ** -0.5 * delta for delta, tau in entering) / 5
    assert applied(DeltaMean(), 1.0, *entering) == pytest.approx(expected, rel=1e-13)


# -- FedAsync --------------------------------------------------------------------------------------------------


def test_fedasync_computes_alpha_from_its_base_each_time() -> None:
    """0.88 then 0.796; an implementation that stores the product α·s gives 0.838 the second time."""
    rule = Mixing(0.6, Polynomial(0.5))
    first = applied(rule, 1.0, (0.6, 3))
    assert first == pytest.approx(0.88, abs=1e-12)
    assert applied(rule, first, (0.6, 3)) == pytest.approx(0.796, abs=1e-12)


@pytest.mark.parametrize(
    ("staleness", "tau", "result"),
    [(Hinge(10, 2), 3, 0.978182), (Hinge(10, 2), 2, 0.76), (PLAIN, 3, 0.76), (Polynomial(0.5), 0, 0.76)],
)
def test_fedasync_weighs_by_staleness(staleness: Staleness, tau: int, result: float) -> None:
    assert applied(Mixing(0.6, staleness), 1.0, (0.6, tau)) == pytest.approx(result, abs=5e-7)


def test_fedasync_refuses_a_negative_staleness() -> None:
    with pytest.raises(ValueError, match="staleness is an integer ≥ 0, got -1"):
        applied(Mixing(0.6, Polynomial()), 1.0, (0.6, -1))


def test_two_models_in_one_step_are_mixed_one_after_the_other() -> None:
    assert applied(Mixing(0.5, PLAIN), 0.0, (1.0, 0), (2.0, 0)) == 1.25
    assert applied(Mixing(0.5, PLAIN), 0.0, (2.0, 0), (1.0, 0)) == 1.0


@given(w=st.floats(-1e6, 1e6), x=st.floats(-1e6, 1e6), alpha=st.floats(0, 1, exclude_min=True), tau=st.integers(0, 50))
def test_mixing_stays_between_the_two_models(w: float, x: float, alpha: float, tau: int) -> None:
    mixed = applied(Mixing(alpha, Polynomial(0.5)), w, (x, tau))
    room = 1e-9 * max(abs(w), abs(x))
    assert min(w, x) - room <= mixed <= max(w, x) + room


# -- FedFa -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warm_up", "trace"),
    [
        ("average_what_is_there", [1.0, 1.5, 2.0, 9.5 / 3]),
        ("wait_until_full", [0.0, 0.0, 2.0, 9.5 / 3]),
    ],
)
def test_fedfa_averages_its_window_after_either_warm_up(warm_up: str, trace: list[float]) -> None:
    """K = 3 and arrivals 1, 2, 3, 4.5: … 2, 3.1667 when the window is full."""
    runtime = Runtime(WindowMean(), Sliding(3, warm_up), model(0.0))  # type: ignore[arg-type]
    seen = [runtime.bring(runtime.start(), brings(x)) for x in (1.0, 2.0, 3.0, 4.5)]
    assert seen == pytest.approx(trace, abs=1e-12)


def test_one_client_may_hold_several_places_of_the_window() -> None:
    runtime = Runtime(WindowMean(), Sliding(3), model(0.0))
    for x in (1.0, 4.0, 7.0):
        value = runtime.bring(runtime.start(worker=5), brings(x))
    assert value == pytest.approx(4.0, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_fedfas_increments_stay_with_the_mean_of_the_window(size: int, dtype: torch.dtype) -> None:
    """Rounding adds up for no longer than ``recompute_every`` versions."""
    runtime = Runtime(WindowMean(recompute_every=32), Sliding(size), model(*[0.0] * 50, dtype=dtype))
    random = torch.Generator().manual_seed(1)
    arrived = []
    for _ in range(150):
        x = torch.randn(50, generator=random, dtype=dtype) * 100
        arrived.append(x.double())
        lease = runtime.start()
        contribution = brings(*x.tolist(), dtype=dtype)
        runtime.bring(lease, contribution)
        if len(arrived) >= size:
            exact = torch.stack(arrived[-size:]).mean(dim=0)
            error = 32 * 300 * torch.finfo(dtype).eps
            torch.testing.assert_close(runtime.server.model.values.double(), exact, rtol=0, atol=error)


def test_the_mean_is_computed_afresh_every_so_many_versions() -> None:
    """Bit for bit the mean of the window then, and no longer the sum of increments."""
    now_and_then, always = (Runtime(WindowMean(e), Sliding(7), model(0.0, dtype=torch.float32)) for e in (5, 1))
    same = []
    for x in (torch.randn(66, generator=torch.Generator().manual_seed(2)) * 1e3).tolist():
        values = [r.bring(r.start(), brings(x, dtype=torch.float32)) for r in (now_and_then, always)]
        same.append(values[0] == values[1])
    assert all(same[6::5]), "versions 1, 6, 11, …"
    assert not all(same[6:])


def test_recomputing_at_every_version_gives_the_mean_itself() -> None:
    always, seldom = (Runtime(WindowMean(e), Sliding(4), model(0.0)) for e in (1, 10**9))
    for x in torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist():
        fresh = always.bring(always.start(), brings(x))
        assert seldom.bring(seldom.start(), brings(x)) == pytest.approx(fresh, abs=1e-14)


# -- FedAvg ----------------------------------------------------------------------------------------------------


def test_fedavg_weighs_models_by_their_samples() -> None:
    values = torch.tensor([9.0, 9.0], dtype=torch.float64)
    entering = [
        Input(torch.tensor([1.0, 2.0], dtype=torch.float64), 1, 0, 0),
        Input(torch.tensor([3.0, 4.0], dtype=torch.float64), 3, 0, 1),
    ]
    SampleWeightedMean().apply(values, None, Inputs(entering))
    assert values.tolist() == [2.5, 3.5]


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 10_000)), min_size=1, max_size=20))
def test_fedavg_lies_in_the_hull_and_forgets_the_old_model(models: list[tuple[float, int]]) -> None:
    values = torch.tensor([float("nan")], dtype=torch.float64)
    entering = inputs(*((x, 0) for x, _ in models), samples=tuple(n for _, n in models))
    SampleWeightedMean().apply(values, None, entering)
    exact = sum(x * n for x, n in models) / sum(n for _, n in models)
    assert float(values) == pytest.approx(exact, rel=1e-12, abs=1e-10)


# -- all -------------------------------------------------------------------------------------------------------

RULES = [
    SampleWeightedMean(),
    Mixing(0.6, Polynomial()),
    DeltaMean(0.7),
    WindowMean(),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_vector_of_several_blocks_is_worked_on_like_its_pieces(rule: Update) -> None:
    """The cut into cache-sized pieces shows in no value, also at the seams."""
    length = 2 * BLOCK + 17
    random = torch.Generator().manual_seed(3)
    start = torch.randn(length, generator=random, dtype=torch.float64)
    given_ = [
        Input(torch.randn(length, generator=random, dtype=torch.float64), n, tau, n) for n, tau in ((1, 0), (2, 3))
    ]
    whole = start.clone()
    rule.apply(whole, rule.init(whole), Inputs(given_, given_))
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, length - 1):
        one = start[place : place + 1].clone()
        cut = [Input(x.values[place : place + 1], x.samples, x.staleness, x.worker) for x in given_]
        rule.apply(one, rule.init(one), Inputs(cut, cut))
        assert float(one) == float(whole[place])


def test_blocks_cover_a_vector_once() -> None:
    for length in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        vector, other = torch.arange(length), torch.arange(length)
        pieces = list(blocks(vector, other))
        assert torch.equal(torch.cat([piece for piece, _ in pieces]), vector)
        assert all(len(a) == len(b) <= BLOCK for a, b in pieces)
        assert pieces[0][0].data_ptr() == vector.data_ptr(), "views"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_read_their_inputs_and_write_the_model_in_place(rule: Update) -> None:
    values = torch.ones(4, dtype=torch.float64)
    place = values.data_ptr()
    given_ = [Input(torch.arange(4, dtype=torch.float64) * k, k, 0, k) for k in (1, 2)]
    before = [x.values.clone() for x in given_]
    rule.apply(values, rule.init(values), Inputs(given_, given_))
    assert values.data_ptr() == place
    assert all(torch.equal(x.values, old) for x, old in zip(given_, before, strict=True))


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.0001, float("nan")])
def test_fedasync_refuses_an_alpha_outside_0_to_1(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"fedasync: alpha must lie in \(0, 1\], got"):
        Mixing(alpha)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_fedbuff_refuses_a_server_rate_that_is_not_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="fedbuff: server_learning_rate must be > 0 and finite, got"):
        DeltaMean(rate)


def test_fedfa_refuses_to_recompute_never() -> None:
    with pytest.raises(ValueError, match="fedfa: recompute_every must be an integer ≥ 1, got 0"):
        WindowMean(0)


def test_defaults_are_those_of_the_papers_re_implementations() -> None:
    assert DeltaMean().staleness(3) == pytest.approx(1 / sqrt(4))
    assert (DeltaMean().wants, Mixing().wants, WindowMean().wants, SampleWeightedMean().wants) == (
        "delta",
        "parameters",
        "parameters",
        "parameters",
    )
