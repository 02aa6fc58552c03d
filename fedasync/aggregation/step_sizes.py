"""What rules need that tell the mean gradient of local training from the distance travelled."""

from __future__ import annotations

from fedasync.aggregation.update import Input


class UnknownStepSizesError(RuntimeError):
    """A rule needs the sizes of the local steps, and a contribution does not say them."""


def step_size_sum(rule: str, x: Input) -> float:
    """The contribution's ``step_size_sum``. Raises UnknownStepSizesError where it has none."""
    if x.step_size_sum is None:
        raise UnknownStepSizesError(
            f"{rule} needs the sizes of client {x.worker}'s local steps, and its contribution has no step_size_sum "
            "(an adaptive local optimiser, or a workload that does not say); local SGD would do"
        )
    return x.step_size_sum
