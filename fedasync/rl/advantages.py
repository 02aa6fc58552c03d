"""How much better an answer was than could be expected: numpy, float64, before anything is cut into batches.

Baselines of a group are those of the answers that came: a group that is short of some (``partial_groups.AllowShort``)
has other advantages than the full one would have had, and is counted. An answer that failed never counts as reward 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedasync.rl.objective import Estimator, Objective, Std
from fedasync.rl.trajectory import Group, Trajectory

Float64 = NDArray[np.float64]


class Advantages(NamedTuple):
    """Of each group, of each of its trajectories, [T]; 0 at tokens that were not generated."""

    values: list[list[Float64]]
    returns: list[list[Float64]] | None
    """What the critic should have said, with ``gae`` and values; None otherwise."""
    stats: dict[str, float]
    """``groups``; of them ``groups_of_one`` answer, ``groups_equal`` (several answers of one reward) and
    ``groups_short``; ``answers_missing``; ``reward_mean``; ``advantage_mean`` and ``advantage_std`` over tokens."""


def advantages(
    groups: Sequence[Group], objective: Objective, values: Sequence[Sequence[Float64]] | None = None
) -> Advantages:
    """Advantages of a batch of groups.

    ``values`` are a critic's, for ``gae``: [T + 1] of each trajectory, of what the policy saw before each token and at
    the end. Without them ``gae`` has the critic that always says 0. Raises ValueError for a reward that is not finite.
    """
    for group in groups:
        for index, reward in enumerate(group.rewards):
            if not np.isfinite(reward):
                raise ValueError(
                    f"advantages: lease {group.lease}, answer {index}: the reward is {reward}; a finite one would do "
                    "(an answer that failed is left out of its group)"
                )
    returns: list[list[Float64]] | None = None
    if objective.advantages == "gae":
        gamma, lambda_ = objective.option("gamma"), objective.option("gae_lambda")
        found = []
        returns = []
        for at, group in enumerate(groups):
            said = [np.zeros(len(each) + 1) for each in group.trajectories] if values is None else values[at]
            both = [_of_trajectory(t, v, gamma, lambda_) for t, v in zip(group.trajectories, said, strict=True)]
            found.append([one for one, _ in both])
            returns.append([other for _, other in both])
        if values is None:
            returns = None
    else:
        spread, epsilon = objective.option("std"), objective.option("std_epsilon")
        found = [_of_group(group, objective.advantages, spread, epsilon) for group in groups]
    chosen = [[each.generated for each in group.trajectories] for group in groups]
    if objective.normalise == "batch":
        found = _normalised(found, chosen, objective.option("std"), objective.option("std_epsilon"))
    return Advantages(found, returns, _stats(groups, found, chosen))


def group_advantages(
    rewards: Float64, estimator: Estimator, *, tokens: Float64 | None = None, std: Std = "sample", epsilon: float = 1e-6
) -> Float64:
    """Advantages of a group's answers [n] from their rewards.

    "grpo": (R − mean) / (std + ε), Shao et al. 2024. "dr_grpo": R − mean, Liu et al. 2025. "rloo": R − mean of the
    others, Ahmadian et al. 2024. "opo": R − Σ tokens R / Σ tokens, with the ``tokens`` of each answer, Hao et al. 2025.
    "reward" and "gae": R. But for these two, equal rewards give exactly 0, and so does a single answer, which has
    nothing to be compared with.
    """
    rewards = np.asarray(rewards, np.float64)
    if estimator in ("reward", "gae"):
        return rewards
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return np.zeros_like(rewards)
    if estimator == "opo":
        if tokens is None:
            raise ValueError("advantages: 'opo' needs the tokens of each answer")
        lengths = np.asarray(tokens, np.float64)
        return np.asarray(rewards - lengths @ rewards / max(lengths.sum(), 1.0))
    centred: Float64 = rewards - rewards.mean()
    if estimator == "rloo":
        return np.asarray(centred * (len(rewards) / (len(rewards) - 1)))
    if estimator == "grpo":
        return np.asarray(centred / (rewards.std(ddof=_degrees(std)) + epsilon))
    return centred


def gae(
    rewards: Float64, values: Float64, gamma: float = 1.0, lambda_: float = 1.0, *, truncated: bool = False
) -> Float64:
    """Generalised advantage estimates [T] of one episode (Schulman et al. 2016, Eq. 16).

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t, from rewards [T] and values [T + 1]. After the last step
    nothing comes, V_T = 0, unless the episode was ``truncated``: then the critic's own value of the end stands for it.
    """
    if len(values) != len(rewards) + 1:
        raise ValueError(
            f"advantages: gae of {len(rewards)} rewards needs {len(rewards) + 1} values, got {len(values)}"
        )
    values = np.array(values, np.float64)
    if not truncated:
        values[-1] = 0.0
    deltas = rewards + gamma * values[1:] - values[:-1]
    found = np.zeros(len(deltas))
    ahead = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        ahead = deltas[t] + gamma * lambda_ * ahead
        found[t] = ahead
    return found


def normalised(values: Float64, std: Std = "sample", epsilon: float = 1e-6) -> Float64:
    """(A − mean) / (std + ε); exactly 0 where all are equal."""
    if not len(values) or (values == values[0]).all():
        return np.zeros_like(values)
    return np.asarray((values - values.mean()) / (values.std(ddof=_degrees(std)) + epsilon))


def _degrees(std: Std) -> int:
    return 1 if std == "sample" else 0


def _of_group(group: Group, estimator: Estimator, std: Std, epsilon: float) -> list[Float64]:
    lengths = np.array([each.generated_tokens for each in group.trajectories], np.float64)
    of_answers = group_advantages(group.rewards, estimator, tokens=lengths, std=std, epsilon=epsilon)
    return [
        np.where(each.generated, advantage, 0.0) for each, advantage in zip(group.trajectories, of_answers, strict=True)
    ]


def _of_trajectory(trajectory: Trajectory, values: Float64, gamma: float, lambda_: float) -> tuple[Float64, Float64]:
    """Steps are the generated tokens: what the environment said in between takes no time, and a reward that came
    there is that of the generated token before it (of the first one, where none was before)."""
    values = np.asarray(values, np.float64)
    if values.shape != (len(trajectory) + 1,):
        raise ValueError(
            f"advantages: values of {len(trajectory)} tokens are {list(values.shape)}; [{len(trajectory) + 1}] would do"
        )
    steps = np.flatnonzero(trajectory.generated)
    found, returns = np.zeros(len(trajectory)), np.zeros(len(trajectory))
    if len(steps):
        at = np.maximum(np.cumsum(trajectory.generated) - 1, 0)
        rewards = np.zeros(len(steps))
        np.add.at(rewards, at, np.asarray(trajectory.rewards, np.float64))
        before = np.append(values[steps], values[-1])
        truncated = trajectory.finish in ("length", "context")
        found[steps] = gae(rewards, before, gamma, lambda_, truncated=truncated)
        returns[steps] = found[steps] + before[:-1]
    return found, returns


def _normalised(
    found: list[list[Float64]], chosen: list[list[NDArray[np.bool_]]], std: Std, epsilon: float
) -> list[list[Float64]]:
    flat = normalised(_flat(found, chosen), std, epsilon)
    at = 0
    told: list[list[Float64]] = []
    for group, masks in zip(found, chosen, strict=True):
        told.append([])
        for each, mask in zip(group, masks, strict=True):
            one = np.zeros_like(each)
            count = int(np.count_nonzero(mask))
            one[mask] = flat[at : at + count]
            at += count
            told[-1].append(one)
    return told


def _flat(found: list[list[Float64]], chosen: list[list[NDArray[np.bool_]]]) -> Float64:
    """Those of generated tokens, end to end."""
    parts = [
        each[mask] for group, masks in zip(found, chosen, strict=True) for each, mask in zip(group, masks, strict=True)
    ]
    return np.concatenate([np.zeros(0), *parts])


def equal_groups(groups: Sequence[Group]) -> int:
    """Groups of several answers that earned the same, which have nothing to tell apart."""
    rewards = (group.rewards for group in groups)
    return sum(len(each) > 1 and bool((each == each[0]).all()) for each in rewards)


def _stats(
    groups: Sequence[Group], found: list[list[Float64]], chosen: list[list[NDArray[np.bool_]]]
) -> dict[str, float]:
    flat = _flat(found, chosen)
    rewards = [group.rewards for group in groups]
    every = np.concatenate([np.zeros(0), *rewards])
    return {
        "groups": len(groups),
        "groups_of_one": sum(len(each) == 1 for each in rewards),
        "groups_equal": equal_groups(groups),
        "groups_short": sum(len(group.trajectories) < group.asked for group in groups),
        "answers_missing": sum(group.asked - len(group.trajectories) for group in groups),
        "reward_mean": float(every.mean()) if len(every) else 0.0,
        "advantage_mean": float(flat.mean()) if len(flat) else 0.0,
        "advantage_std": float(flat.std()) if len(flat) else 0.0,
    }
