"""What an objective accepts, what it refuses and says of it, and what it needs of the learner."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter

from fedasync.rl.objective import Loss, Objective

from .loss_cases import terms


def test_the_default_is_grpo_with_ppos_clip() -> None:
    objective = Objective()
    assert (objective.loss, objective.advantages, objective.aggregation) == ("ppo", "grpo", "token")
    assert (objective.option("clip_low"), objective.option("clip_high")) == (0.2, 0.2)
    assert objective.needs_proximal
    assert not objective.needs_values
    assert not objective.needs_versions


@pytest.mark.parametrize("loss", get_args(Loss))
def test_every_loss_stands_by_itself(loss: Any) -> None:
    of = terms([[-1.0, -2.0]], [[-1.1, -2.2]], [[1, -1]], [[-1.05, -2.1]])
    found = Objective(loss).token_losses(of)
    assert found.losses.shape == (1, 2)
    assert found.losses.isfinite().all()


def test_presets_are_plain_values_of_the_decoupled_loss() -> None:
    of = terms([[-1.0, -2.0, -0.5]], [[-1.5, -1.0, -1.4]], [[1, -1, 1]], [[-1.05, -2.1, -0.6]])
    for preset, plain in [
        (Objective("tis"), Objective("decoupled", weight_cap=2.0)),
        (Objective("tis_sequence"), Objective("decoupled", weight="product", weight_cap=2.0)),
        (Objective("icepop"), Objective("decoupled", mask="token", mask_low=0.5, mask_high=5.0)),
        (
            Objective("sequence_mask", mask="product"),
            Objective("decoupled", weight="none", mask="product", mask_low=0.5, mask_high=2.0),
        ),
        (Objective("uncorrected"), Objective("decoupled", weight="none")),
    ]:
        assert preset.token_losses(of).losses.equal(plain.token_losses(of).losses), preset


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "grpo"}, "objective: loss must be 'ppo' or .* got 'grpo'"),
        ({"loss": "coupled", "weight_cap": 5.0}, "weight_cap = 5.0 says nothing with loss = 'coupled'.*count it twice"),
        ({"loss": "cispo", "weight": "token"}, "would count it twice; leave it out, or choose 'decoupled' or"),
        ({"loss": "uncorrected", "mask": "token"}, "'uncorrected': it has no behaviour weight"),
        ({"loss": "topr", "proximal": "recompute"}, "'topr': it looks at π and μ only"),
        ({"loss": "topr", "clip_high": 0.2}, "clip_high = 0.2 says nothing with loss = 'topr'"),
        ({"m2_bound": 0.1}, "or choose 'm2po'"),
        ({"loss": "decoupled", "mask_high": 2.0}, "mask_high = 2.0 says nothing with mask = 'none'"),
        (
            {"loss": "decoupled", "weight": "none", "weight_cap": 2.0},
            "weight_cap = 2.0 says nothing with weight = 'none'",
        ),
        ({"loss": "decoupled", "mask": "token"}, "mask = 'token' needs mask_low or mask_high, got neither"),
        ({"loss": "sequence_mask", "mask": "token"}, "must be 'geometric' or 'product' with loss = 'sequence_mask'"),
        (
            {"loss": "decoupled", "weight_floor": 3.0, "weight_cap": 2.0},
            "weight_floor must be ≤ weight_cap, got 3 and 2",
        ),
        ({"loss": "icepop", "mask_high": 0.1}, "mask_low must be ≤ mask_high, got 0.5 and 0.1"),
        ({"loss": "tis", "proximal": "behaviour"}, "makes every behaviour weight 1"),
        ({"loss": "decoupled", "proximal": "behaviour", "weight": "token"}, "weight and mask say nothing"),
        ({"gamma": 0.9}, "gamma is for advantages = 'gae', got 'grpo'"),
        ({"value_clip": 0.2}, "value_clip is for advantages = 'gae'"),
        ({"advantages": "rloo", "std": "sample"}, "std is for advantages = 'grpo' or normalise = 'batch'"),
        ({"aggregate": "constant"}, "constant_tokens and aggregate = 'constant' go together, got None and 'constant'"),
        ({"constant_tokens": 4}, "go together, got 4 and None"),
        ({"clip_low": 1.5}, "clip_low must be a finite number ≥ 0 and ≤ 1, got 1.5"),
        ({"dual_clip": 1.0}, "dual_clip must be a finite number > 1, got 1.0"),
        ({"max_token_staleness": -1}, "max_token_staleness must be an integer ≥ 0, got -1"),
        ({"entropy_bonus": float("nan")}, "entropy_bonus must be a finite number ≥ 0, got nan"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be a finite number ≥ 0, got -1.0"),
        ({"kl_estimator": "k3"}, "kl_estimator = 'k3' says nothing with kl_coefficient = 0"),
        ({"kl_in": "reward"}, "kl_in = 'reward' says nothing with kl_coefficient = 0"),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, "a group's deviation divides kl_coefficient away"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_estimator = 'k1' in the loss has a gradient whose mean is"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k4"}, "kl_estimator must be 'k1' or 'k2' or 'k3', got 'k4'"),
        ({"missing": "zero"}, "missing must be 'neutral' or 'mask', got 'zero'"),
    ],
)
def test_what_says_nothing_or_too_much_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        Objective(**given)
    assert "\n" not in str(found.value)


def test_it_is_read_strictly_from_a_configuration() -> None:
    adapter = TypeAdapter(Objective)
    told = {"loss": "decoupled", "weight_cap": 5.0, "mask": "geometric", "mask_high": 2.0, "max_token_staleness": 3}
    assert adapter.validate_json(json.dumps(told), strict=True) == Objective(**told)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_cap"):
        adapter.validate_json('{"loss": "decoupled", "weight_cap": "5"}', strict=True)
    assert hash(Objective()) == hash(Objective())


@pytest.mark.parametrize(
    ("objective", "proximal", "versions", "selection", "values"),
    [
        (Objective("coupled"), False, False, False, False),
        (Objective("decoupled"), True, False, False, False),
        (Objective("decoupled", proximal="loglinear"), False, True, False, False),
        (Objective("ppo", proximal="behaviour", max_token_staleness=2), False, True, False, False),
        (Objective("m2po"), False, False, True, False),
        (Objective("cispo", advantages="gae"), False, False, False, True),
    ],
)
def test_what_the_learner_must_give(
    objective: Objective, proximal: bool, versions: bool, selection: bool, values: bool
) -> None:
    assert objective.needs_proximal == proximal
    assert objective.needs_versions == versions
    assert objective.needs_selection == selection
    assert objective.needs_values == values


def test_what_was_not_given_is_missed_by_name() -> None:
    of = terms([[-1.0]], [[-1.0]], [[1]])
    with pytest.raises(ValueError, match="loss = 'decoupled' needs the proximal policy's log-probabilities, got none"):
        Objective("decoupled").token_losses(of)
    with pytest.raises(ValueError, match="need token_versions and version"):
        Objective("coupled", max_token_staleness=1).token_losses(of)
    with pytest.raises(ValueError, match=r"entropy_bonus = 0\.1 needs the entropy"):
        Objective("coupled", entropy_bonus=0.1).token_losses(of)
    with pytest.raises(ValueError, match=r"kl_coefficient = 0\.1 needs the reference policy's log-probabilities"):
        Objective("coupled", kl_coefficient=0.1).token_losses(of)


def test_a_clip_that_cannot_act_is_told_of() -> None:
    for loss in ("uncorrected", "decoupled", "tis", "icepop", "gspo"):
        told = Objective(loss).warning(minibatches=1, epochs=1)
        assert told is not None
        assert f"loss = '{loss}' with one optimiser step per version" in told
        assert ("only the behaviour weight" in told) == (loss in ("decoupled", "tis", "icepop"))
        assert Objective(loss).warning(minibatches=2, epochs=1) is None
        assert Objective(loss).warning(minibatches=1, epochs=2) is None
    for loss in ("ppo", "coupled", "cispo", "topr", "m2po", "reinforce", "dppo"):
        assert Objective(loss).warning(minibatches=1, epochs=1) is None
    assert Objective("decoupled", proximal="behaviour").warning(1, 1) is None


def test_the_warning_is_right() -> None:
    """With one step, no clip changes a gradient."""
    pi = [[-1.0, -2.0]]
    narrow, wide = (
        Objective("decoupled", clip_low=each, clip_high=each).token_losses(terms(pi, [[-3.0, -1.0]], [[1, -1]], pi))
        for each in (0.01, 0.9)
    )
    assert narrow.losses.equal(wide.losses)
    assert narrow.stats["clipped_share"] == 0


def test_entropy_is_rewarded() -> None:
    of = terms([[-1.0, -2.0]], [[-1.0, -2.0]], [[0, 0]], [[-1.0, -2.0]], entropy=torch.tensor([[0.5, 2.0]]))
    assert Objective(entropy_bonus=0.1).token_losses(of).losses.tolist()[0] == pytest.approx([-0.05, -0.2])
