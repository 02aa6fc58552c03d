"""What is minimised: ``[objective]`` of a configuration, checked when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedasync.core.bounds import check_choice, check_integer, check_real

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.terms import Terms, TokenLosses

Loss = Literal[
    "ppo",
    "uncorrected",
    "coupled",
    "decoupled",
    "tis",
    "tis_sequence",
    "icepop",
    "sequence_mask",
    "cispo",
    "gspo",
    "topr",
    "m2po",
    "reinforce",
    "dppo",
]
Estimator = Literal["grpo", "dr_grpo", "rloo", "opo", "reward", "gae"]
Proximal = Literal["recompute", "loglinear", "linear", "behaviour"]
Level = Literal["token", "geometric", "product"]
"""A ratio of each token, or one of a whole sequence: the geometric mean, or the product, of its tokens' ratios."""
LevelOrNone = Literal["none", "token", "geometric", "product"]
Aggregate = Literal["token", "sequence", "constant"]
Std = Literal["sample", "population"]
Normalise = Literal["none", "batch"]
Missing = Literal["neutral", "mask"]
KlEstimator = Literal["k1", "k2", "k3"]
KlIn = Literal["loss", "reward"]

_CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
_PROXIMAL: dict[str, Any] = _CLIP | {"proximal": "recompute"}
_WEIGHT: dict[str, Any] = {
    "weight": "token",
    "weight_floor": None,
    "weight_cap": None,
    "mask": "none",
    "mask_low": None,
    "mask_high": None,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": _PROXIMAL,
    "uncorrected": _PROXIMAL,
    "coupled": _CLIP,
    "decoupled": _PROXIMAL | _WEIGHT,
    "tis": _PROXIMAL | _WEIGHT | {"weight_cap": 2.0},
    "tis_sequence": _PROXIMAL | _WEIGHT | {"weight": "product", "weight_cap": 2.0},
    "icepop": _PROXIMAL | _WEIGHT | {"mask": "token", "mask_low": 0.5, "mask_high": 5.0},
    "sequence_mask": _PROXIMAL | _WEIGHT | {"weight": "none", "mask": "geometric"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "gspo": _PROXIMAL | _WEIGHT | {"clip_low": 3e-4, "clip_high": 4e-4, "weight": "none"},
    "topr": {},
    "m2po": {"m2_bound": 0.04},
    "reinforce": {"clip_high": 0.02},
    "dppo": {"tv_bound": 0.2, "log_ratio_penalty": 1e-3},
}
"""What says something in each loss, and what it is there where it is not given."""
_SEQUENCE_MASK_BOUNDS = {
    "geometric": {"mask_low": 0.99, "mask_high": 1.01},
    "product": {"mask_low": 0.5, "mask_high": 2.0},
}
_BOUNDS_OF = {"weight_floor": "weight", "weight_cap": "weight", "mask_low": "mask", "mask_high": "mask"}
_ADVANTAGE_OPTIONS: dict[str, Any] = {
    "std": "sample",
    "std_epsilon": 1e-6,
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "value_coefficient": 0.5,
}
_CHOICES: dict[str, Any] = {
    "kl_in": KlIn,
    "kl_estimator": KlEstimator,
    "std": Std,
    "aggregate": Aggregate,
    "proximal": Proximal,
    "weight": LevelOrNone,
    "mask": LevelOrNone,
}
_REALS: dict[str, dict[str, Any]] = {
    "std_epsilon": {"low": 0},
    "gamma": {"low": 0, "high": 1},
    "gae_lambda": {"low": 0, "high": 1},
    "value_coefficient": {"low": 0},
    "value_clip": {"low": 0, "above": True},
    "clip_low": {"low": 0, "high": 1},
    "clip_high": {"low": 0},
    "dual_clip": {"low": 1, "above": True},
    "weight_floor": {"low": 0},
    "weight_cap": {"low": 0, "above": True},
    "mask_low": {"low": 0},
    "mask_high": {"low": 0, "above": True},
    "m2_bound": {"low": 0},
    "tv_bound": {"low": 0, "high": 1},
    "log_ratio_penalty": {"low": 0},
    "opsm_delta": {"low": 0},
}
_INTEGERS = {"constant_tokens": 1, "max_token_staleness": 0}


def _why_not(loss: str, name: str) -> str:
    if name not in _WEIGHT and name != "proximal":
        return ""
    if loss in ("ppo", "uncorrected"):
        return ": it has no behaviour weight"
    if name == "proximal":
        return ": it looks at π and μ only"
    return ": its ratio is π/μ, and a behaviour weight would count it twice"


@dataclass(frozen=True)
class Objective:
    """``[objective]``: the loss, the advantages in it, and what its sum is divided by.

    What is None is the constant of the paper behind the loss (see ``losses``); an option that says nothing in the
    chosen loss is refused. ``Objective()`` is GRPO with PPO's clip, for rollouts that are not stale.
    """

    loss: Loss = "ppo"
    """``ppo`` and ``uncorrected`` are the same numbers: a clip around the proximal policy, and no correction for who
    generated the tokens. The first name is meant for η = 0."""
    advantages: Estimator = "grpo"
    """How answers of a group are compared (``advantages.group_advantages``), or ``gae`` of each step's rewards."""
    std: Std | None = None
    """Of the group (``grpo``) and of the batch (``normalise``): divided by n − 1 ("sample", where None), or by n."""
    std_epsilon: float | None = None
    """1e-6 where None."""
    normalise: Normalise = "none"
    """``batch``: advantages less their mean, divided by their spread, over the generated tokens of the whole batch."""
    gamma: float | None = None
    gae_lambda: float | None = None
    """Of ``gae``; 1 where None."""
    value_coefficient: float | None = None
    """What the critic's loss is multiplied by; ½ where None."""
    value_clip: float | None = None
    """How far its values are from those of the beginning of the version before the clipped loss counts."""

    aggregate: Aggregate | None = None
    """Mean over tokens; mean over sequences of their tokens' means (GSPO's own); sum over sequences divided by
    ``constant_tokens`` (Dr. GRPO)."""
    constant_tokens: int | None = None

    clip_low: float | None = None
    clip_high: float | None = None
    """Ratios are clipped to [1 − ``clip_low``, 1 + ``clip_high``]."""
    dual_clip: float | None = None
    """For A < 0, the loss of a token is at most this × |A|."""
    proximal: Proximal | None = None
    """How log π_prox is had: by a forward pass, or from log μ and log π and their versions (A-3PO), or as log μ."""

    weight: LevelOrNone | None = None
    """The behaviour weight π_prox / μ that the loss is multiplied by: each token's, or one of its sequence."""
    weight_floor: float | None = None
    weight_cap: float | None = None
    mask: LevelOrNone | None = None
    """Which π_prox / μ must lie in [``mask_low``, ``mask_high``] for a token to be trained."""
    mask_low: float | None = None
    mask_high: float | None = None

    m2_bound: float | None = None
    """M2PO: the most that the mean of log-ratios² may be."""
    tv_bound: float | None = None
    log_ratio_penalty: float | None = None
    """DPPO: how far π − μ may go, and the weight of log² (π / μ)."""

    opsm_delta: float | None = None
    """Sequences with A < 0 are left out where mean(log μ − log π) is above this (off-policy sequence mask)."""
    max_token_staleness: int | None = None
    """Tokens that are older than this many versions are left out."""
    missing: Missing = "neutral"
    """Where the engine gave no log-probability: the behaviour's ratio is 1, or the token is left out."""
    entropy_bonus: float = 0.0

    kl_coefficient: float = 0.0
    """β of KL(π ‖ π_ref), which keeps the policy near the one that the run began with (version 0)."""
    kl_in: KlIn | None = None
    """β · KL is added to each token's loss (Shao et al. 2024, GRPO, Eq. 3; where None), or taken from its reward, with
    μ for π (Ouyang et al. 2022)."""
    kl_estimator: KlEstimator | None = None
    """See ``diagnostics.Divergences``; k3 in the loss and k1 in the reward where None."""

    def __post_init__(self) -> None:
        check_choice("objective: loss", self.loss, Loss)
        check_choice("objective: advantages", self.advantages, Estimator)
        check_choice("objective: normalise", self.normalise, Normalise)
        check_choice("objective: missing", self.missing, Missing)
        for name in ("entropy_bonus", "kl_coefficient"):
            check_real(f"objective: {name}", getattr(self, name), 0)
        for name, choices in _CHOICES.items():
            if getattr(self, name) is not None:
                check_choice(f"objective: {name}", getattr(self, name), choices)
        for name, limits in _REALS.items():
            if getattr(self, name) is not None:
                check_real(f"objective: {name}", getattr(self, name), **limits)
        for name, least in _INTEGERS.items():
            if getattr(self, name) is not None:
                check_integer(f"objective: {name}", getattr(self, name), least)
        self._refuse_what_says_nothing()
        self._check_bounds()

    def _refuse_what_says_nothing(self) -> None:
        for name in dict.fromkeys(name for options in _OPTIONS.values() for name in options):
            if getattr(self, name) is not None and name not in _OPTIONS[self.loss]:
                losses = [loss for loss, options in _OPTIONS.items() if name in options]
                why = _why_not(self.loss, name)
                raise ValueError(
                    f"objective: {name} = {getattr(self, name)!r} says nothing with loss = {self.loss!r}{why}; leave it"
                    f" out, or choose {' or '.join(map(repr, losses))}"
                )
        for name in ("kl_in", "kl_estimator"):
            if getattr(self, name) is not None and not self.kl_coefficient:
                raise ValueError(
                    f"objective: {name} = {getattr(self, name)!r} says nothing with kl_coefficient = 0; leave it out, "
                    "or give a coefficient above 0"
                )
        if self.kl_estimator == "k1" and self.kl_in != "reward":
            raise ValueError(
                "objective: kl_estimator = 'k1' in the loss has a gradient whose mean is 0; 'k2' or 'k3', or kl_in = "
                "'reward', would do"
            )
        if self.kl_in == "reward" and self.advantages == "grpo":
            raise ValueError(
                "objective: kl_in = 'reward' with advantages = 'grpo': a group's deviation divides kl_coefficient away "
                "where rewards are equal; kl_in = 'loss', or advantages = 'dr_grpo', 'rloo', 'opo' or 'gae', would do"
            )
        if self.advantages != "gae":
            for name in ("gamma", "gae_lambda", "value_coefficient", "value_clip"):
                if getattr(self, name) is not None:
                    raise ValueError(f"objective: {name} is for advantages = 'gae', got {self.advantages!r}")
        if self.advantages != "grpo" and self.normalise == "none":
            for name in ("std", "std_epsilon"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"objective: {name} is for advantages = 'grpo' or normalise = 'batch', got {self.advantages!r} "
                        "and 'none': nothing is divided by a spread"
                    )
        if (self.aggregate == "constant") != (self.constant_tokens is not None):
            raise ValueError(
                "objective: constant_tokens and aggregate = 'constant' go together, got "
                f"{self.constant_tokens!r} and {self.aggregate!r}"
            )

    def _check_bounds(self) -> None:
        floor, cap = self.option("weight_floor"), self.option("weight_cap")
        low, high = self.option("mask_low"), self.option("mask_high")
        for name, kind in _BOUNDS_OF.items():
            if self.option(kind) == "none" and getattr(self, name) is not None:
                raise ValueError(
                    f"objective: {name} = {getattr(self, name)!r} says nothing with {kind} = 'none'; "
                    f"{kind} = 'token' or 'geometric' or 'product' would do"
                )
        if self.loss == "sequence_mask" and self.option("mask") not in ("geometric", "product"):
            raise ValueError(
                f"objective: mask must be 'geometric' or 'product' with loss = 'sequence_mask', got {self.mask!r}"
            )
        if self.option("mask") not in (None, "none") and low is None and high is None:
            raise ValueError(f"objective: mask = {self.mask!r} needs mask_low or mask_high, got neither")
        for under, over, least, most in (
            ("weight_floor", "weight_cap", floor, cap),
            ("mask_low", "mask_high", low, high),
        ):
            if least is not None and most is not None and least > most:
                raise ValueError(f"objective: {under} must be ≤ {over}, got {least:g} and {most:g}")
        if self.proximal == "behaviour" and self.weighs and self.loss != "decoupled":
            raise ValueError(
                f"objective: proximal = 'behaviour' makes every behaviour weight 1, so loss = {self.loss!r} corrects "
                "nothing; 'recompute' or 'loglinear' or 'linear' would do"
            )
        if self.proximal == "behaviour" and any(getattr(self, name) is not None for name in _WEIGHT):
            raise ValueError(
                "objective: proximal = 'behaviour' makes every behaviour weight 1, so weight and mask say nothing; "
                "leave them out"
            )

    def option(self, name: str) -> Any:
        """What is in force: the value given, or the loss's own constant; None where it says nothing."""
        given = getattr(self, name)
        if given is not None:
            return given
        if name in _ADVANTAGE_OPTIONS:
            return _ADVANTAGE_OPTIONS[name]
        if name == "kl_in":
            return "loss"
        if name == "kl_estimator":
            return "k1" if self.kl_in == "reward" else "k3"
        if self.loss == "sequence_mask" and name in ("mask_low", "mask_high"):
            return _SEQUENCE_MASK_BOUNDS.get(self.option("mask"), {}).get(name)
        kind = _BOUNDS_OF.get(name)
        if kind is not None and getattr(self, kind) == "none":
            return None
        return _OPTIONS[self.loss].get(name)

    @property
    def weighs(self) -> bool:
        """A weight or a mask looks at π_prox / μ."""
        return any(self.option(name) not in (None, "none") for name in ("weight", "mask"))

    @property
    def aggregation(self) -> Aggregate:
        """What ``denominators.token_weights`` takes."""
        return self.aggregate or ("sequence" if self.loss == "gspo" else "token")

    @property
    def needs_proximal(self) -> bool:
        """``Terms.proximal`` must be given: a forward pass before the version's first optimiser step."""
        return bool(self.option("proximal") == "recompute")

    @property
    def needs_versions(self) -> bool:
        """``Terms.token_versions`` and ``Terms.version`` must be given."""
        return self.max_token_staleness is not None or self.option("proximal") in ("loglinear", "linear")

    @property
    def needs_selection(self) -> bool:
        """``Terms.selected`` must be given where a minibatch is cut into micro-batches."""
        return self.loss == "m2po"

    @property
    def needs_reference(self) -> bool:
        """Log-probabilities under version 0 are needed: ``Terms.reference`` where ``kl_in`` is the loss."""
        return self.kl_coefficient > 0

    @property
    def needs_values(self) -> bool:
        """Advantages are told from a critic's values, which are trained along (``value_losses``)."""
        return self.advantages == "gae"

    def selected(self, behaviour: Tensor, proximal: Tensor, mask: Tensor) -> Tensor | None:
        """Which tokens of a whole minibatch the loss keeps, bool [N, T] (M2PO); None where it keeps all."""
        from fedasync.rl.token_losses import selected

        return selected(self, behaviour, proximal, mask)

    def token_losses(self, terms: Terms) -> TokenLosses:
        """The loss of each token. Raises ValueError where a tensor that the objective needs is missing."""
        from fedasync.rl.token_losses import token_losses

        return token_losses(self, terms)

    def value_losses(self, values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor) -> Tensor:
        """The critic's loss of each token [N, T], coefficient included; weights are those of the tokens."""
        from fedasync.rl.token_losses import value_losses

        return value_losses(self, values, returns, old_values, mask)

    def warning(self, minibatches: int, epochs: int) -> str | None:
        """Why the clip cannot act with so few optimiser steps per version; None where it can.

        Nor where it need not: ``ppo`` is meant for tokens of the present version.
        """
        if self.loss == "ppo" or minibatches * epochs > 1 or self.option("proximal") != "recompute":
            return None
        rest = "only the behaviour weight and mask correct anything" if self.weighs else "nothing corrects stale tokens"
        return (
            f"objective: loss = {self.loss!r} with one optimiser step per version: π/π_prox is exactly 1, so its clip "
            f"cannot act and {rest}; minibatches or epochs of 2 and more, or loss = 'coupled', let it act"
        )
