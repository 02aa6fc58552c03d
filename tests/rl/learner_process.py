"""One rank of a learner over processes: trains, saves, restores, and writes what came of it into a folder.

python learner_process.py FOLDER ddp|fsdp language|critic|control
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from fedasync.rl.learner import Learner
from fedasync.rl.objective import Objective
from fedasync.rl.optimiser import Optimiser
from fedasync.rl.placement import accelerator_of
from fedasync.rl.policy import weights_of
from fedasync.rl.sampling import Sampling
from tests.rl.tiny import Llama, Mlp, Walk, groups, problem

VERSIONS, SEED, NAMES = 1, 0, ("kl", "disagreement", "feature_cosine", "distance")


def problem_of(kind: str) -> Any:
    """Minibatches of several micro-batches, one of which not every rank has."""
    optimiser = Optimiser(1e-2, minibatches=2, epochs=2, microbatch_tokens=45)
    if kind == "control":
        return problem(
            environment=Walk(),
            policy=Mlp(torch.float64),
            optimiser=optimiser,
            objective=Objective(loss="coupled", advantages="gae"),
        )
    if kind == "critic":
        return problem(
            policy=Llama(2, torch.float64, critic=True),
            optimiser=optimiser,
            objective=Objective(loss="coupled", advantages="gae", normalise="batch", value_clip=0.1),
        )
    return problem(
        policy=Llama(2, torch.float64),
        optimiser=optimiser,
        objective=Objective(loss="decoupled", normalise="batch", kl_coefficient=0.1),
        sampling=Sampling(max_new_tokens=6, temperature=0.7),
    )


def batch_of(kind: str, version: int) -> Any:
    return groups(version, 3, 3, control=kind == "control")


def main(folder: Path, how: str, kind: str) -> None:
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    accelerator = accelerator_of(cpu=True, sharded=how == "fsdp")
    learner = Learner(problem_of(kind), SEED, accelerator=accelerator)
    published = learner.weights()
    told = [learner.train(batch_of(kind, version)) for version in range(VERSIONS)]
    learner.save(folder / "saved")
    measured = learner.measure(NAMES, published)
    after = learner.train(batch_of(kind, VERSIONS))
    weights = learner.weights()
    learner.restore(folder / "saved")
    again = learner.train(batch_of(kind, VERSIONS))
    same = after == again and all(torch.equal(each, weights[name]) for name, each in learner.weights().items())
    whole = weights_of(learner.whole_policy().module)
    same = same and all(torch.equal(whole[name], each) for name, each in learner.weights().items())
    about = {
        "kind": str(accelerator.distributed_type),
        "ranks": learner.placement.ranks,
        "metrics": [*told, after],
        "measured": measured,
        "same_after_restore": same,
        "wrapped": type(learner.placement.module).__name__,
    }
    (folder / f"rank{learner.placement.rank}.json").write_text(json.dumps(about))
    save_file(weights, folder / f"rank{learner.placement.rank}.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
