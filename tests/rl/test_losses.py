"""Losses and their gradients against published formulas, worked by hand on small numbers."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log, nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedasync.rl import corrections, losses
from fedasync.rl.denominators import token_weights
from fedasync.rl.objective import Objective

from .loss_cases import logs, played, tensor, terms

approx = pytest.approx


def close(values: list[float]) -> Any:
    return approx(values, abs=2e-6)


def off(*ratios: float) -> tuple[list[list[float]], list[list[float]]]:
    """log π with these ratios to an old policy of probability ½, and its log."""
    return [[log(each / 2) for each in ratios]], [[log(0.5)] * len(ratios)]


# -- PPO ---------------------------------------------------------------------------------------------------------


def test_ppo_clip() -> None:
    pi, old = off(1.5, 0.5, 1.5, 0.5, 1.1)
    of = terms(pi, old, [[1, 1, -1, -1, 2]], old)
    for name in ("ppo", "uncorrected"):
        loss, gradient, found = played(Objective(name), of)
        assert loss == close([-1.2, -0.5, 1.5, 0.8, -2.2])
        assert gradient == close([0, -0.5, 1.5, 0, -2.2])
        assert found.stats["clipped_share"] == approx(0.4)
    assert played(Objective("coupled"), of)[1] == close([0, -0.5, 1.5, 0, -2.2])


def test_bounds_need_not_be_symmetrical() -> None:
    pi, old = off(1.25, 0.75)
    loss, gradient, _ = played(Objective(clip_low=0.2, clip_high=0.28), terms(pi, old, [[1, -1]], old))
    assert (loss, gradient) == (close([-1.25, 0.8]), close([-1.25, 0]))


def test_dual_clip() -> None:
    pi, old = off(4, 2, 4)
    loss, gradient, found = played(Objective(dual_clip=3.0), terms(pi, old, [[-1, -1, 1]], old))
    assert loss == close([3, 2, -1.2])
    assert gradient == close([0, 2, 0])
    assert found.stats["clipped_share"] == approx(2 / 3)


# -- decoupled PPO -----------------------------------------------------------------------------------------------

MU, PROXIMAL, PI = logs([0.5, 0.2, 0.4]), logs([0.4, 0.3, 0.1]), logs([0.5, 0.27, 0.09])
ADVANTAGES = [[1.0, 1.0, -1.0]]


@pytest.mark.parametrize(
    ("objective", "loss", "gradient"),
    [
        (Objective("decoupled"), [-0.96, -1.35, 0.225], [0, -1.35, 0.225]),
        (Objective("decoupled", weight_cap=1.2), [-0.96, -1.08, 0.225], [0, -1.08, 0.225]),
        (Objective("tis", weight_cap=1.2), [-0.96, -1.08, 0.225], [0, -1.08, 0.225]),
        (Objective("icepop"), [-0.96, -1.35, 0], [0, -1.35, 0]),
        (Objective("decoupled", mask="token", mask_low=0.5, mask_high=5.0), [-0.96, -1.35, 0], [0, -1.35, 0]),
        (Objective("coupled"), [-1, -1.2, 0.8], [-1, 0, 0]),
        (Objective("decoupled", weight_floor=0.5), [-0.96, -1.35, 0.45], [0, -1.35, 0.45]),
        (Objective("decoupled", weight="none"), [-1.2, -0.9, 0.9], [0, -0.9, 0.9]),
        (Objective("tis_sequence"), [-0.36, -0.27, 0.27], [0, -0.27, 0.27]),
        (Objective("tis_sequence", weight_cap=0.25), [-0.3, -0.225, 0.225], [0, -0.225, 0.225]),
        (Objective("decoupled", weight="geometric"), [-0.803319, -0.602490, 0.602490], [0, -0.602490, 0.602490]),
        (Objective("sequence_mask"), [0, 0, 0], [0, 0, 0]),
        (Objective("sequence_mask", mask="product"), [0, 0, 0], [0, 0, 0]),
        (Objective("sequence_mask", mask_low=0.5, mask_high=2.0), [-1.2, -0.9, 0.9], [0, -0.9, 0.9]),
        (
            Objective("sequence_mask", mask_low=0.5, mask_high=2.0, weight="token"),
            [-0.96, -1.35, 0.225],
            [0, -1.35, 0.225],
        ),
    ],
)
def test_decoupled_ppo_and_its_variants(objective: Objective, loss: list[float], gradient: list[float]) -> None:
    of = terms(PI, MU, ADVANTAGES, PROXIMAL)
    found = played(objective, of)
    assert found[0] == close(loss)
    assert found[1] == close(gradient)
    assert found[2].counted.equal(of.mask), "what is rejected stays in the denominator"


def test_sequence_ratios_of_product_and_geometric_mean() -> None:
    drift = tensor(PROXIMAL) - tensor(MU)
    mask = torch.ones_like(drift, dtype=torch.bool)
    assert corrections.ratio(drift)[0].tolist() == close([0.8, 1.5, 0.25])
    assert corrections.behaviour_weight(drift, mask, "product")[0].tolist() == close([0.3] * 3)
    assert corrections.behaviour_weight(drift, mask, "geometric")[0].tolist() == close([0.669433] * 3)
    of = corrections.behaviour_weight(tensor([[0.2, 0.4, 0.9]]), mask, "geometric")
    assert of[0].tolist() == close([1.648721] * 3)


@pytest.mark.parametrize(
    ("trained", "proximal", "behaviour", "advantage", "clipped", "weighted"),
    [
        (-1.0, -1.2, -1.5, 1, -1.2, -1.619831),
        (-1.0, -1.2, -1.5, -1, 1.221403, 1.648721),
        (-1.5, -1.2, -1.0, 1, -0.740818, -0.606531),
        (-1.5, -1.2, -1.0, -1, 0.8, 0.654985),
        (-0.5, -0.5, -2.5, 1, -1, -7.389056),
    ],
)
def test_areal_tokens(
    trained: float, proximal: float, behaviour: float, advantage: float, clipped: float, weighted: float
) -> None:
    of = terms([[trained]], [[behaviour]], [[advantage]], [[proximal]])
    assert played(Objective("uncorrected"), of)[0] == close([clipped])
    assert played(Objective("decoupled"), of)[0] == close([weighted])


def test_a_mask_rejects_and_a_cap_limits_and_the_denominator_stays() -> None:
    of = terms([[-0.5] * 4], [[-2.5, -0.5, -0.5, -0.5]], [[1] * 4], [[-0.5] * 4])
    weights = token_weights(of.mask, "token", dtype=torch.float64)
    masked = Objective("decoupled", mask="token", mask_high=5.0)
    assert played(masked, of)[0] == close([0, -1, -1, -1])
    assert float((weights * masked.token_losses(of).losses.detach()).sum()) == approx(-0.75), (
        "of 4 valid tokens, not of 3"
    )
    assert played(Objective("decoupled", weight_cap=5.0), of)[0] == close([-5, -1, -1, -1])


def test_with_the_behaviour_as_proximal_decoupled_is_ppo() -> None:
    of = terms(PI, PROXIMAL, ADVANTAGES, PROXIMAL)
    assert played(Objective("decoupled"), of)[:2] == played(Objective("ppo"), of)[:2]
    told = terms(PI, PROXIMAL, ADVANTAGES)
    assert played(Objective("decoupled", proximal="behaviour"), told)[:2] == played(Objective("coupled"), told)[:2]


def test_at_the_proximal_policy_the_gradient_is_the_weighted_policy_gradient() -> None:
    loss, gradient, _ = played(Objective("decoupled"), terms(PROXIMAL, MU, ADVANTAGES, PROXIMAL))
    assert loss == gradient == close([-0.8, -1.5, 0.25])


def test_the_behaviour_weight_has_no_gradient() -> None:
    drift = tensor([[0.1, 0.2]]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for level in ("token", "geometric", "product"):
        assert not corrections.behaviour_weight(drift, mask, level).requires_grad
    assert not losses.weighted(torch.ones(1, 2), drift).requires_grad


def test_an_answer_that_spans_versions_is_weighed_by_the_version_of_each_token() -> None:
    """Token 0 was generated with ½ under version 3, and version 4 would have given it 0.45."""
    pi = logs([0.4, 0.3])
    of = terms(pi, logs([0.5, 0.25]), [[1, 1]], pi)
    assert played(Objective("decoupled", weight="product"), of)[0] == close([-0.96, -0.96])
    scored_again = terms(pi, logs([0.45, 0.25]), [[1, 1]], pi)
    assert played(Objective("decoupled", weight="product"), scored_again)[0] == close([-1.066667, -1.066667])


# -- losses on π/μ -----------------------------------------------------------------------------------------------


def behaviour_of(log_probs: list[float], ratios: list[float]) -> list[list[float]]:
    return [[each - log(ratio) for each, ratio in zip(log_probs, ratios, strict=True)]]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    pi = [-1.0, -0.5, -2.0]
    of = terms([pi], behaviour_of(pi, [0.4, 1.5, 6]), [[1, -1, 2]])
    loss, gradient, _ = played(Objective("cispo", clip_low=0.2, clip_high=0.2), of)
    assert (loss, gradient) == (close([0.8, -0.6, 4.8]), close([-0.8, 1.2, -2.4]))
    loss, gradient, found = played(Objective("cispo"), of)
    assert (loss, gradient) == (close([0.4, -0.75, 20]), close([-0.4, 1.5, -10]))
    assert found.stats["modified_share"] == approx(1 / 3)


def test_reinforce_with_a_truncated_ratio() -> None:
    pi = [-1.0, -0.5, -2.0]
    of = terms([pi], behaviour_of(pi, [0.4, 1.5, 6]), [[1, -1, 2]])
    loss, gradient, _ = played(Objective("reinforce"), of)
    assert (loss, gradient) == (close([0.4, -0.51, 4.08]), close([-0.4, 1.02, -2.04]))
    assert played(Objective("reinforce", clip_high=1.0), of)[1] == close([-0.4, 1.5, -4])


def test_topr() -> None:
    pi = [-1.0, -0.5, -1.0, -0.5]
    of = terms([pi], behaviour_of(pi, [0.4, 1.5, 0.4, 1.5]), [[1, 1, -1, -1]])
    loss, gradient, _ = played(Objective("topr"), of)
    assert (loss, gradient) == (close([1, 0.5, -0.4, -0.5]), close([-1, -1, 0.4, 1]))


def test_gspo_has_one_ratio_for_a_sequence() -> None:
    old, new = [[-1.0, -1], [-1.0, -2, -1, -2]], [[-0.9, -0.9], [-1.2, -2.2, -1, -2.4]]
    of = terms(new, old, [[1, 1], [-1] * 4], old)
    wide = Objective("gspo", clip_low=0.2, clip_high=0.2)
    weights = token_weights(of.mask, wide.aggregation, dtype=torch.float64)
    loss, gradient, _ = played(wide, of, weights)
    assert loss == close([-1.1051709] * 2 + [0.8187308] * 4), "its sequence's, at each token"
    assert gradient == close([-0.2762927] * 2 + [0.1023413] * 4)
    assert float((weights * wide.token_losses(of).losses.detach()).sum()) == approx(-0.1432201)
    loss, gradient, _ = played(Objective("gspo"), of, weights)
    assert loss == close([-1.0004] * 2 + [0.9997] * 4)
    assert gradient == [0] * 6
    assert float((weights * Objective("gspo").token_losses(of).losses.detach()).sum()) == approx(-0.00035)


def test_dppo_masks_by_how_far_a_probability_has_gone() -> None:
    of = terms(logs([0.6, 0.3, 0.05, 0.5]), logs([0.3, 0.25, 0.4, 0.45]), [[1, 1, -1, -1]])
    loss, gradient, found = played(Objective("dppo"), of)
    assert loss == close([0.000480, -1.199967, 0.004324, 1.111122])
    assert gradient == close([0.001386, -1.199635, -0.004159, 1.111322])
    assert found.stats["clipped_share"] == approx(0.5)


def test_m2po_drops_the_largest_log_ratios_until_their_second_moment_is_in_bounds() -> None:
    drift = tensor([[0.05, -0.1, 0.6, 0.2, -0.02]])
    mask = torch.ones_like(drift, dtype=torch.bool)
    assert float(drift.square().mean()) == approx(0.08258)
    kept = corrections.m2_kept(drift, mask, 0.04)
    assert kept[0].tolist() == [True, True, False, True, True]
    assert float(drift[kept].square().mean()) == approx(0.013225)
    assert corrections.m2_kept(drift, mask, 0.09).all()
    assert not corrections.m2_kept(drift, mask, 0.0001).any()
    pi = [-1.0] * 5
    of = terms([pi], [[-1 - float(each) for each in drift[0]]], [[1, -1, 1, 1, 1]])
    loss, gradient, _ = played(Objective("m2po"), of)
    assert loss == gradient == close([-exp(0.05), exp(-0.1), 0, -exp(0.2), -exp(-0.02)])


def test_tokens_without_a_log_probability_make_no_room_in_m2pos_bound() -> None:
    """Drifts of 0.05 and 0.6 are outside the bound together, however many tokens nothing is known of."""
    drift, missing = [0.05, 0.6], [float("nan")] * 8
    of = terms([[-1.0] * 10], [[-1 - each for each in drift] + missing], [[1] * 10])
    objective = Objective("m2po")
    loss, _, found = played(objective, of)
    assert loss == close([-exp(0.05), 0] + [-1] * 8)
    assert found.stats["rejected_share"] == approx(1 / 10)
    kept = objective.selected(of.behaviour, of.log_probs, of.mask)
    assert kept is not None
    assert kept[0].tolist() == [True, False] + [True] * 8


# -- the other masks ---------------------------------------------------------------------------------------------


def test_a_sequence_that_lost_likelihood_is_left_out_where_its_advantage_is_negative() -> None:
    of = terms([[-2.0, -2], [-2.0, -2], [-1.1, -1.1]], [[-1.0, -1]] * 3, [[-1, -1], [1, 1], [-1, -1]])
    loss, gradient, found = played(Objective("coupled", opsm_delta=0.5), of)
    assert loss[:2] == gradient[:2] == [0, 0]
    assert all(loss[2:])
    assert found.stats["rejected_share"] == approx(1 / 3)


def test_tokens_older_than_the_bound_are_left_out_and_their_neighbours_stay() -> None:
    versions = torch.tensor([[3, 4, 5, 5]])
    of = terms([[-1.0] * 4], [[-1.0] * 4], [[1] * 4], [[-1.0] * 4], token_versions=versions, version=5)
    loss, _, found = played(Objective(max_token_staleness=1), of)
    assert loss == [0, -1, -1, -1]
    assert found.counted.all()
    assert (found.stats["token_staleness_mean"], found.stats["token_staleness_max"]) == (0.75, 2)


@pytest.mark.parametrize(
    ("behaviour", "trained", "own", "learner", "estimate"),
    [
        (-1.0, -1.5, 0, 2, -1.25),
        (-1.0, -1.5, 0, 4, -1.375),
        (-2.0, -2.2, 2, 4, -2.1),
        (-1.0, -1.5, 1, 2, -1.0),
        (-1.0, -1.5, 2, 2, -1.0),
        (-1.0, -1.5, -1, 2, -1.0),
    ],
)
def test_a_proximal_policy_between_the_two(
    behaviour: float, trained: float, own: int, learner: int, estimate: float
) -> None:
    """A-3PO numbers the policy that is trained, we the version it is made from, which is one less."""
    found = corrections.estimated_proximal(
        tensor([[trained]]), tensor([[behaviour]]), torch.tensor([[own]]), learner - 1, "loglinear"
    )
    assert float(found) == approx(estimate)


def test_a_proximal_policy_between_the_two_by_their_probabilities() -> None:
    found = corrections.estimated_proximal(tensor(logs([0.25])), tensor(logs([0.5])), torch.tensor([[0]]), 1, "linear")
    assert float(found) == approx(-0.980829, abs=1e-6)


def test_an_estimated_proximal_policy_takes_no_gradient() -> None:
    versions = torch.tensor([[0, 0, 0]])
    of = terms(PI, MU, ADVANTAGES, token_versions=versions, version=1)
    estimate = corrections.estimated_proximal(of.log_probs, of.behaviour, versions, 1, "loglinear")
    by_hand = terms(PI, MU, ADVANTAGES, [estimate.tolist()[0]])
    assert played(Objective("decoupled", proximal="loglinear"), of)[:2] == played(Objective("decoupled"), by_hand)[:2]


# -- what no policy can make infinite ------------------------------------------------------------------------------

EVERY = [
    Objective("ppo"),
    Objective("uncorrected"),
    Objective("coupled"),
    Objective("decoupled"),
    Objective("decoupled", weight="geometric", mask="product", mask_high=3.0),
    Objective("decoupled", proximal="linear"),
    Objective("decoupled", proximal="loglinear", weight_cap=3.0),
    Objective("ppo", proximal="behaviour"),
    Objective("tis"),
    Objective("tis_sequence"),
    Objective("icepop"),
    Objective("sequence_mask"),
    Objective("cispo"),
    Objective("gspo"),
    Objective("gspo", clip_low=0.9, clip_high=9.0, weight="token"),
    Objective("topr"),
    Objective("m2po"),
    Objective("reinforce"),
    Objective("dppo"),
    Objective("coupled", opsm_delta=0.1),
    Objective("ppo", max_token_staleness=1, entropy_bonus=0.1),
    Objective("ppo", kl_coefficient=0.1),
    Objective("coupled", kl_coefficient=0.1, kl_estimator="k2"),
]


def named(objective: Objective) -> str:
    return repr({name: value for name, value in vars(objective).items() if value != getattr(Objective, name)})


def whole(objective: Objective, **changes: Tensor) -> tuple[list[float], list[float], dict[str, float]]:
    """Two sequences of 3 and 2 tokens, in which some tensors have other values."""
    more: dict[str, Any] = {"token_versions": torch.tensor([[0, 1, 2], [2, 2, -1]]), "version": 2}
    of = terms(logs([0.5, 0.2, 0.9], [0.3, 0.4]), logs([0.4, 0.3, 0.8], [0.3, 0.1]), [[1] * 3, [-1] * 2])
    of = of._replace(proximal=tensor(logs([0.45, 0.2, 0.8], [0.2, 0.3])), entropy=torch.full((2, 3), 0.5), **more)
    if objective.needs_reference:
        of = of._replace(reference=tensor(logs([0.3, 0.4, 0.7], [0.3, 0.6])))
    of = of._replace(**changes)
    loss, gradient, found = played(objective, of)
    return loss, gradient, found.stats


@pytest.mark.parametrize("objective", EVERY, ids=named)
def test_what_is_not_counted_has_no_influence_and_no_gradient(objective: Objective) -> None:
    """Padding holds NaN in all of these tests; here it holds other values, and nothing changes."""
    found = whole(objective)
    zeros = terms(logs([0.5, 0.2, 0.9], [0.3, 0.4]), [[0] * 3], [[0] * 3]).log_probs.detach().nan_to_num(-7.0)
    other = whole(objective, log_probs=zeros.requires_grad_())
    assert found == other


@pytest.mark.parametrize("bad", [nan, -inf, inf])
@pytest.mark.parametrize("objective", EVERY, ids=named)
def test_a_missing_behaviour_log_probability_is_neutral_or_masked_and_counted(objective: Objective, bad: float) -> None:
    told = logs([0.4, 0.3, 0.8], [0.3, 0.1])
    told[0][1] = bad
    loss, gradient, stats = whole(objective, behaviour=tensor(told))
    assert torch.tensor(loss + gradient).isfinite().all()
    assert stats["missing_tokens"] == 1
    _, none, stats = whole(replace(objective, missing="mask"), behaviour=tensor(told))
    assert none[1] == 0
    assert stats["missing_tokens"] == 1
    assert stats["rejected_share"] >= 0.2


@pytest.mark.parametrize("objective", EVERY, ids=named)
def test_no_log_ratio_is_too_far_off(objective: Objective) -> None:
    """In float32, where exp(89) is inf already."""
    far = [[-1e30, 0.0, -1e4], [-0.01, -500.0]]
    of = terms(logs([0.5, 0.2, 0.9], [0.3, 0.4]), far, [[1, -1, 1], [-1, -1]])
    for pi in (of.log_probs.detach().float(), tensor([[-1e4, -1e4, -0.1], [-0.1, -1e4]]).float()):
        more: dict[str, Any] = {"token_versions": torch.tensor([[0, 1, 2], [2, 2, -1]]), "version": 2}
        off = of._replace(
            log_probs=pi.requires_grad_(),
            proximal=tensor([[-80.0, -90.0, -1e4], [-200.0, -0.1]]).float(),
            behaviour=of.behaviour.float(),
            entropy=torch.zeros(2, 3),
            reference=tensor([[-1e30, -0.1, -1e4], [-500.0, -0.01]]).float() if objective.needs_reference else None,
            **more,
        )
        found = objective.token_losses(off)
        found.losses.sum().backward()
        assert found.losses.isfinite().all()
        assert off.log_probs.grad is not None
        assert off.log_probs.grad.isfinite().all()
        assert torch.tensor(list(found.stats.values()), dtype=torch.float64).isfinite().all()


def test_where_nothing_is_known_of_the_behaviour_the_weight_is_1() -> None:
    unknown = [[nan] * 3]
    decoupled = played(Objective("decoupled"), terms(PI, unknown, ADVANTAGES, PROXIMAL))
    assert decoupled[:2] == played(Objective("ppo"), terms(PI, MU, ADVANTAGES, PROXIMAL))[:2]
    loss, gradient, found = played(Objective("coupled"), terms(PI, unknown, ADVANTAGES))
    assert loss == gradient == [-1, -1, 1], "the policy gradient of REINFORCE"
    assert "ratio_mean" not in found.stats


@given(
    st.lists(st.tuples(*[st.floats(-6, -0.01)] * 3, st.floats(-3, 3)), min_size=1, max_size=6), st.sampled_from(EVERY)
)
@settings(max_examples=60)
def test_without_advantage_there_is_no_loss_but_penalties(
    tokens: list[tuple[float, float, float, float]], objective: Objective
) -> None:
    pi, mu, proximal, _ = ([list(each)] for each in zip(*tokens, strict=True))
    more: dict[str, Any] = {"token_versions": torch.zeros(1, len(tokens), dtype=torch.long), "version": 1}
    of = terms(pi, mu, [[0] * len(tokens)], proximal, entropy=torch.zeros(1, len(tokens)), **more)
    if objective.needs_reference:
        of = of._replace(reference=of.log_probs.detach())
    loss, gradient, _ = played(objective, of)
    if objective.loss != "dppo":
        assert not any(loss)
        assert not any(gradient)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_from_the_reference_and_its_gradient(estimator: Any) -> None:
    """With x = log π − log π_ref: k2 = x²/2 and x, k3 = exp(−x) − 1 + x and 1 − exp(−x); each times β."""
    pi, reference = logs([0.5, 0.2, 0.9]), logs([0.25, 0.4, 0.9])
    of = terms(pi, pi, [[0, 0, 0]], pi)._replace(reference=tensor(reference))
    loss, gradient, found = played(Objective("ppo", kl_coefficient=0.5, kl_estimator=estimator), of)
    values, slopes = {
        "k2": ([log(2) ** 2 / 2, log(2) ** 2 / 2, 0], [log(2), -log(2), 0]),
        "k3": ([log(2) - 0.5, 1 - log(2), 0], [0.5, -1, 0]),
    }[estimator]
    assert loss == pytest.approx([0.5 * each for each in values], abs=1e-12)
    assert gradient == pytest.approx([0.5 * each for each in slopes], abs=1e-12)
    assert found.stats["kl_reference"] == pytest.approx(sum(values) / 3)


# -- the critic ----------------------------------------------------------------------------------------------------


def test_value_loss() -> None:
    mask = torch.tensor([[True, True, False]])
    values = tensor([[1.0, 3.0]])
    values = torch.nn.functional.pad(values, (0, 1), value=nan).requires_grad_()
    returns, old = tensor([[2.0, 2.0, nan]]), tensor([[1.0, 2.5, nan]])
    plain = Objective(advantages="gae").value_losses(values, returns, old, mask)
    assert plain.tolist()[0] == [0.25, 0.25, 0]
    plain.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[-0.5, 0.5, 0]]
    clipped = Objective(advantages="gae", value_clip=0.2, value_coefficient=1.0)
    assert clipped.value_losses(values, returns, old, mask).tolist()[0] == approx([0.5, 0.5, 0])
    old[0, 1] = 2.0
    values = tensor([[1.0, 1.5, nan]])
    assert clipped.value_losses(values, returns, tensor([[1.0, 1.0, nan]]), mask).tolist()[0] == approx([0.5, 0.32, 0])


def test_a_clipped_value_loss_needs_the_old_values() -> None:
    with pytest.raises(ValueError, match="needs the old values"):
        losses.value(torch.zeros(1), torch.zeros(1), clip=0.1)
