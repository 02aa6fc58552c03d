"""How a token is chosen: uniform numbers by name, and the inverse of the distribution's cumulative sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedasync.rl.engine import Request
from fedasync.rl.sampling import Sampling
from fedasync.streams import Draws

if TYPE_CHECKING:
    from torch import Tensor


class Noise:
    """The uniform number of a token: a function of (seed, prompt, epoch, index, position) alone."""

    def __init__(self, seed: int) -> None:
        self._draws = Draws(seed, "tokens")

    def numbers(self, requests: Iterable[Request], positions: Iterable[int]) -> NDArray[np.float64]:
        """In the open interval (0, 1): one for each request's token at its position."""
        named = [(each.prompt, each.epoch, each.index, at) for each, at in zip(requests, positions, strict=True)]
        return self._draws.uniform(*np.array(named, np.int64).T)


def draw(logits: Tensor, sampling: Sampling, numbers: NDArray[np.float64] | None) -> tuple[list[int], list[float]]:
    """Choices from logits [n, choices], and their log-probabilities under the whole distribution at the temperature.

    A row's choice is the first whose cumulative probability reaches its number; without ``numbers`` it is the most
    likely one. Computed in float64, so that no token of a large vocabulary is lost. Raises ValueError where a
    probability is not a number.
    """
    log_probs = torch.log_softmax(logits.double() / sampling.temperature, -1)
    if numbers is None:
        chosen = log_probs.argmax(-1, keepdim=True)
    else:
        cumulative = drawn_from(log_probs.exp(), sampling).cumsum(-1)
        reached = torch.from_numpy(numbers).to(logits.device)[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, reached).clamp_(max=logits.shape[-1] - 1)
    found: list[float] = log_probs.gather(-1, chosen)[:, 0].tolist()
    if not sum(found) > -np.inf:
        raise ValueError("the policy's probabilities are not numbers (NaN): its weights have diverged")
    return chosen[:, 0].tolist(), found


def drawn_from(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [n, choices] with 0 for what is not drawn from: what is not among the ``top_k`` likeliest, and
    what the likeliest before it already make up ``top_p`` without."""
    if sampling.top_k is None and sampling.top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = ordered.cumsum(-1) - ordered < sampling.top_p
    if sampling.top_k is not None:
        keep[:, sampling.top_k :] = False
    return probabilities * torch.zeros_like(keep).scatter_(-1, order, keep)
