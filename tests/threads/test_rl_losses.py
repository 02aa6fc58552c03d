"""Threads about losses of reinforcement learning on rollouts of another policy.

The number in a test's name is that of the public thread; docs/threads.md has the table.
"""

from __future__ import annotations

from math import log, nan

import pytest
import torch

from fedasync.rl.advantages import advantages
from fedasync.rl.denominators import token_weights
from fedasync.rl.objective import Estimator, Loss, Objective
from fedasync.rl.partial_groups import AllowShort
from fedasync.rl.sampling import Sampling

from ..rl.loss_cases import group, logs, played, tensor, terms, trajectory

MU, PROXIMAL, PI = logs([0.5, 0.2, 0.4]), logs([0.4, 0.3, 0.1]), logs([0.5, 0.27, 0.09])


# -- ratios ------------------------------------------------------------------------------------------------------


def test_slime_179_the_behaviour_weight_is_the_proximal_policys_not_the_current_ones() -> None:
    """The weight used the current log-probability for that of the beginning of the step."""
    for loss in ("decoupled", "tis"):
        first, again = (
            played(Objective(loss, clip_low=0.9, clip_high=9.0), terms(pi, MU, [[1] * 3], PROXIMAL))
            for pi in (PROXIMAL, PI)
        )
        weights = [-each for each in first[0]]
        assert weights == pytest.approx([0.8, 1.5, 0.25])
        ratios = [1.25, 0.9, 0.9]
        assert [-each for each in again[0]] == pytest.approx([w * r for w, r in zip(weights, ratios, strict=True)])


def test_xtuner_2003_expired_tokens_are_told_from_fresh_ones_of_the_same_answer() -> None:
    """An answer of tokens of versions 1 to 5 was kept or dropped as a whole."""
    versions = torch.tensor([[1, 2, 3, 4, 5]])
    of = terms([[-1.0] * 5], [[-1.0] * 5], [[1] * 5], token_versions=versions, version=5)
    _, gradient, found = played(Objective("coupled", max_token_staleness=2), of)
    assert gradient == [0, 0, -1, -1, -1]
    assert found.counted.all(), "and divided by all five"
    assert found.stats["rejected_share"] == pytest.approx(0.4)


@pytest.mark.parametrize("tokens", [1, 10, 100])
def test_trl_5815_a_geometric_mean_does_not_depend_on_the_length_and_a_product_does(tokens: int) -> None:
    """A sum where a mean was meant: the mean ratio fell from 0.993 to 0.569 on the same data."""
    drift = log(0.993)
    of = terms([[-1.0] * tokens], [[-1.0 - drift] * tokens], [[1] * tokens], [[-1.0] * tokens])
    mean = played(Objective("decoupled", weight="geometric"), of)
    product = played(Objective("decoupled", weight="product"), of)
    assert mean[0] == pytest.approx([-0.993] * tokens)
    assert product[0] == pytest.approx([-(0.993**tokens)] * tokens)
    kept = played(Objective("sequence_mask"), of)[2].stats["rejected_share"]
    assert kept == 0, "within 0.99 and 1.01, at every length"
    rejected = played(Objective("sequence_mask", mask="product"), of)[2].stats["rejected_share"]
    assert rejected == (tokens == 100), "a product takes long answers out"


def test_trl_6789_what_is_cut_from_the_distribution_biases_every_ratio_and_whoever_cuts_is_warned() -> None:
    """With top-k or top-p the engine's probabilities are of the part that is kept (#7269)."""
    whole = [[log(0.5), log(0.3)]]
    part = [[log(0.5 / 0.8), log(0.3 / 0.8)]]
    biased = Objective("coupled").token_losses(terms(whole, part, [[1, 1]])).stats
    assert (biased["ratio_min"], biased["ratio_max"]) == (pytest.approx(0.8), pytest.approx(0.8))
    right = Objective("coupled").token_losses(terms(whole, whole, [[1, 1]])).stats
    assert right["ratio_min"] == right["ratio_max"] == 1
    assert Sampling(8).warning is None
    for cut in (Sampling(8, top_k=2), Sampling(8, top_p=0.8)):
        assert cut.warning is not None
        assert "every importance ratio is off by the mass that is kept" in cut.warning


