"""How tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from fedasync.core.bounds import check_integer, check_real


@dataclass(frozen=True)
class Sampling:
    """``[sampling]``: temperature, the most tokens an answer generates, and what of the distribution is drawn from.

    Log-probabilities are those of the whole distribution at this temperature, behaviour's and the trainer's alike.
    ``top_k`` and ``top_p`` draw from a part of it only, so that importance ratios are off by the mass that is kept:
    whoever sets them is warned.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_integer("sampling: max_new_tokens", self.max_new_tokens, 1)
        check_real("sampling: temperature", self.temperature, 0, above=True)
        check_real("sampling: top_p", self.top_p, 0, 1, above=True)
        if self.top_k is not None:
            check_integer("sampling: top_k", self.top_k, 1)

    @property
    def warning(self) -> str | None:
        """Why ratios of what is drawn so are biased; None where they are not."""
        cut = [f"top_k = {self.top_k}"] * (self.top_k is not None) + [f"top_p = {self.top_p:g}"] * (self.top_p < 1)
        if not cut:
            return None
        return (
            f"sampling: {' and '.join(cut)} draws from a part of the distribution, and log-probabilities are of all "
            "of it: every importance ratio is off by the mass that is kept; leave it out to train without that bias"
        )
