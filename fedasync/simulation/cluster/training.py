"""How long a trainer's step takes, in four ways to say it."""

from __future__ import annotations

from dataclasses import dataclass

from fedasync.core.bounds import check_integer, check_real, check_type
from fedasync.simulation.cluster.hardware import Gpu, LanguageModel

WAYS = ("mfu", "tokens_per_second_per_gpu", "step_s", "seconds_per_token")


@dataclass(frozen=True)
class TrainerCost:
    """A step on so many tokens and sequences: ``fixed_s + token_s·Σs + square_s·Σs² + sequence_s·n`` seconds."""

    fixed_s: float
    token_s: float = 0.0
    square_s: float = 0.0
    sequence_s: float = 0.0

    def seconds(self, tokens: float, squares: float, sequences: int) -> float:
        """Of a step on ``sequences`` of Σ length = ``tokens`` and Σ length² = ``squares``, prompts included."""
        return self.fixed_s + self.token_s * tokens + self.square_s * squares + self.sequence_s * sequences


@dataclass(frozen=True)
class Trainer:
    """Time of a step (one version), said in exactly one of four ways:

    * ``mfu``: the share of the GPUs' FLOP/s that a step makes use of. A token costs 6·N (forward 2·N, backward twice
      that), and 2·N more where ``recompute_logprobs`` asks the weights before the step for log-probabilities. Causal
      attention adds 2·layers·size·s² a sequence to each 2·N·s. ``activation_recompute`` adds another forward pass, for
      an ``mfu`` that counts it (by its usual definition it does not).
    * ``tokens_per_second_per_gpu``: a rate of the whole step, all passes in it.
    * ``step_s``: whatever is trained.
    * ``seconds_per_token``, with or without ``seconds_per_sequence``: a fitted line, whatever the GPUs.

    Each step takes ``fixed_s`` more, and ``minibatch_s`` for each of its ``minibatches``. It begins ``latency_s`` after
    its groups are there and the trainer is free, which waits meanwhile: messages between processes. An evaluation takes
    the trainer ``evaluate_s``, where the run evaluates (``evaluate_every``). ``spread_s`` is the standard deviation of
    a step's time around all that (0: none); it is lognormal (ours), and drawn by version.
    """

    mfu: float | None = None
    tokens_per_second_per_gpu: float | None = None
    step_s: float | None = None
    seconds_per_token: float | None = None
    seconds_per_sequence: float = 0.0
    fixed_s: float = 0.0
    minibatches: int = 1
    minibatch_s: float = 0.0
    recompute_logprobs: bool = True
    activation_recompute: bool = False
    latency_s: float = 0.0
    evaluate_s: float = 0.0
    spread_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("recompute_logprobs", "activation_recompute"):
            check_type(f"trainer: {name}", getattr(self, name), bool, "true or false")
        given = [name for name in WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"trainer: exactly one of {', '.join(WAYS)} says how long a step takes, got {got}")
        if self.mfu is not None:
            check_real("trainer: mfu", self.mfu, 0, 1, above=True)
        if self.tokens_per_second_per_gpu is not None:
            check_real("trainer: tokens_per_second_per_gpu", self.tokens_per_second_per_gpu, 0, above=True)
        for name in (
            "step_s",
            "seconds_per_token",
            "seconds_per_sequence",
            "fixed_s",
            "minibatch_s",
            "latency_s",
            "evaluate_s",
            "spread_s",
        ):
            if getattr(self, name) is not None:
                check_real(f"trainer: {name}", getattr(self, name), 0)
        check_integer("trainer: minibatches", self.minibatches, 1)
        if self.seconds_per_sequence and self.seconds_per_token is None:
            raise ValueError(f"trainer: seconds_per_sequence goes with seconds_per_token, got {given[0]}")
        if self.mfu is None and (self.activation_recompute or not self.recompute_logprobs):
            name = "activation_recompute" if self.activation_recompute else "recompute_logprobs"
            raise ValueError(f"trainer: {name} counts the passes of a step timed by mfu; {given[0]} holds them all")

    def cost(self, gpu: Gpu, model: LanguageModel, gpus: int) -> TrainerCost:
        """What a step costs on so many GPUs."""
        check_integer("training_gpus", gpus, 1)
        fixed_s = self.fixed_s + self.minibatches * self.minibatch_s
        if self.step_s is not None:
            return TrainerCost(fixed_s + self.step_s)
        if self.tokens_per_second_per_gpu is not None:
            return TrainerCost(fixed_s, token_s=1 / (self.tokens_per_second_per_gpu * gpus))
        if self.mfu is not None:
            passes = 3 + self.recompute_logprobs + self.activation_recompute
            flops = gpus * gpu.flops_per_second * self.mfu
            return TrainerCost(
                fixed_s,
                token_s=passes * model.flops_per_token / flops,
                square_s=passes * model.flops_per_square / flops,
            )
        return TrainerCost(fixed_s, token_s=self.seconds_per_token or 0.0, sequence_s=self.seconds_per_sequence)
