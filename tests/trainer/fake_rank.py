"""``python -m fake_rank``: a trainer rank with the learner that counts."""

from __future__ import annotations

from fakes import FakeLearner

from fedasync.trainer.child import rank_process
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.rank import Evaluate, Learner


def make(settings: ChildSettings) -> tuple[Learner, Evaluate]:
    learner = FakeLearner(**settings.problem.get("learner", {}))
    return learner, lambda: {"reward": learner.weight}


if __name__ == "__main__":
    rank_process(make)
