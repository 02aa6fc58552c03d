"""Terms and groups from short lists, and the losses and gradients of an objective on them, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedasync.rl.objective import Objective
from fedasync.rl.terms import Terms, TokenLosses
from fedasync.rl.trajectory import Finish, Group, Trajectory

torch.set_num_threads(1)

Rows = Sequence[Sequence[float]]


def tensor(rows: Rows) -> Tensor:
    """[N, T] in float64, short rows padded with NaN: what is not counted must not be looked at."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[float("nan")] * (width - len(row))] for row in rows], dtype=torch.float64)


def terms(pi: Rows, mu: Rows, advantages: Rows, proximal: Rows | None = None, **more: Any) -> Terms:
    """Terms of log-probabilities; every entry of ``pi`` is counted."""
    log_probs = tensor(pi)
    mask = torch.arange(log_probs.shape[1]) < torch.tensor([[len(row)] for row in pi])
    return Terms(
        log_probs.requires_grad_(),
        tensor(mu),
        tensor(advantages),
        mask,
        None if proximal is None else tensor(proximal),
        **more,
    )


def logs(*rows: Sequence[float]) -> list[list[float]]:
    """Logarithms of probabilities."""
    return [np.log(row).tolist() for row in rows]


def played(
    objective: Objective, of: Terms, weights: Tensor | None = None
) -> tuple[list[float], list[float], TokenLosses]:
    """Losses and gradients with respect to log π of the counted tokens, in their order; of the sum of the losses, or of
    their sum with ``weights``."""
    of.log_probs.grad = None
    found = objective.token_losses(of)
    (found.losses * (1 if weights is None else weights)).sum().backward()
    gradient = of.log_probs.grad
    assert gradient is not None
    assert (gradient[~of.mask] == 0).all()
    return found.losses.detach()[of.mask].tolist(), gradient[of.mask].tolist(), found


def trajectory(
    tokens: int,
    reward: float = 0.0,
    *,
    prompt_tokens: int = 2,
    finish: Finish = "stop",
    version: int = 0,
    rewards: Sequence[float] | None = None,
    generated: Sequence[bool] | None = None,
) -> Trajectory:
    """``tokens`` generated tokens after a prompt, the reward after the last; or what ``generated``, ``rewards`` say."""
    chosen = np.array([False] * prompt_tokens + [True] * tokens if generated is None else generated)
    length = len(chosen)
    return Trajectory(
        np.arange(length, dtype=np.int64),
        chosen,
        np.where(chosen, -1, 0).astype(np.float32),
        np.where(chosen, version, -1).astype(np.int32),
        np.array([*[0.0] * (length - 1), reward] if rewards is None else rewards, np.float32),
        finish,
    )


def group(*answers: Trajectory, asked: int | None = None) -> Group:
    return Group(0, 0, 0, answers, len(answers) if asked is None else asked)
