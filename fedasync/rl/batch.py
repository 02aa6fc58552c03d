"""Trajectories as tensors: all answers of a step end to end, and rows of them filled up to their longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedasync.rl.trajectory import Trajectory


class Batch(NamedTuple):
    """N answers, filled up on the right to T tokens. What fills is not generated."""

    tokens: Tensor
    """[N, T] int64"""
    generated: Tensor
    """[N, T] bool"""
    behaviour: Tensor
    """[N, T]: log-probability under the policy that chose; NaN where the engine gave none, 0 where nobody chose."""
    versions: Tensor
    """[N, T] int64: the version that chose; −1 elsewhere."""
    observations: Tensor | None
    """[N, T + 1, d], of a control task; the last observation fills."""
    places: Tensor
    """[N, T] int64: where a token lies among all answers end to end; that of the row's last token fills."""


@dataclass(frozen=True)
class Answers:
    """All answers of a step, end to end."""

    lengths: NDArray[np.int64]
    """[N]"""
    tokens: Tensor
    """[tokens], as all below"""
    generated: Tensor
    behaviour: Tensor
    versions: Tensor
    observations: Tensor | None
    """[tokens + N, d]"""
    pad_token: int

    @property
    def starts(self) -> NDArray[np.int64]:
        """[N]: the place of each answer's first token."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def rows(self, chosen: Sequence[int]) -> Batch:
        """These answers, filled up to the longest of them. Raises ValueError for none."""
        import torch

        if not chosen:
            raise ValueError("batch: needs at least one answer")
        at = np.asarray(chosen, np.int64)
        lengths, starts = self.lengths[at], self.starts[at]
        column = np.arange(lengths.max())
        device = self.tokens.device
        places = torch.as_tensor(
            starts[:, None] + np.minimum(column, lengths[:, None] - 1), dtype=torch.long, device=device
        )
        real = torch.as_tensor(column < lengths[:, None], device=device)
        observations = None
        if self.observations is not None:
            seen = np.arange(lengths.max() + 1)
            first = starts + at  # each answer before it has one observation more than tokens
            chosen_seen = first[:, None] + np.minimum(seen, lengths[:, None])
            observations = self.observations[torch.as_tensor(chosen_seen, device=device)]
        return Batch(
            self.tokens[places].masked_fill_(~real, self.pad_token),
            self.generated[places] & real,
            self.behaviour[places].masked_fill_(~real, 0.0),
            self.versions[places].masked_fill_(~real, -1),
            observations,
            places,
        )


def answers_of(
    trajectories: Sequence[Trajectory],
    pad_token: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Answers:
    """Trajectories as tensors on a device, floats of ``dtype`` (None: float32).

    Raises ValueError where there are none, one is empty, or some have observations and others not.
    """
    import torch

    if not trajectories or any(len(each) == 0 for each in trajectories):
        raise ValueError("batch: needs at least one answer, and none without tokens")
    dtype = dtype or torch.float32
    seen: list[Any] = [each.observations for each in trajectories if each.observations is not None]
    if seen and len(seen) < len(trajectories):
        raise ValueError("batch: some answers have observations and others not")

    def column(name: str, kind: torch.dtype) -> Tensor:
        joined = np.concatenate([getattr(each, name) for each in trajectories])
        return torch.as_tensor(joined, dtype=kind, device=device)

    return Answers(
        np.array([len(each) for each in trajectories], np.int64),
        column("tokens", torch.long),
        column("generated", torch.bool),
        column("log_probs", dtype),
        column("versions", torch.long),
        torch.as_tensor(np.concatenate(seen), dtype=dtype, device=device) if seen else None,
        pad_token,
    )
