"""How a run of a cluster goes: when it ends, and what its measures leave out."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fedasync.core.bounds import check_integer, check_real, check_type
from fedasync.publication.modelled import ModelledDivergence


@dataclass(frozen=True)
class ClusterSettings:
    """When a run stops (whichever limit comes first), and how many versions at its start the measures leave out.

    ``updates`` counts prompt groups that were trained, ``versions`` committed steps. ``divergence`` says how far the
    trained policy moves from the published one, for publication rules that measure it. ``keep_rollouts`` keeps the
    table of answers, a row an answer. Where something is learnt, every ``evaluate_every``-th version is evaluated
    (None: none) on ``evaluation_prompts`` held-out prompts.
    """

    versions: int | None = None
    time_s: float | None = None
    updates: int | None = None
    warm_up_versions: int = 0
    divergence: ModelledDivergence | None = None
    keep_rollouts: bool = True
    evaluate_every: int | None = None
    evaluation_prompts: int = 64

    def __post_init__(self) -> None:
        if self.versions is None and self.time_s is None and self.updates is None:
            raise ValueError("a run needs an end: give versions, time_s, or updates")
        if self.time_s is not None:
            check_real("time_s", self.time_s, 0, inf, above=True)
        for name in ("versions", "updates", "evaluate_every"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_integer("warm_up_versions", self.warm_up_versions, 0)
        check_integer("evaluation_prompts", self.evaluation_prompts, 1)
        check_type("keep_rollouts", self.keep_rollouts, bool, "true or false")
        if self.divergence is not None:
            check_type("divergence", self.divergence, ModelledDivergence, "a ModelledDivergence")
        if self.updates is not None and self.warm_up_versions >= self.updates:
            raise ValueError(
                f"warm_up_versions = {self.warm_up_versions} leaves nothing of {self.updates} updates to measure, "
                f"for a version takes at least one; 0 to {self.updates - 1} would do"
            )
        if self.versions is not None and self.warm_up_versions >= self.versions:
            raise ValueError(
                f"warm_up_versions = {self.warm_up_versions} leaves nothing of {self.versions} versions to measure; "
                f"0 to {self.versions - 1} would do"
            )