@pytest.mark.parametrize("loss", ["coupled", "decoupled", "tis", "icepop", "sequence_mask", "cispo", "topr", "gspo"])
@pytest.mark.parametrize("missing", [nan, float("-inf")])
def test_trl_6297_a_missing_log_probability_makes_no_nan_of_the_loss(loss: Loss, missing: float) -> None:
    """None or NaN of the engine became the ratio, and the loss of the whole batch (#5413)."""
    told = [[missing, *MU[0][1:]]]
    of = terms(PI, told, [[1, 1, -1]], PROXIMAL)
    neutral, gradient, found = played(Objective(loss), of)
    assert torch.tensor([neutral, gradient]).isfinite().all()
    assert found.stats["missing_tokens"] == 1
    masked, none, found = played(Objective(loss, missing="mask"), of)
    assert masked[0] == none[0] == 0
    assert found.counted.all()
    complete = [[PROXIMAL[0][0] if loss not in ("coupled", "cispo", "topr") else PI[0][0], *MU[0][1:]]]
    assert neutral == pytest.approx(played(Objective(loss), terms(PI, complete, [[1, 1, -1]], PROXIMAL))[0])


def test_trl_5231_ratios_are_told_as_they_were_before_the_cap_and_how_many_it_changed() -> None:
    """Only ratios that were truncated already were logged, and looked well."""
    ratios = [0.5, 1.0, 1.0, 40.0]
    of = terms([[-1.0] * 4], [[-1.0 - log(each) for each in ratios]], [[1] * 4], [[-1.0] * 4])
    stats = Objective("tis").token_losses(of).stats
    assert (stats["ratio_min"], stats["ratio_mean"], stats["ratio_max"]) == pytest.approx((0.5, 10.625, 40))
    assert stats["modified_share"] == stats["truncated_share"] == 0.25
    masked = Objective("icepop").token_losses(of).stats
    assert (masked["ratio_max"], masked["rejected_share"], masked["modified_share"]) == pytest.approx((40, 0.25, 0.25))


# -- short groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "survivors"),
    [("grpo", [1.154699, -0.577349]), ("dr_grpo", [2 / 3, -1 / 3]), ("rloo", [1, -0.5]), ("opo", [2 / 3, -1 / 3])],
)
def test_labs_molt_48_the_baseline_of_a_short_group_is_that_of_the_answers_that_came(
    estimator: Estimator, survivors: list[float]
) -> None:
    """Merged, then reverted (#111), as in AReaL (#1559, #1416): whether a group may be short is a policy
    (``AllowShort``), and what it does to advantages is told."""
    assert AllowShort().least == 2, "of which one answer alone, that could not be compared, is none"
    came = [trajectory(2, 1.0), trajectory(2), trajectory(2)]
    found = advantages([group(*came, asked=4)], Objective(advantages=estimator))
    assert [each[-1] for each in found.values[0]] == pytest.approx([*survivors, survivors[1]], abs=1e-5)
    assert (found.stats["groups_short"], found.stats["answers_missing"]) == (1, 1)


def test_labs_molt_48_the_denominator_is_of_the_tokens_that_came() -> None:
    full, short = (torch.ones(answers, 2, dtype=torch.bool) for answers in (4, 3))
    for how in ("token", "sequence"):
        assert token_weights(full, how).tolist() == [[1 / 8] * 2] * 4
        assert token_weights(short, how).sum().item() == pytest.approx(1)
    assert token_weights(short, "constant", 2).tolist() == pytest.approx(tensor([[1 / 6] * 2] * 3).float())


def test_areal_1559_an_answer_that_is_left_alone_trains_nothing_and_is_counted() -> None:
    found = advantages([group(trajectory(3, 1.0), asked=8)], Objective())
    assert not found.values[0][0].any()
    assert (found.stats["groups_of_one"], found.stats["answers_missing"]) == (1, 7)
