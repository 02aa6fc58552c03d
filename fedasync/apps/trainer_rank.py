"""A trainer rank's process: ``python -m fedasync.apps.trainer_rank``, also under torchrun or ``accelerate launch``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fedasync.trainer.child import rank_process

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fedasync.rl.language_policy import LanguagePolicy
    from fedasync.rl.optimiser import Precision
    from fedasync.trainer.child_settings import ChildSettings
    from fedasync.trainer.rank import Evaluate, Learner


def learner(settings: ChildSettings) -> tuple[Learner, Evaluate]:
    """Of the problem that the settings describe, and its evaluation. Raises ValueError for one that cannot be."""
    from fedasync.rl.evaluation import evaluate
    from fedasync.rl.learner import Learner
    from fedasync.studies.build import build_problem

    problem = build_problem(dict(settings.problem), settings.where)
    made = Learner(problem, settings.seed, accelerator=_accelerator(problem.optimiser.precision, settings))
    place = made.placement
    if place.ranks > 1:
        print(f"rank {place.rank} of {place.ranks}: {type(place.module).__name__} on {place.device}")

    def measures() -> Mapping[str, float]:
        policy = cast("LanguagePolicy", made.whole_policy())  # or a ControlPolicy: the environment tells
        return evaluate(
            policy,
            problem.environment,
            problem.sampling,
            settings.evaluation_prompts,
            reward_timeout_s=settings.reward_timeout_s,
        )

    return made, measures


def _accelerator(precision: Precision, settings: ChildSettings) -> Accelerator | None:
    """Accelerate's, where there is anything for it to do; without, it need not be loaded."""
    import torch

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not (several or precision != "no" or settings.tracker or torch.cuda.is_available()):
        return None
    from fedasync.rl.placement import accelerator_of

    folder = None if settings.tracker is None else Path(settings.tracker_folder)
    return accelerator_of(
        precision,
        cpu=not torch.cuda.is_available(),
        sharded=settings.sharded,
        log_with=settings.tracker,
        folder=folder,
    )


if __name__ == "__main__":
    rank_process(learner)
