"""Central differential privacy of a buffer: Gaussian noise on the sum of clipped contributions.

The server adds N(0, (z·C)²) to every coordinate of the sum, C the norm that contributions are clipped to and z the
noise multiplier (McMahan et al. 2018). Staleness weights ≤ 1 keep the sensitivity C. What has been spent is computed
from the log of a run (``fedasync.runs.privacy``): arrivals of an asynchronous run are not a Poisson sample, so nothing
is gained by subsampling, and what counts is how often a client's contributions were used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.update import Inputs, blocks
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Privacy:
    """Noise of ``noise_multiplier`` times the clipping norm on a buffer's sum; ``delta`` is what ε is told for.

    Noise 0 adds nothing. The default δ is ours: below 1/N for up to a hundred thousand clients.
    """

    noise_multiplier: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_real("privacy: noise_multiplier", self.noise_multiplier, 0)
        check_real("privacy: delta", self.delta, 0, 1, above=True, below=True)

    def add(self, mean: Tensor, count: int, clip_norm: float, inputs: Inputs) -> None:
        """Add the noise to the mean [P] of ``count`` contributions, in place: the sum's, divided by the count.

        Seed and version are the two words of a counter-based generator's key (Salmon et al. 2011), so that no two
        versions and no two seeds share any noise. (torch's own generator on the CPU looks at 32 bits of a seed.)
        """
        if not self.noise_multiplier:
            return
        import numpy as np
        import torch

        random = np.random.Generator(np.random.Philox(key=np.array([inputs.seed, inputs.version], np.uint64)))
        dtype = np.float64 if mean.dtype == torch.float64 else np.float32
        for (block,) in blocks(mean):
            noise = torch.from_numpy(random.standard_normal(block.numel(), dtype))
            block.add_(noise.to(mean.device), alpha=self.noise_multiplier * clip_norm / count)
